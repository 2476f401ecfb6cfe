"""When a checkpoint is taken, and which replica hands over which part of it."""
