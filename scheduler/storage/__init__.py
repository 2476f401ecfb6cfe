"""Keeps what must outlive the process: the database, files of jobs, logs, checkpoints."""
