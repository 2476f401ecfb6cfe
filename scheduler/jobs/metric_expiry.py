"""Removes series of /metrics: those of a job an hour after its end, those of a peer ten minutes after it left.

Until then scrapers and people can still see the last values. Kept forever, they would grow with every job and peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Set

from scheduler.brain.fleet.membership import Membership
from scheduler.jobs.commands import Jobs
from scheduler.metrics import SchedulerMetrics
from swarm.limits import UNUSED_SHARD_KEPT_S
from swarm.types import PeerState

JOB_KEPT_S = 3600.0
PEER_KEPT_S = 600.0
TIDY_S = 60.0


class MetricExpiry:
    """Remembers since when each peer has been away."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def over(self, known: Iterable[str], here: Set[str], now_s: float) -> list[str]:
        """The known peers that have been away for long enough; must be called regularly."""
        self._since_s = {peer: self._since_s.get(peer, now_s) for peer in known if peer not in here}
        return sorted(peer for peer, since_s in self._since_s.items() if now_s - since_s >= PEER_KEPT_S)


async def tidy(jobs: Jobs, membership: Membership, metrics: SchedulerMetrics, wall_s: Callable[[], float]) -> None:
    """Remove expired series, once a minute, forever."""
    absences = MetricExpiry()
    loop = asyncio.get_running_loop()
    while True:
        for job in jobs.registry.all():
            record = job.record
            is_over = record.state.is_final and wall_s() - record.since_unix_s >= JOB_KEPT_S
            if is_over and record.id in metrics.known_jobs:
                metrics.forget_job(record.id)
        here = {peer.hello.peer for peer in membership.peers() if peer.state is not PeerState.GONE}
        for name in absences.over(metrics.known_peers, here, loop.time()):
            metrics.forget_peer(name)
        files, records = jobs.stores.files, [job.record for job in jobs.registry.all()]
        used = {files.shard(record.project, sha256) for record in records for sha256 in record.tokens.shards}
        used |= {files.shard(record.project, file.sha256) for record in records for file in record.files}
        await files.remove_unused(used, wall_s() - UNUSED_SHARD_KEPT_S)
        await asyncio.sleep(TIDY_S)
