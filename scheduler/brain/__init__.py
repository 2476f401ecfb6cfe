"""Decides, and does nothing: inputs in, outputs out, on the standard library alone."""
