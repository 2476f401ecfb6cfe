"""What the scheduler serves over HTTP: metrics, health, what there is to scrape, and the page for people."""
