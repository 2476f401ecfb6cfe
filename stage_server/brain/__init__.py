"""Decides, and does nothing: what is ready to compute, what is held, what a joiner still lacks."""
