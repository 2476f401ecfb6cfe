"""What could keep a swarm from working, seen from one machine."""
