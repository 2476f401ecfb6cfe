"""What a replica makes of repeated, early and late commands, of a new session, and of a neighbour that says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stage_server.replica.replica import AHEAD_S, REPAIR_S, can_fork, to_load
from swarm.errors import StaleMessage
from swarm.types import Direction, Hop, JobId, Microbatch, PeerId, Round, set_digest
from swarm.wire.messages import (
    Accumulated,
    Average,
    Averaged,
    Commit,
    Committed,
    Failed,
    LoadStage,
    Member,
    Need,
    StateRequest,
    UnitRound,
    Void,
)
from tests.support.last_stage import JOB, ME, Scene, play, route, served


def average(scene: Scene, number: int = 1, *, indexes: tuple[int, ...] = (0, 1), step: int = 0) -> Average:
    ((unit, elements),) = scene.units
    member = Member(ME, 1, "at me", 0, elements, set_digest(indexes))
    return Average(0, step, unit, Round(1, number), (member,), 64, 3.0)


def commit(scene: Scene, number: int = 1, *, step: int = 0) -> Commit:
    ((unit, _),) = scene.units
    return Commit(0, step, step + 1, (UnitRound(unit, Round(1, number)),), 1e-3, 1.0, False)


async def averaged(scene: Scene) -> None:
    for index in (0, 1):
        await scene.replica.handle(route(index))
    await asyncio.sleep(1.0)
    assert len(scene.heard(Accumulated)) == 2
    await scene.replica.handle(average(scene))
    await asyncio.sleep(1.0)
    assert len(scene.heard(Averaged)) == 1


@served()
async def test_commits_are_applied_once_and_in_order(scene: Scene) -> None:
    await averaged(scene)
    await scene.replica.handle(commit(scene, step=1))
    assert scene.replica.cells.version == 0, "the one before it was lost, and both come again"
    for _ in range(3):
        await scene.replica.handle(commit(scene))
    await asyncio.sleep(1.0)  # the digest is made beside
    assert scene.replica.cells.version == 1
    assert [event.version for event in scene.heard(Committed)] == [1]  # type: ignore[union-attr]
    assert scene.heard(Failed) == []


@served()
async def test_the_state_stays_as_it_is_until_its_digest_is_made(scene: Scene) -> None:
    gate = asyncio.Event()

    async def when_it_opens(work: Callable[[], Any]) -> Any:
        await gate.wait()
        return work()

    await averaged(scene)
    device: Any = scene.replica._device
    device.aside = when_it_opens
    await scene.replica.handle(commit(scene))
    following = asyncio.ensure_future(
        scene.replica.handle(replace(commit(scene, step=1), rounds=(), skip=True)),
    )
    await asyncio.sleep(1.0)
    assert scene.replica.stage.version == 1
    assert scene.heard(Committed) == []
    gate.set()
    await following
    await asyncio.sleep(1.0)
    assert scene.replica.stage.version == 2
    assert [event.version for event in scene.heard(Committed)] == [1, 2]  # type: ignore[union-attr]


@served()
async def test_a_replica_that_does_not_hold_the_round_of_a_commit_says_that_it_cannot_follow(scene: Scene) -> None:
    await averaged(scene)
    await scene.replica.handle(commit(scene, number=2))
    assert scene.replica.cells.version == 0
    assert len(scene.heard(Failed)) == 1


@served()
async def test_state_is_given_to_those_who_ask_for_what_is_served_here(scene: Scene) -> None:
    request = StateRequest(JOB, 0, 0, "state", 0, 0, 0, PeerId("joiner"), 1)
    reply, payload = await scene.replica.donor.give(request)
    assert (reply.version, reply.total_bytes) == (0, len(payload))
    for change in ({"job": JobId("other")}, {"timeline": 1}, {"stage": 1}):
        with pytest.raises(StaleMessage, match="this replica serves stage 0 of job job, timeline 0"):
            await scene.replica.donor.give(replace(request, **change))


@served()
async def test_with_a_new_session_a_sealed_step_accumulates_again(scene: Scene) -> None:
    await scene.replica.handle(route(0))
    await asyncio.sleep(1.0)
    await scene.replica.handle(average(scene, indexes=(0,)))
    await scene.replica.handle(route(1))
    await asyncio.sleep(1.0)
    assert len(scene.heard(Accumulated)) == 1
    scene.replica.attach()
    await asyncio.sleep(1.0)
    assert len(scene.heard(Accumulated)) == 2
    assert scene.replica.cells.accumulated(0) == {0, 1}


@pytest.mark.parametrize("late", [0, 1])
def test_where_some_are_late_the_device_has_the_next_computation_just_before_it_is_done_with_one(late: int) -> None:
    """A device that was handed one at a time did nothing until its result had been taken in: a millisecond for each
    microbatch, 4 % of one that takes 25 ms. Where the next was handed over at once, a better one that came later waited
    for both.
    """

    async def act(scene: Scene) -> None:
        device: Any = scene.replica._device
        timed, handed, done = device.timed, list[float](), list[float]()

        async def noted(made: Awaitable[Any]) -> Any:
            result = await made
            done.append(asyncio.get_running_loop().time())
            return result

        def hand(work: Callable[[], Any]) -> Awaitable[Any]:
            handed.append(asyncio.get_running_loop().time())
            return noted(timed(work))

        device.timed = hand
        for index in range(4):
            await scene.replica.handle(route(index))
        await asyncio.sleep(1.0)
        assert len(handed) == len(done) == 8  # a forward and a backward of each
        ahead_s = [done_s - handed_s for done_s, handed_s in zip(done, handed[1:], strict=False)]
        known = ahead_s[2:6]  # a forward and a backward came before; behind the last but one nothing is ready
        assert known == pytest.approx([late * AHEAD_S] * 4)
        assert all(two >= one for one, two in zip(done, handed[2:], strict=False)), "the rest waits"

    play(1, act, overlap=late)


@pytest.mark.parametrize("is_void", [True, False])
@served(trust={"spot_check": 0.5})
async def test_what_was_computed_for_nothing_leaves_no_hashes_behind(scene: Scene, is_void: bool) -> None:
    """The hash of what was on the device as its microbatch was forgotten was noted behind that, and so kept for as long
    as the job ran."""
    await scene.replica.handle(route())
    await asyncio.sleep(0.005)  # of the 0.01 s of its forward
    assert len(scene.replica._commitments) == 0
    await scene.replica.handle(Void(0, 0, 1) if is_void else replace(commit(scene), rounds=(), skip=True))
    await asyncio.sleep(1.0)
    assert len(scene.replica._commitments) == 0
    again = replace(route(attempt=2), microbatch=Microbatch(0, int(not is_void), 0), version=int(not is_void))
    await scene.replica.handle(again)
    await asyncio.sleep(1.0)
    assert len(scene.heard(Accumulated)) == len(scene.replica._commitments) == 1, "those of open ones are kept"


@served(2)
async def test_a_neighbour_that_says_nothing_is_asked(scene: Scene) -> None:
    before = Hop(PeerId("before"), 1, 1, "at before")
    one = route()
    await scene.replica.handle(replace(one, hops=(before, *one.hops)))
    await asyncio.sleep(REPAIR_S - 0.1)
    assert scene.neighbour.headers == []
    await asyncio.sleep(REPAIR_S + 1.0)
    (asked,) = scene.neighbour.headers
    assert isinstance(asked, Need)
    assert (asked.direction, asked.stage) == (Direction.FORWARD, 0)


COMMAND = LoadStage(JobId("job"), 32769, 1, (2, 2), 3, "{}", held=3)


def replica(version: int = 3, stage: int = 1, job: str = "job", stages: int = 2) -> Any:
    cells = SimpleNamespace(version=version, stages=stages)
    return SimpleNamespace(job=JobId(job), me=SimpleNamespace(stage=stage), cells=cells)


def test_whoever_holds_the_stage_at_that_version_goes_over() -> None:
    assert can_fork(replica(), COMMAND)


def test_nobody_else_does() -> None:
    assert not can_fork(None, COMMAND)
    assert not can_fork(replica(), replace(COMMAND, held=0)), "it is to load the stage"
    for other in (replica(version=4), replica(version=2), replica(stage=0), replica(job="other"), replica(stages=3)):
        assert not can_fork(other, COMMAND)


def test_what_is_not_held_is_not_loaded_instead() -> None:
    with pytest.raises(StaleMessage, match="version 3 of stage 1 is not held here"):
        to_load(COMMAND)
    load = replace(COMMAND, held=0)
    assert to_load(load) == load
