"""What a swarm is compared with: one process, schedules of torch, hivemind."""
