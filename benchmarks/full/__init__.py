"""All benchmarks with an aim, in one table: which there are, how they run, what they found."""
