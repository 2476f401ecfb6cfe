"""Removes series of /metrics: those of a job an hour after its end, those of a peer ten minutes after it left.

Until then scrapers and people can still see the last values. Kept forever, they would grow with every job and peer.
What the broker retains about a job goes with its series.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Set

from scheduler.brain.fleet.membership import Membership
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.storage.database import JobRecord
from swarm.types import JobId, PeerState

JOB_KEPT_S = 3600.0
PEER_KEPT_S = 600.0
TIDY_S = 60.0


def is_over(record: JobRecord, now_unix_s: float) -> bool:
    """Whether the job ended so long ago that nobody looks at its series."""
    return record.state.is_final and now_unix_s - record.since_unix_s >= JOB_KEPT_S


class MetricExpiry:
    """Remembers since when each peer has been away."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def over(self, known: Iterable[str], here: Set[str], now_s: float) -> list[str]:
        """The known peers that have been away for long enough; must be called regularly."""
        self._since_s = {peer: self._since_s.get(peer, now_s) for peer in known if peer not in here}
        return sorted(peer for peer, since_s in self._since_s.items() if now_s - since_s >= PEER_KEPT_S)


async def tidy(registry: JobRegistry, membership: Membership, ports: SchedulerPorts) -> None:
    """Remove expired series, and messages about jobs that the broker retains; once a minute, forever."""
    absences, silent = MetricExpiry(), set[JobId]()
    loop, metrics = asyncio.get_running_loop(), ports.metrics
    while True:
        over = {job.record.id for job in registry.all() if is_over(job.record, ports.wall_s())}
        for job_id in over - silent:
            metrics.forget_job(job_id)
            ports.announcer.job_removed(job_id)
        silent = over
        here = {peer.hello.peer for peer in membership.peers() if peer.state is not PeerState.GONE}
        for name in absences.over(metrics.known_peers, here, loop.time()):
            metrics.forget_peer(name)
        await asyncio.sleep(TIDY_S)
