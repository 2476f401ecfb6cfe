"""How replicas come, load, move between stages, return and leave."""
