"""Decides who belongs to the swarm, and what he may ask for."""
