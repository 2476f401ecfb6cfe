"""scheduler.jobs.islands: places, timelines and what replicas of islands say, in the job's words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler.brain.inputs import ReplicaRecord, Resumed
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.brain.outputs import CommitRow, Exchanged
from scheduler.jobs.allocator import Allocator
from scheduler.jobs.islands import (
    at_work,
    by_island,
    island_at,
    of_job,
    place_at,
    place_of,
    replicas_by_island,
    rows_made,
    stage_at,
    timeline_of,
    timelines,
)
from scheduler.jobs.job import job_rows
from scheduler.storage.database import Database, _next_epoch
from scheduler.storage.job_record import JobRecord, JobTokens
from swarm.job.course import TIMELINES_MAX, OuterCourse
from swarm.job.islands import courses
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.types import JobId, JobState, PeerId, PeerState
from swarm.wire.messages import StoreHeader
from tests.support.brain import Swarm
from tests.support.databases import fresh_engine
from tests.support.simulated import small_spec

A, B, C, D = (PeerId(name) for name in "abcd")
PLACES = {A: 0, B: 3, C: 1, D: 2}  # of two islands with two stages


def spec_of(**changes: object) -> JobSpec:
    spec = small_spec(Path("x"), pipeline__stages=2, training__steps=5, **changes)
    return resolve(spec, Basis(257))


DILOCO = spec_of(averaging__mode="diloco", islands__count=2, outer__every_steps=2)
PLAIN = spec_of()


def job(spec: JobSpec, places: dict[PeerId, int]) -> Any:
    return SimpleNamespace(spec=spec, record=SimpleNamespace(timeline=3, peers=places), brain=None)


def test_places_are_the_stages_of_one_island_after_the_other() -> None:
    assert [stage_at(DILOCO, place) for place in range(4)] == [0, 1, 0, 1]
    assert by_island(DILOCO, PLACES) == [{A: 0, C: 1}, {B: 1, D: 0}]
    assert [place_of(DILOCO, timeline, stage) for timeline in (6, 7) for stage in range(2)] == [0, 1, 2, 3]
    replicas = [ReplicaRecord(peer, 1, "", stage_at(DILOCO, place)) for peer, place in PLACES.items()]
    assert [[one.peer for one in island] for island in replicas_by_island(DILOCO, PLACES, replicas)] == [[A, C], [B, D]]


def test_each_island_has_its_timeline_and_its_peers_the_same() -> None:
    assert timelines(job(DILOCO, PLACES)) == [6, 7]
    assert [timeline_of(job(DILOCO, PLACES), peer) for peer in (A, B, C, D)] == [6, 7, 6, 7]
    assert timeline_of(job(DILOCO, PLACES), PeerId("unknown")) == 6


def test_whoever_joins_is_on_the_timeline_of_the_island_that_it_joins() -> None:
    """The record has its place once it is admitted, but before it needs a pass for those who give it state."""
    one = job(DILOCO, PLACES)
    paths = [OuterCourse(inner) for inner in courses(DILOCO)]
    one.brain = IslandsBrain([replace(Swarm().brain.settings, timeline=at) for at in (6, 7)], paths, Random(0))
    joiner = PeerId("joiner")
    assert island_at(one, joiner) == 0
    one.brain._roster.island_of[joiner] = 1
    assert (island_at(one, joiner), timeline_of(one, joiner)) == (1, 7)
    assert [place_at(one, peer, stage) for peer, stage in ((joiner, 0), (joiner, 1), (B, 1))] == [2, 3, 3]
    peers = [
        SimpleNamespace(
            hello=SimpleNamespace(peer=peer, site=""),
            job="job",
            stage=stage,
            leaving="",
            unreached="",
            state=PeerState.LOADING,
        )
        for peer, stage in ((A, 0), (C, 1), (joiner, 0), (B, 1))
    ]
    ports: Any = SimpleNamespace(stores=SimpleNamespace(files=None), settle_s=0.0)
    membership: Any = SimpleNamespace(peers=lambda: peers)
    none: Any = None
    run: Any = SimpleNamespace(replicas_at_start=4, brain=one.brain)
    one.record.id, one.stages = "job", {}
    active = Allocator(ports, none, none, membership, none)._running(one, run)
    assert active.replicas == (1, 1), "the joiner fills the gap in stage 0 of island 1"


def test_a_plain_job_has_one_island_whose_places_are_stages() -> None:
    assert timelines(job(PLAIN, {A: 0, B: 1})) == [3]
    assert by_island(PLAIN, {A: 0, B: 1}) == [{A: 0, B: 1}]
    assert (place_of(PLAIN, 3, 1), timeline_of(job(PLAIN, {A: 0, B: 1}), B)) == (1, 3)
    header = StoreHeader(JobId("job"), A, 1, 3, 500, 0, 9)
    assert of_job(PLAIN, header, cast(Any, None)) == header


def test_a_file_is_of_the_jobs_timeline_and_step() -> None:
    """Five inner steps in leases of two: eight versions."""
    brain = saving()
    told = of_job(DILOCO, StoreHeader(JobId("job"), B, 1, 7, 8, 1, 9, "model/x"), brain)
    assert told == StoreHeader(JobId("job"), B, 1, 3, 5, 3, 9, "model/x"), "stage 1 of island 1 is place 3"
    for stage in (-1, 2):
        assert of_job(DILOCO, StoreHeader(JobId("job"), B, 1, 6, 8, stage, 9, "model/x"), brain).stage == -1
    ended = 7 + 2 * TIMELINES_MAX  # a life that island 1 does not live
    assert of_job(DILOCO, StoreHeader(JobId("job"), B, 1, ended, 8, 1, 9, "model/x"), brain).stage == -1


def saving(present: tuple[int, ...] = (0, 1)) -> IslandsBrain:
    """The brain of islands on timelines 6 and 7, that are being saved."""
    settings = [replace(Swarm().brain.settings, timeline=6 + island) for island in range(2)]
    brain = IslandsBrain(settings, [OuterCourse(course) for course in courses(DILOCO)], Random(1))
    brain._checkpoints.begin(present[0], 8, present)
    return brain


def test_islands_at_work_are_saved_under_numbers_without_gaps() -> None:
    header = StoreHeader(JobId("job"), B, 1, 7, 8, 1, 9, "model/x")
    assert of_job(DILOCO, header, saving((1,))).stage == 1, "stage 1 of the first part"
    assert of_job(DILOCO, replace(header, timeline=6), saving((1,))).stage == -1, "it was lost"


def test_an_island_without_which_the_others_have_exchanged_is_lost_after_a_restart() -> None:
    """Leases of two inner steps: versions 3 and 6 are behind outer steps."""

    def resumed(committed: int) -> Resumed:
        return Resumed({A: 0}, committed, (), (), 5.0)

    assert at_work(DILOCO, [resumed(2), resumed(0)]) == (resumed(2), resumed(0)), "nobody has exchanged"
    assert at_work(DILOCO, [resumed(3), resumed(5)]) == (resumed(3), resumed(5))
    assert at_work(DILOCO, [resumed(2), resumed(3)]) == (None, resumed(3))
    assert at_work(DILOCO, [resumed(7), resumed(5)]) == (resumed(7), None)
    behind, made = [resumed(3), resumed(2)], Exchanged(2, (), False, 1.0, (6, 7))
    assert at_work(DILOCO, behind, 0, [made], [6, 7]) == tuple(behind), "it proposed, and has still to merge"
    assert at_work(DILOCO, behind, 0, [made], [6, 9]) == (behind[0], None), "another life of it did"
    late = replace(made, islands=(6,), late=(7,))
    assert at_work(DILOCO, behind, 0, [late], [6, 7]) == tuple(behind), "it was late, and keeps its steps"
    assert at_work(DILOCO, [resumed(2), resumed(1)], 0, [replace(made, islands=(6,))], [6, 7]) == (resumed(2), None)


def test_an_island_that_was_not_placed_is_lost_after_a_restart_too() -> None:
    """It was waited for, although nobody had ever served it on this timeline. Inner step 2 is version 3."""

    def resumed(committed: int, *known: PeerId) -> Resumed:
        return Resumed(dict.fromkeys(known, 0), committed, (), (), 5.0)

    placed, without = resumed(5, A), resumed(3)
    assert at_work(DILOCO, [placed, without], 2) == (placed, None)
    assert at_work(DILOCO, [placed, resumed(3, B)], 2) == (placed, resumed(3, B)), "it has not made a step yet"
    assert at_work(DILOCO, [placed, resumed(4)], 2) == (placed, resumed(4)), "it has made one"
    assert at_work(DILOCO, [resumed(6, A), resumed(6)], 2) == (resumed(6, A), resumed(6)), "others go over to it"
    assert at_work(DILOCO, [without, without], 2) == (without, without), "nobody is known to be there"


@pytest.mark.parametrize(
    ("places", "made_by", "expected"),
    [({A: 0, B: 1}, (6,), [2]), ({A: 0, B: 1, C: 2, D: 3}, (6,), []), ({A: 0, B: 1}, (6, 7), [2]), ({}, (6,), [])],
    ids=["alone", "before the other", "both", "nobody known"],
)
async def test_steps_of_islands_that_began_without_others_are_known_again_after_a_restart(
    places: dict[PeerId, int], made_by: tuple[int, ...], expected: list[int]
) -> None:
    """Nothing was told of them before the next exchange. Inner step 2 is step 3."""
    engine, tokens = fresh_engine(), JobTokens((), "uint16", 257, 1.0)
    database = Database(engine, _next_epoch(engine), None)
    record = JobRecord(JobId("job"), "a", JobState.RUNNING, "", 1.0, 1.0, "{}", tokens, 3, peers=places)
    record = replace(record, first_steps=(0, 0, 0, 2))
    await database.put_job(record)
    for timeline in made_by:
        await database.put_commits(record.id, (CommitRow(timeline, 3, {}, 1.0, 1.0, 1.0, 0.1, False, 8),), 1.0)
    made = await rows_made(database, record, DILOCO, job_rows(DILOCO, 3))
    assert [row.step for row in made] == expected
    assert await rows_made(database, replace(record, timeline=4), DILOCO, job_rows(DILOCO, 3)) == (
        [] if len(made_by) == 1 else made
    ), "of a timeline before nothing else is known"
