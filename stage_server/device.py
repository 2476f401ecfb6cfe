"""The device port: one compute thread that runs all that changes weights, graphs or sums.

With one thread, work happens in the order in which it was handed over; the rules about sealing and voiding rely on
that. The event loop stays free to answer (measured: heartbeats are late by 4 ms at most).

Decision: docs/decisions/017.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from stage_server.metrics import StageServerMetrics
from swarm.errors import OutOfMemory
from swarm.model.runtime import is_gpu, is_out_of_memory, release_memory, use
from swarm.process.logs import Logger
from swarm.text import size

T = TypeVar("T")

ASIDE_THREADS = 3


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """A result and the seconds that the device worked for it."""

    result: T
    seconds: float


class Device(Protocol):
    """Where a replica computes. Work is done in the order of the calls, whether or not anyone awaits it."""

    name: torch.device

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        """Do `work` after everything that was handed over before; gives its result."""

    def timed(self, work: Callable[[], T]) -> Awaitable[Timed[T]]:
        """Like `run`, with the seconds that it took."""

    def aside(self, work: Callable[[], T]) -> Awaitable[T]:
        """Do `work` beside the compute thread. It must need no graphs, no sums but a sealed step's, and no weights that
        may change meanwhile.

        Earlier `run` calls may not have happened yet: sums may still hold void contributions.
        """

    def release(self) -> None:
        """Give memory that nothing uses any more back to the system, soon: a job has ended."""


class ThreadDevice:
    """The real device: a thread of its own with its own number of torch threads."""

    def __init__(self, name: torch.device, threads: int) -> None:
        self.name = name

        def begin() -> None:  # torch keeps the number of OpenMP threads, and the GPU, per thread
            torch.set_num_threads(threads)
            use(name)

        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute", initializer=begin)
        # Several, so that averaging does not wait for a checkpoint's files.
        self._aside = ThreadPoolExecutor(max_workers=ASIDE_THREADS, thread_name_prefix="aside", initializer=begin)

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, _guarded, work, self.name)

    def aside(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._aside, _guarded, work, self.name)

    def timed(self, work: Callable[[], T]) -> Awaitable[Timed[T]]:
        return self.run(lambda: _clocked(work))

    def release(self) -> None:
        self.run(lambda: release_memory(self.name))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._aside.shutdown(wait=False, cancel_futures=True)


def _guarded(work: Callable[[], T], device: torch.device) -> T:
    """The result of `work`; OutOfMemory if the device has none left, however torch says so."""
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        where, setting = "", "model.recompute = true"
        if device.type != "cpu" and (isinstance(error, MemoryError) or "CPUAllocator" in str(error)):
            where, setting = "the host of ", 'training.optimizer_on = "device"'
        raise OutOfMemory(
            f"{where}{device} has no memory left: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint=f"use more stages, lower training.microbatch_sequences or pipeline.max_in_flight, or set {setting}",
        ) from error


def with_room(work: Callable[[], T], device: torch.device) -> T:
    """The result of work that may be done twice: a GPU without memory gets a second try, as a neighbour may have had it
    for a moment."""
    try:
        return work()
    except RuntimeError as error:
        if not (is_gpu(device) and is_out_of_memory(error)):
            raise
    release_memory(device)  # here, since the traceback has held tensors
    return work()


def _clocked(work: Callable[[], T]) -> Timed[T]:
    """The result of `work` and its seconds. All work that is timed reads a value of the device, and so waits for it."""
    started_s = time.perf_counter()
    result = work()
    return Timed(result, time.perf_counter() - started_s)


PATIENCE_S = 10.0


class DeviceDrain:
    """The work that released jobs have left on a device: a computation that has begun cannot be stopped.

    The next job would wait behind it. So after PATIENCE_S a stage server says that it leaves, and dials again once the
    device is free. Not chosen: a report that the device is busy, because every release would have to wait for it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._end: asyncio.Future[None] | None = None
        self._since_s = 0.0

    def begin(self) -> None:
        """A job was released: it is over when all that was handed to the device before is done."""
        if self.is_over:
            self._since_s = asyncio.get_running_loop().time()
        self._end = asyncio.ensure_future(self._device.run(lambda: None))

    @property
    def is_over(self) -> bool:
        return self._end is None or self._end.done()

    @property
    def is_long(self) -> bool:
        """Whether others had better have the next job."""
        return not self.is_over and asyncio.get_running_loop().time() - self._since_s >= PATIENCE_S

    async def over(self) -> None:
        """Return when it is over."""
        if self._end is not None:
            await asyncio.wait({self._end})


WATCH_S = 5.0


async def watch_memory(
    used_bytes: Callable[[], int], offered_bytes: int, device: Device, metrics: StageServerMetrics, log: Logger
) -> None:
    """Over the offer: give back what nothing uses. If that is not enough, warn and count, once until it is."""
    is_over = False
    while True:
        await asyncio.sleep(WATCH_S)
        if used_bytes() <= offered_bytes:
            is_over = False
        elif not is_over:
            device.release()
            await asyncio.sleep(WATCH_S)
            held = used_bytes()
            is_over = held > offered_bytes
            if is_over:
                metrics.memory_exceeded()
                log.warning(
                    f"this process holds {size(held)}, more than the {size(offered_bytes)} that it "
                    "offers: use more stages, or a smaller model",
                )
