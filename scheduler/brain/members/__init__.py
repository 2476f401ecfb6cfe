"""Decides who becomes a member of the swarm, and which calls and jobs a member may use."""
