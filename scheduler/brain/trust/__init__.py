"""Checks that replicas compute correctly: compares their reports with the results of others."""
