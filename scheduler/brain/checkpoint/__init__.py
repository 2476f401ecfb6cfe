"""When a checkpoint is taken, and who hands over which part of it."""
