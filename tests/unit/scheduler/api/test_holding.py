"""Calls that hold places: the one that is ended for others says so, and a caller that leaves is a caller that left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from scheduler.api.holding import Holding, Reads, sending
from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.brain.members.places import CallSlot, CallSlots
from swarm.errors import Crowded
from swarm.limits import PLACE_WAIT_S, READS_AT_ONCE, READS_MAX, READS_OF_ONE_MAX, READS_PER_S
from swarm.pki.names import Role
from tests.support.acts import played
from tests.support.sim import loop as sim

EVE, ANN = (Person(Role.SUBMITTER, name) for name in ("eve", "ann"))


async def for_ever() -> None:
    await asyncio.Event().wait()


async def hold(holding: Holding, person: Person, work: Callable[[], Coroutine[Any, Any, None]] = for_ever) -> None:
    async with holding.held(person):
        await work()


async def comes_in(holding: Holding, person: Person) -> float:
    """How long the person asks, each half second, until there is a place."""
    clock = asyncio.get_running_loop()
    began_s = clock.time()
    while True:
        try:
            async with holding.held(person):
                return clock.time() - began_s
        except Crowded:
            await asyncio.sleep(0.5)


async def crowd(holding: Holding, count: int = 2) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(hold(holding, EVE)) for _ in range(count)]
    await asyncio.sleep(0.0)
    return tasks


@played
def in_simulation(act: Callable[[Holding], Coroutine[Any, Any, None]]) -> None:
    sim.run(act(Holding(CallSlots(2, 2, "files wait"))), seed=1, limit_s=600.0)


@in_simulation
async def test_a_call_is_ended_for_somebody_who_has_waited_and_is_told_so(holding: Holding) -> None:
    first, second = await crowd(holding)
    assert PLACE_WAIT_S <= await comes_in(holding, ANN) <= PLACE_WAIT_S + 1.0
    with pytest.raises(Crowded, match="waited 30 s for this place") as caught:
        await first
    assert caught.value.hint == "call again: it goes on from where it was"
    assert not second.done()
    second.cancel()


@in_simulation
async def test_a_caller_who_leaves_as_his_place_is_ended_has_left(holding: Holding) -> None:
    first, _ = await crowd(holding)
    waiting = asyncio.create_task(comes_in(holding, ANN))
    await asyncio.sleep(PLACE_WAIT_S)  # the very moment
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await waiting
    assert await comes_in(holding, EVE) == 0.0, "its place is free"


@in_simulation
async def test_who_is_ended_goes_on_as_a_task_that_nobody_cancelled(holding: Holding) -> None:
    async def ended() -> int:
        with pytest.raises(Crowded):
            await hold(holding, EVE)
        await asyncio.sleep(1.0)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    first, _ = asyncio.create_task(ended()), await crowd(holding, 1)
    await comes_in(holding, ANN)
    assert await first == 0


@in_simulation
async def test_a_stream_ends_behind_the_message_that_is_on_its_way(holding: Holding) -> None:
    """A caller who had stopped to read was told nothing by gRPC when his call was cancelled then, and waited for ever
    once he read on."""
    reads, told = asyncio.Event(), list[str]()

    async def stream(wait: asyncio.Event) -> None:
        async with holding.held(EVE) as place:
            with sending(place):
                await wait.wait()
                told.append("the message has left")

    streams = [asyncio.create_task(stream(reads)) for _ in range(2)]
    await asyncio.sleep(0.0)
    assert await comes_in(holding, ANN) <= PLACE_WAIT_S + 1.0, "he has the place at once"
    assert not any(stream.done() for stream in streams)
    with pytest.raises(Crowded, match="2 of your files"):
        await hold(holding, EVE)
    reads.set()
    with pytest.raises(Crowded, match="waited 30 s"):
        await streams[0]
    await streams[1]
    assert told == ["the message has left"] * 2


def test_no_message_is_handed_on_by_a_call_whose_place_is_ended() -> None:
    place = CallSlot(EVE, 0.0, is_ended=True)
    with pytest.raises(Crowded), sending(place):
        pytest.fail("it would be cut off there")


@in_simulation
async def test_a_timeout_of_the_call_itself_stays_one(holding: Holding) -> None:
    async def late() -> None:
        async with asyncio.timeout(1.0):
            await for_ever()

    with pytest.raises(TimeoutError):
        await hold(holding, EVE, late)


LOOKER, OTHER = Person(Role.VIEWER, "ann"), Person(Role.VIEWER, "eve")
NOTHING_S = pytest.approx(0.0, abs=1e-9)
ROOT = Person(Role.ADMIN, "root")


async def read(reads: Reads, person: Person, times: int) -> float:
    """How long so many calls take, one after the other."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(times):
        async with reads.turn(person):
            pass
    return loop.time() - began_s


def test_who_reads_oftener_than_a_person_does_waits_and_nobody_else() -> None:
    async def main() -> None:
        reads = Reads()
        assert await read(reads, OTHER, READS_AT_ONCE) == NOTHING_S
        assert await read(reads, OTHER, 100) == pytest.approx(100 / READS_PER_S, abs=2 / READS_PER_S)
        assert await read(reads, LOOKER, READS_AT_ONCE) == NOTHING_S
        assert await read(reads, ROOT, 10 * READS_AT_ONCE) == NOTHING_S
        assert await read(reads, ANYBODY, 10 * READS_AT_ONCE) == NOTHING_S
        await asyncio.sleep(2 * READS_AT_ONCE / READS_PER_S)
        assert await read(reads, OTHER, READS_AT_ONCE) == NOTHING_S, "after a pause as many as at first"

    sim.run(main(), seed=1, limit_s=600.0)


def test_a_call_has_a_place_also_while_it_waits_for_its_turn() -> None:
    async def main() -> None:
        reads = Reads()
        await read(reads, OTHER, READS_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(READS_OF_ONE_MAX):
                tasks.create_task(read(reads, OTHER, 1))
            await asyncio.sleep(0)
            with pytest.raises(Crowded, match=f"{READS_OF_ONE_MAX} of your calls"):
                await read(reads, OTHER, 1)
            assert await read(reads, LOOKER, 1) == NOTHING_S
        await read(reads, OTHER, 1)

    sim.run(main(), seed=1, limit_s=600.0)


async def test_places_are_bounded_for_all_together() -> None:
    reads, over = Reads(), asyncio.Event()

    async def hold() -> None:
        async with reads.turn(ANYBODY):
            await over.wait()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(READS_MAX):
            tasks.create_task(hold())
        await asyncio.sleep(0)
        with pytest.raises(Crowded, match=f"{READS_MAX} calls read"):
            await read(reads, LOOKER, 1)
        over.set()
    await read(reads, LOOKER, 1)
