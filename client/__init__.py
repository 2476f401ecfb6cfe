"""The `swarm` command."""
