"""Rounds of averaging, commit rows, and the digests that replicas must agree on."""
