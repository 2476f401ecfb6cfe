"""Islands that come late to an exchange: it is made without them, and the weights are those of one process.

Real flows, brains and torch; the transport delays and reorders every tensor at random and delivers some twice.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa

from scheduler.brain.explain.facts import Situation
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.jobs.job import Job
from swarm.types import IslandState, JobState
from tests.support.effort import others
from tests.support.islands import (
    by_speed,
    check,
    diloco,
    exchanges_of,
    gaia,
    log_of,
    lose,
    paused,
    peers_of,
    restart,
    run,
    streaming,
    trained,
    until,
)
from tests.support.reference import reference
from tests.support.simulated import SCHEDULER, Rig, Tokens, write_text

SLOW = 6.0
LONG = {"training__steps": 16, "outer__patience": 0.1, "training__eval_every_steps": 4, "checkpoint__every_s": 0.0}
WAYS = {
    "diloco": (diloco, {}),
    "hides": (diloco, {"outer__every_steps": 4, "outer__overlap_steps": 1}),
    "streaming": (streaming, {}),
    "gaia": (gaia, {}),
}


async def slow_for(rig: Rig, job: Job, steps: int, island: int = 1) -> None:
    """One island computes slowly, up to a step of the job."""
    slow = [peer for peer, place in job.record.peers.items() if place // len(job.spec.split) == island]
    rig.slowness |= dict.fromkeys(slow, SLOW)
    await until(rig, job, lambda one: one.progress.steps_done >= steps)
    rig.slowness.clear()


def is_between(job: Job) -> bool:
    """Whether nothing is on its way between islands: the next exchange is made without an island that is cut off."""
    assert isinstance(job.brain, IslandsBrain)
    at_work, course = job.brain._roster.at_work().values(), job.brain.courses[0]
    trains = all(island.state is IslandState.TRAINING for island in situation(job).islands)
    return trains and not any(course.held(brain.agreed) for brain in at_work)


def is_alone(job: Job) -> bool:
    return isinstance(job.brain, IslandsBrain) and job.brain.present == (0,)


async def cut_off_for(rig: Rig, job: Job, seconds: float, *, restarts: bool = False) -> None:
    """The links of island 1 to the scheduler and to island 0 are cut; the scheduler may be killed meanwhile."""
    at = {f"address-of-{peer}": place // len(job.spec.split) for peer, place in sorted(job.record.peers.items())}
    far = [SCHEDULER, *(address for address, island in at.items() if island == 0)]
    pairs = [(one, other) for one, island in at.items() if island == 1 for other in far]
    ways = [*pairs, *((other, one) for one, other in pairs)]
    for way in ways:
        rig.network.weather.stop(*way)
    if restarts:
        await asyncio.sleep(4.0)
        await restart(rig)
    await asyncio.sleep(seconds)
    for way in ways:
        rig.network.weather.let(*way)


def late_in(job: Job) -> list[int]:
    return [island for merge in exchanges_of(log_of(job)) for island in merge.late]


def situation(job: Job) -> Situation:
    found = job.situation()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("way", "islands", "slow"),
    [
        ("diloco", 2, 1),
        ("diloco", 2, 0),
        ("streaming", 3, 1),
        ("gaia", 2, 1),
        *others(("hides", 2, 1), ("streaming", 2, 0)),
    ],
)
def test_an_island_that_is_late_keeps_its_steps_and_the_weights_are_those_of_one_process(
    tmp_path: Path, way: str, islands: int, slow: int
) -> None:
    make, changes = WAYS[way]
    spec = make(write_text(tmp_path), islands, **LONG | changes)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 2)
        await slow_for(rig, job, 13, slow)

    job = trained(tmp_path, spec, islands * 2, story, with_log=True)
    assert slow in late_in(job)
    assert all(len(merge.islands) + len(merge.late) == islands for merge in exchanges_of(log_of(job))), "none was lost"
    assert job.record.timeline == 0


@pytest.mark.parametrize("seed", [1, *others(2, 3)])
def test_a_scheduler_that_is_killed_while_an_island_is_late_knows_that(tmp_path: Path, seed: int) -> None:
    spec = diloco(write_text(tmp_path), **LONG)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 2)
        slow = rig.tasks.create_task(slow_for(rig, job, 13))
        await until(rig, job, is_late)
        (late,) = [island for island in situation(job).islands if island.state is IslandState.LATE]
        assert "the others exchanged without it; it keeps its steps, and they count at step" in late.waiting_for
        await restart(rig)
        await until(rig, rig.jobs.registry.find(job.record.id), is_late)
        slow.cancel()
        rig.slowness.clear()

    job = trained(tmp_path, spec, 4, story, seed, with_log=True)
    assert 1 in late_in(job)
    assert job.record.timeline == 0


def is_late(job: Job) -> bool:
    found = job.situation()
    return found is not None and any(island.state is IslandState.LATE for island in found.islands)


@pytest.mark.parametrize("is_killed", [True, False])
def test_what_is_evaluated_are_the_outer_weights_though_the_island_that_evaluates_is_late(
    tmp_path: Path, is_killed: bool
) -> None:
    """Behind a restart both it and another one evaluated."""
    spec = diloco(write_text(tmp_path), **LONG | {"training__eval_every_steps": 2})
    tokens = Tokens.make(tmp_path, spec)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 2)
        slow = rig.tasks.create_task(slow_for(rig, job, 13, 0))
        await until(rig, job, is_late)
        if is_killed:
            await restart(rig)
        slow.cancel()
        rig.slowness.clear()

    job, rig = run(spec, tokens, 4, story)
    expected = reference(spec, tokens, log_of(job))
    check(job, expected)
    with rig.engine.connect() as connection:
        found = connection.execute(sa.text("SELECT version, loss FROM evaluations ORDER BY version")).fetchall()
    assert [(version, loss) for version, loss in found] == [(made.version, made.loss) for made in expected.evaluations]


def test_shares_by_speed_give_patience_and_a_restart_while_an_island_is_late_changes_no_weights(tmp_path: Path) -> None:
    spec = by_speed(tmp_path, training__steps=16, outer__every_steps=4, checkpoint__every_s=0.0)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 5)
        rig.slowness |= dict.fromkeys(peers_of(job, 1), 60.0)
        await until(rig, job, is_late)
        await restart(rig)
        await until(rig, rig.jobs.registry.find(job.record.id), is_late)
        rig.slowness.clear()

    assert 1 in late_in(trained(tmp_path, spec, 2, story, with_log=True))


def test_an_island_that_is_lost_while_it_is_late_leaves_out_all_since_it_took_part(tmp_path: Path) -> None:
    spec = diloco(write_text(tmp_path), 3, **LONG)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 2)
        slow = rig.tasks.create_task(slow_for(rig, job, 16))
        await until(rig, job, is_late)
        lose(rig, job, 1)
        slow.cancel()

    job = trained(tmp_path, spec, 6, story, with_log=True)
    log = exchanges_of(log_of(job))
    first = next(number for number, one in enumerate(log) if one.late)
    assert 1 not in log[first + 1].islands
    assert peers_of(job, 0)


def test_a_pause_waits_for_a_late_island(tmp_path: Path) -> None:
    spec = diloco(write_text(tmp_path), **LONG)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 2)
        slow = rig.tasks.create_task(slow_for(rig, job, 16))
        await until(rig, job, is_late)
        slow.cancel()
        checkpoint = await paused(rig, job)
        assert not exchanges_of(log_of(job))[-1].late or exchanges_of(log_of(job))[-1].after_step < checkpoint.step
        rig.slowness.clear()
        await rig.jobs.resume(job, "", None)

    trained(tmp_path, spec, 4, story, with_log=True)


@pytest.mark.parametrize(
    ("way", "seed", "restarts"),
    [
        ("diloco", 1, False),
        ("diloco", 1, True),
        ("streaming", 1, False),
        *others(("gaia", 1, True), ("hides", 1, True)),
    ],
)
def test_an_island_that_is_cut_off_for_longer_than_the_grace_loses_nothing(
    tmp_path: Path, way: str, seed: int, restarts: bool
) -> None:
    """It was lost after the grace of the scheduler, 5 s, with all that it had trained since the last exchange."""
    make, changes = WAYS[way]
    spec = make(write_text(tmp_path), **LONG | changes)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 5 and is_between(one))
        await cut_off_for(rig, job, 45.0, restarts=restarts)

    job = trained(tmp_path, spec, 4, story, seed, with_log=True)
    assert 1 in late_in(job)
    assert all(len(merge.islands) + len(merge.late) == 2 for merge in exchanges_of(log_of(job))), "it was not lost"
    assert job.record.timeline == 0


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"limits__no_progress_s": 20.0, "averaging__timeout_s": 4.0}, (15.0, 25.0)),
        ({"outer__patience": "none"}, (4.9, 9.0)),
    ],
    ids=["for good", "without patience"],
)
@pytest.mark.parametrize("restarts", [False, *others(True)])
def test_an_island_that_is_silent_for_too_long_is_lost(
    tmp_path: Path, changes: dict[str, object], seconds: tuple[float, float], restarts: bool
) -> None:
    spec = diloco(write_text(tmp_path), **LONG | changes)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 5)
        cut = rig.tasks.create_task(cut_off_for(rig, job, 100.0, restarts=restarts))
        since_s = asyncio.get_running_loop().time() + (4.2 if restarts else 0.0)
        await asyncio.sleep(4.3 if restarts else 0.0)
        job = rig.jobs.registry.find(job.record.id)
        await until(rig, job, is_alone)
        assert seconds[0] <= asyncio.get_running_loop().time() - since_s <= seconds[1]
        cut.cancel()

    trained(tmp_path, spec, 4, story, with_log=True)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_pause_waits_for_an_island_that_is_silent_no_longer_than_the_grace(tmp_path: Path, restarts: bool) -> None:
    spec = diloco(write_text(tmp_path), **LONG)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 5)
        cut = rig.tasks.create_task(cut_off_for(rig, job, 100.0, restarts=restarts))
        await asyncio.sleep(30.0)
        job = rig.jobs.registry.find(job.record.id)
        asked_s = asyncio.get_running_loop().time()
        await paused(rig, job)
        assert asyncio.get_running_loop().time() - asked_s < 7.5
        cut.cancel()
        rig.network.weather.calm()
        await rig.jobs.resume(job, "", None)

    job, _ = run(spec, Tokens.make(tmp_path, spec), 4, story)
    assert job.record.state is JobState.SUCCEEDED
