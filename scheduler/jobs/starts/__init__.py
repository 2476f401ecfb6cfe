"""Finds where a job begins, and where it begins again after a stall or a restart of the scheduler."""
