"""What all parts of one job's brain share: who serves what, which steps are open, who accumulated what."""
