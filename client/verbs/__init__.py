"""One module for each verb of the `swarm` command."""
