"""Keeps who belongs to the swarm, their projects, and who computed wrong numbers."""
