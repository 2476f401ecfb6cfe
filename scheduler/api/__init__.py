"""Answers clients and stage servers."""
