"""Rounds of averaging: of a unit among replicas, and of outer steps among islands."""
