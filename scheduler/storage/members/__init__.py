"""Storage of members, their projects, and quarantined stage servers."""
