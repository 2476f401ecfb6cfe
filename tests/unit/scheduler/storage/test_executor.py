"""Blocking work leaves the event loop's thread if there is another, and is done at once if there is none."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from scheduler.storage.executor import run_blocking


async def test_the_event_loop_goes_on_while_a_thread_works() -> None:
    began, may_end = threading.Event(), threading.Event()

    def work() -> threading.Thread:
        began.set()
        assert may_end.wait(10)
        return threading.current_thread()

    with ThreadPoolExecutor(1) as executor:
        working = asyncio.create_task(run_blocking(executor, work))
        assert await asyncio.to_thread(began.wait, 10)
        assert not working.done()
        may_end.set()
        assert await working is not threading.current_thread()


async def test_without_a_thread_the_work_is_done_in_this_one() -> None:
    assert await run_blocking(None, threading.current_thread) is threading.current_thread()


@pytest.mark.parametrize("threads", [0, 1])
async def test_an_error_of_the_work_is_the_callers(threads: int) -> None:
    def fail() -> None:
        raise OSError("full")

    executor = ThreadPoolExecutor(threads) if threads else None
    with pytest.raises(OSError, match="full"):
        await run_blocking(executor, fail)
    if executor is not None:
        executor.shutdown()
