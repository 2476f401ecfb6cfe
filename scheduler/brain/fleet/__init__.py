"""Decides across all peers and jobs: which peers are here, which stages fit them, which job gets an idle one."""
