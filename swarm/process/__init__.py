"""Common to every process of ours: start, log, serve metrics, end."""
