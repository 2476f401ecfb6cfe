"""The session with the scheduler."""
