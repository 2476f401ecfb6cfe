"""A stage server: holds one replica of one stage of a model and computes its microbatches."""
