"""The topics of the broker. All messages are hints: losing one breaks no invariant."""

from __future__ import annotations

SCHEDULER = "swarm/v1/scheduler"
PEERS = "swarm/v1/peers/+"
JOBS = "swarm/v1/jobs/+"


def scheduler() -> str:
    """Where the scheduler announces its address (retained)."""
    return SCHEDULER


def peer(peer_id: str) -> str:
    """Where a stage server announces that it is here (retained, with a last will)."""
    return f"swarm/v1/peers/{_level(peer_id)}"


def job(job_id: str) -> str:
    """Where the scheduler publishes events of a job."""
    return f"swarm/v1/jobs/{_level(job_id)}"


def _level(name: str) -> str:
    assert name, "a topic level must not be empty"
    assert not set(name) & set("/+#\0"), f"{name!r} is not one topic level"
    return name
