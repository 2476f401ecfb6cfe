"""Turns of those who read: nobody keeps the scheduler from hearing stage servers by asking."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.api.reads import Reads
from scheduler.brain.members.persons import ANYBODY, Person
from swarm.errors import Crowded
from swarm.limits import READS_AT_ONCE, READS_MAX, READS_OF_ONE_MAX, READS_PER_S
from swarm.pki.names import Role
from tests.support.sim import loop as sim

ANN, EVE = Person(Role.VIEWER, "ann"), Person(Role.VIEWER, "eve")
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
        assert await read(reads, EVE, READS_AT_ONCE) == NOTHING_S
        assert await read(reads, EVE, 100) == pytest.approx(100 / READS_PER_S, abs=2 / READS_PER_S)
        assert await read(reads, ANN, READS_AT_ONCE) == NOTHING_S
        assert await read(reads, ROOT, 10 * READS_AT_ONCE) == NOTHING_S
        assert await read(reads, ANYBODY, 10 * READS_AT_ONCE) == NOTHING_S
        await asyncio.sleep(2 * READS_AT_ONCE / READS_PER_S)
        assert await read(reads, EVE, READS_AT_ONCE) == NOTHING_S, "after a pause as many as at first"

    sim.run(main(), seed=1, limit_s=600.0)


def test_a_call_has_a_place_also_while_it_waits_for_its_turn() -> None:
    async def main() -> None:
        reads = Reads()
        await read(reads, EVE, READS_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(READS_OF_ONE_MAX):
                tasks.create_task(read(reads, EVE, 1))
            await asyncio.sleep(0)
            with pytest.raises(Crowded, match=f"{READS_OF_ONE_MAX} of your calls"):
                await read(reads, EVE, 1)
            assert await read(reads, ANN, 1) == NOTHING_S
        await read(reads, EVE, 1)

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
            await read(reads, ANN, 1)
        over.set()
    await read(reads, ANN, 1)
