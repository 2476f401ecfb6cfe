"""All peers and all jobs: who is here, what fits where, who gets idle peers."""
