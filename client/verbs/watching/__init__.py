"""Verbs that only look: at jobs, stage servers, steps and logs."""
