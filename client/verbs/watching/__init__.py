"""Verbs that only look: at jobs, at what runs, at what a step brought."""
