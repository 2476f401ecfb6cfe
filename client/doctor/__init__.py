"""Finds, from one machine, what keeps a swarm from working."""
