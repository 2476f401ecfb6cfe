"""What scheduler, stage servers and client share."""
