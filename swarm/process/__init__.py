"""What every process of ours does: start, log, serve metrics, end."""
