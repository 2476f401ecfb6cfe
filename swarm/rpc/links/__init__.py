"""Tensors and state from stage server to stage server, directly or through a relay."""
