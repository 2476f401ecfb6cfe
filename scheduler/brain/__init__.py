"""The brain of one job and of the fleet: it decides and does nothing, so every decision can be replayed.

A job's brain is `JobBrain`: inputs go in through its `step`, outputs come out. `fleet` decides about all peers and
jobs.
"""
