"""Across all peers and jobs: which peers are here, what fits where, which job gets an idle peer."""
