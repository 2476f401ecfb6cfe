"""Two sites with a slow link between them, measured with real processes."""
