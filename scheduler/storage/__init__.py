"""Storage that outlives the process: the database, files of jobs, logs, checkpoints."""
