"""Verbs about members of the swarm and their rights."""
