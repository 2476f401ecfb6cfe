"""The islands of a job: its places, their timelines, and the brain that combines one brain per island.

    place    0 1 | 2 3      two islands of two stages: the allocator sees four places, each with replicas of its own
    stage    0 1 | 0 1
    island    0  |  1

A job without outer steps has one island: its places are its stages, and its timelines the island's.

Decision: docs/decisions/067.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from scheduler.brain.inputs import ReplicaRecord, Resumed
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.brain.islands.roster import still_at_work
from scheduler.brain.islands.rows import Rows
from scheduler.brain.lineage import row_counts
from scheduler.brain.outputs import CommitRow, Exchanged
from scheduler.brain.settings import NO_REBALANCING, BrainSettings
from scheduler.jobs.brain_settings import brain_settings
from scheduler.jobs.driver import Brain
from scheduler.jobs.job import Job
from scheduler.storage.database import Database
from scheduler.storage.job_record import JobRecord
from swarm.checkpoint.reader import files_for
from swarm.data.batches import Batches
from swarm.job.islands import course_of, island_of, island_spec, island_timeline, job_timeline, outer_courses
from swarm.job.leases import Leases
from swarm.job.spec import JobSpec
from swarm.types import PeerId
from swarm.wire.messages import StateFile, StoreHeader


def stage_at(spec: JobSpec, place: int) -> int:
    return place % len(spec.split)


def place_of(spec: JobSpec, timeline: int, stage: int) -> int:
    """The place of a replica, from its timeline and its stage."""
    return island_of(spec, timeline) * len(spec.split) + stage


@dataclass(frozen=True, slots=True)
class Life:
    """The newest life of an island: its timeline, and the version with which it began."""

    timeline: int
    first_version: int


def timelines(job: Job) -> list[int]:
    """The timelines of the job's islands."""
    if isinstance(job.brain, IslandsBrain):
        return list(job.brain.timelines)
    return [island_timeline(job.spec, job.record.timeline, island) for island in range(job.spec.island_count)]


def timeline_of(job: Job, peer: PeerId) -> int:
    """The timeline on which a peer serves the job."""
    return timelines(job)[island_at(job, peer)]


def island_at(job: Job, peer: PeerId) -> int:
    """The island in which a peer serves the job, or joins it."""
    island = job.brain.island_of(peer) if isinstance(job.brain, IslandsBrain) else None
    return job.record.peers.get(peer, 0) // len(job.spec.split) if island is None else island


def place_at(job: Job, peer: PeerId, stage: int) -> int:
    """The place of a peer that serves a stage of the job, or joins it; the record has it once the peer is admitted."""
    return job.record.peers.get(peer, island_at(job, peer) * len(job.spec.split) + stage)


def by_island(spec: JobSpec, peers: Mapping[PeerId, int]) -> list[dict[PeerId, int]]:
    """The peers of each island, with their stages, of peers with their places."""
    stages = len(spec.split)
    return [
        {peer: place % stages for peer, place in peers.items() if place // stages == island}
        for island in range(spec.island_count)
    ]


def replicas_by_island(
    spec: JobSpec, places: Mapping[PeerId, int], replicas: Sequence[ReplicaRecord]
) -> list[tuple[ReplicaRecord, ...]]:
    """The replicas of each island, in the order given."""
    members = by_island(spec, places)
    return [tuple(replica for replica in replicas if replica.peer in peers) for peers in members]


def of_job(spec: JobSpec, header: StoreHeader, brain: Brain) -> StoreHeader:
    """A replica's report on a file of its island, in the job's words: its stage is a place, or -1 if there is none.

    Islands at work are numbered without gaps there.
    """
    version = course_of(spec, header.timeline).inner_steps(header.version)
    part = brain.part_of(header.timeline) if isinstance(brain, IslandsBrain) else 0
    exists = 0 <= header.stage < len(spec.split) and part >= 0
    place = part * len(spec.split) + header.stage if exists else -1
    return replace(header, timeline=job_timeline(spec, header.timeline), version=version, stage=place)


async def rows_made(database: Database, record: JobRecord, spec: JobSpec, together: Rows) -> list[CommitRow]:
    """The steps that the islands of a job made on one of its timelines, in order, as far as they still count."""
    began = [fork for fork in await database.forks(record.id) if job_timeline(spec, fork.timeline) == together.timeline]
    lives = [island_timeline(spec, together.timeline, island) for island in range(spec.island_count)]
    lives += [fork.timeline for fork in began]
    rows = [row for life in lives for row in await database.rows(record.id, life)]
    has_begun = {island_of(spec, row.timeline) for row in rows}
    absent = _absent(record, spec, together.timeline) - has_begun
    made = together.rebuild(rows, began, absent, await database.exchanges(record.id, together.timeline))
    for cut in await database.leases(record.id, island_timeline(spec, together.timeline, 0)):
        together.lease(cut)
    return [row for row in made if row_counts(row.timeline, row.step, record.first_steps)]


def _absent(record: JobRecord, spec: JobSpec, timeline: int) -> set[int]:
    """The islands of which the job has no stage server, if this is its present timeline and it has any."""
    if timeline != record.timeline or not record.peers:
        return set()
    return {island for island, peers in enumerate(by_island(spec, record.peers)) if not peers}


async def lives_of(database: Database, record: JobRecord, spec: JobSpec) -> list[Life]:
    """The newest life of each island of a job that an earlier start of the scheduler left at work."""
    forks = [fork for fork in await database.forks(record.id) if job_timeline(spec, fork.timeline) == record.timeline]
    began = {island_of(spec, fork.timeline): fork for fork in forks}  # the newest of each comes last
    lives = []
    for island in range(spec.island_count):
        timeline = island_timeline(spec, record.timeline, island)
        life = Life(timeline, course_of(spec, timeline).version_after(record.first_steps[-1]))
        lives.append(life if island not in began else Life(began[island].timeline, began[island].version))
    return lives


def at_work(
    spec: JobSpec,
    resumed: Sequence[Resumed],
    first_step: int = 0,
    exchanges: Sequence[Exchanged] = (),
    timelines: Sequence[int] = (),
) -> tuple[Resumed | None, ...]:
    """How each island goes on after a restart of the scheduler, on a timeline from `first_step`; None: it is lost."""
    paths = outer_courses(spec)
    return still_at_work(paths, paths[0].version_after(first_step), resumed, exchanges, timelines)


def islands_brain(
    record: JobRecord,
    spec: JobSpec,
    epoch: int,
    batches: Batches,
    files: Sequence[StateFile],
    skipped_in_a_row: int,
    rng: Random,
    lives: Sequence[Life] = (),
    leases: Leases | None = None,
) -> IslandsBrain:
    """The brain of a job with outer steps. Only one island evaluates, as all hold the same outer weights.

    `lives`: the islands' lives, if the job was at work before the scheduler was restarted. `leases`: as `batches` has
    them, where they follow speed.
    """
    whole = brain_settings(record, island_spec(spec), epoch, batches, (), skipped_in_a_row)
    paths = outer_courses(spec, leases)

    def of(island: int) -> BrainSettings:
        first = Life(
            island_timeline(spec, record.timeline, island), paths[island].version_after(record.first_steps[-1])
        )
        life = lives[island] if lives else first
        return replace(
            whole,
            timeline=life.timeline,
            steps=paths[island].steps,
            first_step=life.first_version,
            files=files_for(files, island) if life == first else (),
            evaluates=island == 0,
            rebalance=replace(NO_REBALANCING, min_replicas=spec.limits.min_replicas),
        )

    patience = spec.outer.patience if isinstance(spec.outer.patience, float) else math.inf
    brains, silence_s = [of(island) for island in range(len(paths))], spec.limits.no_progress_s
    return IslandsBrain(brains, paths, rng, spec.islands.min, patience, silence_s)
