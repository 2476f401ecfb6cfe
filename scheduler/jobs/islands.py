"""The islands of a job: its places, their timelines, and the brain that combines one brain per island.

    place    0 1 | 2 3      two islands of two stages: the allocator sees four places, each with replicas of its own
    stage    0 1 | 0 1
    island    0  |  1

A job without outer steps has one island: its places are its stages, and its timelines those of the island.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.brain.islands.rows import Rows
from scheduler.brain.lineage import row_counts
from scheduler.brain.outputs import CommitRow
from scheduler.brain.settings import NO_REBALANCING, BrainSettings
from scheduler.jobs.job import Job, split_of
from scheduler.jobs.starts.settings import brain_settings
from scheduler.storage.database import Database, JobRecord
from swarm.checkpoint.islands import files_for
from swarm.data.batches import Batches
from swarm.job.course import OuterCourse
from swarm.job.islands import course_of, courses, island_of, island_spec, island_timeline, job_timeline
from swarm.job.spec import JobSpec
from swarm.messages import StateFile, StoreHeader
from swarm.types import PeerId


def stage_at(spec: JobSpec, place: int) -> int:
    return place % len(split_of(spec))


def place_of(spec: JobSpec, timeline: int, stage: int) -> int:
    """The place of a replica, from its timeline and its stage."""
    return island_of(spec, timeline) * len(split_of(spec)) + stage


def timelines(job: Job) -> list[int]:
    """The timelines of the job's islands."""
    return [island_timeline(job.spec, job.record.timeline, island) for island in range(job.spec.islands.count)]


def timeline_of(job: Job, peer: PeerId) -> int:
    """The timeline on which a peer serves the job."""
    return timelines(job)[island_at(job, peer)]


def island_at(job: Job, peer: PeerId) -> int:
    """The island in which a peer serves the job, or joins it."""
    island = job.brain.island_of(peer) if isinstance(job.brain, IslandsBrain) else None
    return job.record.peers.get(peer, 0) // len(split_of(job.spec)) if island is None else island


def place_at(job: Job, peer: PeerId, stage: int) -> int:
    """The place of a peer that serves a stage of the job, or joins it; the record has it once the peer is admitted."""
    return job.record.peers.get(peer, island_at(job, peer) * len(split_of(job.spec)) + stage)


def by_island(spec: JobSpec, peers: Mapping[PeerId, int]) -> list[dict[PeerId, int]]:
    """The peers of each island, with their stages, of peers with their places."""
    stages = len(split_of(spec))
    return [
        {peer: place % stages for peer, place in peers.items() if place // stages == island}
        for island in range(spec.islands.count)
    ]


def replicas_by_island(
    spec: JobSpec, places: Mapping[PeerId, int], replicas: Sequence[ReplicaRecord]
) -> list[tuple[ReplicaRecord, ...]]:
    """The replicas of each island, in the order given."""
    members = by_island(spec, places)
    return [tuple(one for one in replicas if one.peer in peers) for peers in members]


def of_job(spec: JobSpec, header: StoreHeader) -> StoreHeader:
    """A replica's report on a file of its island, in the job's words: its stage is a place, or -1 if there is none."""
    version = course_of(spec, header.timeline).inner_steps(header.version)
    exists = 0 <= header.stage < len(split_of(spec))
    place = place_of(spec, header.timeline, header.stage) if exists else -1
    return replace(header, timeline=job_timeline(spec, header.timeline), version=version, stage=place)


async def rows_made(database: Database, record: JobRecord, spec: JobSpec, together: Rows) -> list[CommitRow]:
    """The steps that all islands of a job made on one of its timelines, in order, as far as they still count."""
    made: list[CommitRow] = []
    for island in range(spec.islands.count):
        rows = await database.rows(record.id, island_timeline(spec, together.timeline, island))
        made += filter(None, map(together.take, rows))
    return [row for row in made if row_counts(row.timeline, row.step, record.first_steps)]


def islands_brain(
    record: JobRecord,
    spec: JobSpec,
    epoch: int,
    batches: Batches,
    files: Sequence[StateFile],
    skipped_in_a_row: int,
    rng: Random,
) -> IslandsBrain:
    """The brain of a job with outer steps. Only the first island evaluates, as all hold the same outer weights."""
    whole = brain_settings(record, island_spec(spec), epoch, batches, (), skipped_in_a_row)
    paths = [OuterCourse(inner) for inner in courses(spec)]

    def of(island: int) -> BrainSettings:
        return replace(
            whole,
            timeline=island_timeline(spec, record.timeline, island),
            steps=paths[island].steps,
            first_step=paths[island].version_after(record.first_steps[-1]),
            files=files_for(files, island),
            evaluation_microbatches=whole.evaluation_microbatches if island == 0 else 0,
            rebalance=replace(NO_REBALANCING, min_replicas=spec.limits.min_replicas),
        )

    return IslandsBrain([of(island) for island in range(len(paths))], paths, rng)
