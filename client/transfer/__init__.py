"""What travels between a client and the scheduler as bytes: jobs with their data, and models."""
