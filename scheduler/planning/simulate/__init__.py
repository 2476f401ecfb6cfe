"""Predicts how a job does while machines fail: `swarm simulate`."""
