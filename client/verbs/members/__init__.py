"""Verbs about who belongs to the swarm, and what he may do."""
