"""Simulated time jumps, runs repeat exactly, and a program that cannot go on says who waits."""

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.sim import loop as sim
from tests.support.sim.loop import SimulationStuck


def test_an_hour_passes_at_once_and_exactly() -> None:
    async def main() -> float:
        started = asyncio.get_running_loop().time()
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time() - started

    before = time.monotonic()
    assert sim.run(main(), seed=1) == 3600
    assert time.monotonic() - before < 5


def test_days_of_waiting_are_more_than_one_jump() -> None:
    async def main() -> float:
        await asyncio.sleep(3 * 86400)
        return asyncio.get_running_loop().time()

    assert sim.run(main(), seed=1) == 3 * 86400


def test_timeouts_are_in_simulated_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.sleep(61)
        return asyncio.get_running_loop().time()

    assert sim.run(main(), seed=1) == 60


def test_sleepers_wake_in_order_of_time() -> None:
    async def main() -> list[float]:
        woken = []

        async def sleep(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            woken.append(delay_s)

        async with asyncio.TaskGroup() as tasks:
            for delay_s in (0.3, 0.1, 1e-6, 500.0, 0.2):
                tasks.create_task(sleep(delay_s))
        return woken

    assert sim.run(main(), seed=1) == [1e-6, 0.1, 0.2, 0.3, 500.0]


def test_a_deadlock_names_who_waits_and_where() -> None:
    async def wait_for_godot() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait_for_godot(), name="estragon")
            await asyncio.sleep(5)

    with pytest.raises(SimulationStuck, match=r"at 5\.000 s; waiting: .*estragon at wait_for_godot:\d+") as caught:
        sim.run(main(), seed=42)
    assert "in a simulation with seed 42" in caught.value.__notes__


def test_a_program_that_never_ends_hits_the_limit() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(SimulationStuck, match="limit of 100 s"):
        sim.run(main(), seed=1, limit_s=100)


def test_what_main_raises_comes_out_with_the_seed() -> None:
    async def main() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong") as caught:
        sim.run(main(), seed=7)
    assert caught.value.__notes__ == ["in a simulation with seed 7"]


def test_each_component_has_its_own_dice() -> None:
    async def main() -> tuple[float, float, float]:
        return sim.rng("a").random(), sim.rng("b").random(), sim.rng("a").random()

    first, other, again = sim.run(main(), seed=1)
    assert first == again != other
    assert sim.run(main(), seed=1) == (first, other, again)
    assert sim.run(main(), seed=2)[0] != first


PROGRAM = """
import asyncio
from tests.support.sim import loop as sim
order = []
async def wait(name):
    try:
        await asyncio.sleep(1000)
    finally:
        order.append(name)
async def main():
    ballast = [object() for _ in range({ballast})]
    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(20):
                tasks.create_task(wait(index))
            await asyncio.sleep(1)
            raise ValueError
    except* ValueError:
        pass
    loop = asyncio.get_running_loop()
    futures = {{loop.create_future(): name for name in range(20)}}
    for future in futures:
        future.set_result(None)
    done, _ = await asyncio.wait(futures)
    order.extend(futures[future] for future in done)
sim.run(main(), seed=1)
print(order)
"""


def test_cancellation_goes_in_the_same_order_in_every_process() -> None:
    """TaskGroup keeps its children in a set, whose order is that of memory addresses unless tasks are numbered."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM.format(ballast=ballast)], capture_output=True, text=True, check=True
        )
        for ballast in (0, 1000, 12345)
    ]
    assert len({run.stdout for run in runs}) == 1
    assert runs[0].stdout == f"{[*range(20), *range(20)]}\n"


def test_executors_run_at_once_in_the_loops_thread() -> None:
    async def main() -> None:
        here = threading.get_ident()
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor() as pool:
            assert await loop.run_in_executor(pool, threading.get_ident) == here
        assert await asyncio.to_thread(threading.get_ident) == here
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, divmod, 1, 0)

    sim.run(main(), seed=1)


def test_a_thread_that_calls_in_is_an_error() -> None:
    async def main() -> list[str]:
        loop, errors = asyncio.get_running_loop(), []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        loop.call_soon_threadsafe(errors.append, "from the loop's own thread")
        await asyncio.sleep(0)
        return errors

    refusal, accepted = sim.run(main(), seed=1)
    assert "outside its loop" in refusal
    assert accepted == "from the loop's own thread"


def test_sockets_are_an_error() -> None:
    async def main() -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    with pytest.raises(RuntimeError, match="no files and no sockets"):
        sim.run(main(), seed=1)
