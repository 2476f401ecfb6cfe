"""Blocking work (database, files) on a worker thread; inline if there is none, as in simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def run_blocking(executor: ThreadPoolExecutor | None, work: Callable[[], T]) -> T:
    """The result of `work`, done on the executor's thread."""
    if executor is None:
        return work()
    return await asyncio.get_running_loop().run_in_executor(executor, work)


async def run_to_its_end(executor: ThreadPoolExecutor | None, work: Callable[[], T]) -> T:
    """As `run_blocking`; a cancelled caller waits until the work is done, so its effect is known."""
    task = asyncio.ensure_future(run_blocking(executor, work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        task.result()
        raise
