"""Answers those who join, who they are and what they may do: tokens, certificates, passes, projects, relays."""
