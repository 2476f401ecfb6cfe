"""The scheduler's HTTP port: metrics, health, targets to scrape, and the page for people."""
