"""Event models and virtual time: what the rules would do, without a machine in the way."""
