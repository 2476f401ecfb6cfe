"""Virtual time, and a network with weather."""
