"""The sections of a job file that have modules of their own; `swarm.job.spec` has the others."""
