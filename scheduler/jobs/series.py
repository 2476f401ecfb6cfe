"""The series of /metrics that no event sets or removes.

Speeds and deadlines change with every hop, so they are looked up now and then instead. Series of a job are removed an
hour after its end, series of a peer ten minutes after it left. Until then scrapers and people see the last values; kept
forever, they would grow with every job and peer. The broker's retained messages about a job go with its series.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from scheduler.brain.fleet.membership import Membership
from scheduler.jobs.job import Job
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.metrics import IslandFigures, SchedulerMetrics
from scheduler.storage.executor import run_blocking
from scheduler.storage.job_record import JobRecord
from swarm.types import Direction, JobId, PeerState

JOB_KEPT_S = 3600.0
PEER_KEPT_S = 600.0
TIDY_S = 60.0
SHOW_S = 2.0


def is_over(record: JobRecord, now_unix_s: float) -> bool:
    """Whether the job ended so long ago that its series can go."""
    return record.state.is_final and now_unix_s - record.since_unix_s >= JOB_KEPT_S


async def show(
    registry: JobRegistry, ports: SchedulerPorts, folder: Path, look: Callable[[Job], None] | None = None
) -> None:
    """Keep speeds, the event loop's lateness and free bytes in `folder` up to date; `look` sees each job. Forever."""
    loop, metrics = asyncio.get_running_loop(), ports.metrics
    late_s = 0.0
    while True:
        metrics.process_health(late_s, await run_blocking(ports.stores.threads, partial(_free_bytes, folder)))
        for job in registry.all():
            _show_speeds(job, metrics)
            if look is not None:
                look(job)
        due_s = loop.time() + SHOW_S
        await asyncio.sleep(SHOW_S)
        late_s = max(0.0, loop.time() - due_s)


def _free_bytes(folder: Path) -> int:
    """0 if unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _show_speeds(job: Job, metrics: SchedulerMetrics) -> None:
    brain, spec = job.brain, job.spec
    if brain is None:
        metrics.at_work_no_more(job.record.id)
        return
    tokens = spec.training.global_batch_sequences * spec.data.sequence_length / spec.training.microbatches
    stages: list[dict[str, float]] = [
        {peer: tokens / pace_s for peer in peers if (pace_s := brain.pace_s(peer)) > 0.0}
        for peers in job.stages.values()
    ]
    deadlines_s = {
        (stage, direction.value): brain.deadline_s(stage, direction)
        for stage in range(len(stages))
        for direction in Direction
    }
    metrics.speeds(job.record.id, stages, deadlines_s)
    situation = job.situation() if spec.has_outer_steps else None
    if situation is not None:
        figures = [
            IslandFigures(
                island.state,
                island.steps,
                island.exchanges,
                sum(map(len, island.peers)),
                island.waited_s,
                island.relieved,
                island.late,
            )
            for island in situation.islands
        ]
        metrics.islands(job.record.id, figures, situation.outer_rounds)


async def tidy(registry: JobRegistry, membership: Membership, ports: SchedulerPorts) -> None:
    """Remove expired series, and messages about jobs that the broker retains; once a minute, forever."""
    silent, away_s = set[JobId](), dict[str, float]()  # since when each peer has been away
    loop, metrics = asyncio.get_running_loop(), ports.metrics
    while True:
        over = {job.record.id for job in registry.all() if is_over(job.record, ports.wall_s())}
        for job_id in over - silent:
            metrics.forget_job(job_id)
            ports.announcer.job_removed(job_id)
        silent = over
        here = {peer.hello.peer for peer in membership.peers() if peer.state is not PeerState.GONE}
        now_s = loop.time()
        away_s = {peer: away_s.get(peer, now_s) for peer in metrics.known_peers if peer not in here}
        for peer, since_s in away_s.items():
            if now_s - since_s >= PEER_KEPT_S:
                metrics.forget_peer(peer)
        await asyncio.sleep(TIDY_S)
