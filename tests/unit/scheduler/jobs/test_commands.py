"""What callers send is looked at aside, so that the event loop serves everybody else meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler.jobs.commands import Jobs
from scheduler.jobs.cuts import check_hops
from swarm.errors import InvalidConfig
from swarm.limits import HOPS_MAX, SUBMITS_MAX
from tests.support.simulated import small_spec


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(SUBMITS_MAX + 2) as made:
        yield made


def commands(threads: ThreadPoolExecutor) -> Jobs:
    ports = SimpleNamespace(stores=SimpleNamespace(threads=threads), metrics=None, rng=None, wall_s=None)
    allocator = SimpleNamespace(idle=None)
    nothing = cast(Any, None)
    return Jobs(cast(Any, ports), nothing, nothing, nothing, nothing, cast(Any, allocator), nothing, nothing)


def test_what_a_caller_sent_is_looked_at_on_a_thread(threads: ThreadPoolExecutor) -> None:
    assert asyncio.run(commands(threads).aside(threading.get_ident)) != threading.get_ident()


def test_a_few_are_looked_at_a_time_and_others_have_threads_left(threads: ThreadPoolExecutor) -> None:
    at_work, go = threading.Semaphore(0), threading.Event()

    def look() -> None:
        at_work.release()
        assert go.wait(30)

    async def many() -> int:
        asked = commands(threads)
        looks = [asyncio.create_task(asked.aside(look)) for _ in range(SUBMITS_MAX + 2)]
        loop = asyncio.get_running_loop()
        try:
            for _ in range(SUBMITS_MAX):
                assert await loop.run_in_executor(threads, at_work.acquire, True, 30)
            return int(await loop.run_in_executor(threads, at_work.acquire, True, 0.2))
        finally:
            go.set()
            await asyncio.gather(*looks)

    assert asyncio.run(many()) == 0, "one more than SUBMITS_MAX was looked at"


def test_a_step_has_so_many_hops(tmp_path: Path) -> None:
    """A job of a million microbatches a step was accepted, and the scheduler stood still for seconds when it began."""

    def check(microbatches: int, split: list[int]) -> None:
        batch = {"training__global_batch_sequences": microbatches, "training__microbatch_sequences": 1}
        check_hops(small_spec(tmp_path, pipeline__stages=len(split), pipeline__split=split, **batch))

    check(HOPS_MAX, [3])
    check(HOPS_MAX // 2, [2, 1])
    with pytest.raises(InvalidConfig, match=f"{HOPS_MAX} microbatches; with 2 stages, {HOPS_MAX // 2} is the limit"):
        check(HOPS_MAX, [2, 1])


def test_a_job_has_no_name_that_commands_would_take_for_a_flag(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """`swarm cancel --d95f3a` is no way to name a job."""
    spec = small_spec(tmp_path).model_copy(update={"name": "-"})
    with pytest.raises(InvalidConfig, match="taken for a flag"):
        asyncio.run(commands(threads)._vetted(spec, cast(Any, None)))
