"""Routes microbatches over replicas, and reroutes those that take too long."""
