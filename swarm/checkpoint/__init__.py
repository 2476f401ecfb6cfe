"""The format of checkpoints, and where they are kept."""
