"""A frozen process runs nothing until it goes on, late; a killed one never again."""

import asyncio

from tests.support.sim import loop as sim
from tests.support.sim.processes import Process


async def tick(ticks: list[float], every_s: float = 1.0) -> None:
    while True:
        ticks.append(asyncio.get_running_loop().time())
        await asyncio.sleep(every_s)


def test_a_frozen_process_runs_nothing_and_its_timers_are_late() -> None:
    async def main() -> tuple[list[float], list[float]]:
        frozen: list[float] = []
        free: list[float] = []
        one, other = Process("one"), Process("other")
        one.start(tick(frozen))
        other.start(tick(free))
        await asyncio.sleep(1.5)
        one.freeze()
        await asyncio.sleep(3.0)
        one.thaw()
        await asyncio.sleep(1.8)
        return frozen, free

    frozen, free = sim.run(main(), seed=1)
    assert free == [0, 1, 2, 3, 4, 5, 6]
    assert frozen == [0, 1, 4.5, 5.5]


def test_what_a_frozen_process_cancelled_before_does_not_run_afterwards() -> None:
    async def main() -> list[str]:
        happened: list[str] = []

        async def work() -> None:
            async with asyncio.timeout(1.0):
                await came.wait()
            happened.append("in time")

        came, process = asyncio.Event(), Process("one")
        task = process.start(work())
        await asyncio.sleep(0.5)
        process.freeze()
        came.set()
        await asyncio.sleep(10.0)  # the timeout passes while nothing of the process can run
        process.thaw()
        await asyncio.wait({task})
        return happened

    assert sim.run(main(), seed=1) == ["in time"]


def test_whatever_a_process_starts_belongs_to_it_and_dies_with_it() -> None:
    async def main() -> tuple[list[float], bool]:
        ticks: list[float] = []
        process = Process("one")

        async def parent() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(tick(ticks))

        task = process.start(parent())
        await asyncio.sleep(2.5)
        process.freeze()
        process.kill()
        await asyncio.sleep(5.0)
        return ticks, task.cancelled()

    assert sim.run(main(), seed=1) == ([0, 1, 2], True)


def test_tasks_made_outside_belong_to_no_process() -> None:
    async def main() -> list[Process | None]:
        seen: list[Process | None] = []
        process = Process("one")

        async def look() -> None:
            seen.append(Process.current())

        async def parent() -> None:
            await look()
            await asyncio.get_running_loop().create_task(look(), context=Process.outside())

        await process.start(parent())
        await look()
        return [other is process for other in seen]  # type: ignore[misc]

    assert sim.run(main(), seed=1) == [True, False, False]
