"""Rounds of averaging: those of a unit among replicas, and those of outer steps among islands."""
