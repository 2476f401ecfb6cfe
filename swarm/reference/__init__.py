"""The same training in one process; `python -m swarm.reference` is `swarm train-local`."""
