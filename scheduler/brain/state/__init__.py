"""The state that all parts of one job's brain share: the replicas, the open steps and the ledger."""
