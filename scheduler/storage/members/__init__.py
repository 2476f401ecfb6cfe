"""Storage of members and of quarantined stage servers."""
