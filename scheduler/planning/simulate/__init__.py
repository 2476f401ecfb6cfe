"""Says what becomes of a job in hours of deaths: `swarm simulate`."""
