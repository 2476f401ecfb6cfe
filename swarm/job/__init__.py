"""What a job file means; no torch."""
