"""Collects, publishes and finds the checkpoints of jobs."""
