"""The job file and everything that follows from it alone; no torch."""
