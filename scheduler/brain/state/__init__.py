"""What all parts of one job's brain share: the replicas, the open steps, and what each replica accumulated."""
