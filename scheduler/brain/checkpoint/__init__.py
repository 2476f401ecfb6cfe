"""Decides when a checkpoint is taken, and which replicas hand over its parts."""
