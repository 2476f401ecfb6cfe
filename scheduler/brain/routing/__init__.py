"""Which replica computes which microbatch, and what becomes of one that takes too long."""
