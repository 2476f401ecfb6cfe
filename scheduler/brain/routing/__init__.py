"""Routes microbatches over replicas, and reroutes late ones."""
