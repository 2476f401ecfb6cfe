"""The scheduler: routes microbatches, counts gradients, commits steps and answers the `swarm` command."""
