"""Real processes, measured."""
