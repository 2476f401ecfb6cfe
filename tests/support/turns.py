"""What work costs of the event loop and of the other threads, in units that every machine counts alike.

A unit is a loop of Python that takes a millisecond or less where nothing else runs. It is measured as CPU time, like
what is counted in it, so neither slow cores nor other work change the count. UNITS_MAX of them are 50 ms at most.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType

UNITS_MAX = 50.0
TRIES = 5
_ROUNDS = 25_000  # of a unit


def unit() -> None:
    count = _ROUNDS
    while count:
        count -= 1


def cost_s(work: Callable[[], object], tries: int = TRIES) -> float:
    """The least CPU time of this thread that the work takes in some tries."""
    found = []
    for _ in range(tries):
        began_s = time.thread_time()
        work()
        found.append(time.thread_time() - began_s)
    return min(found)


def units_of(work: Callable[[], object]) -> float:
    """What the work takes in all."""
    return _least_units(lambda: cost_s(work, tries=1))


def held_up_units(work: Callable[[], object]) -> float:
    """The longest of the work between two calls or returns of functions, which may let no other thread run."""
    return _least_units(lambda: _held_up_s(work))


def _least_units(measured_s: Callable[[], float]) -> float:
    """The least of some tries, until one is within the bound.

    The unit is measured beside each: a core is slower while its other thread works, and that changes at any moment.
    """
    found = []
    while not found or (min(found) > UNITS_MAX and len(found) < TRIES):
        found.append(measured_s() / cost_s(unit))
    return min(found)


def _held_up_s(work: Callable[[], object]) -> float:
    """Code in C lets no other thread run; between lines of Python others have their turn when they ask for it.

    The collection of garbage does not count: it takes the longer, the more this process of tests has imported.
    """
    longest_s, last_s = 0.0, time.thread_time()

    def look(_frame: FrameType, _event: str, _what: object) -> None:
        nonlocal longest_s, last_s
        longest_s = max(longest_s, time.thread_time() - last_s)
        last_s = time.thread_time()

    gc.disable()
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return longest_s


class Longest:
    """The longest CPU time of this thread between two turns."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last_s = time.thread_time()

    def turn(self) -> None:
        now_s = time.thread_time()
        self.seconds = max(self.seconds, now_s - self._last_s)
        self._last_s = now_s

    @property
    def units(self) -> float:
        return self.seconds / cost_s(unit)


@asynccontextmanager
async def event_loop() -> AsyncIterator[Longest]:
    """How long the running event loop, on which a task always wants a turn, gave it none; garbage as above."""
    found = Longest()

    async def turn() -> None:
        while True:
            found.turn()
            await asyncio.sleep(0)

    gc.disable()
    turning = asyncio.create_task(turn())
    await asyncio.sleep(0)
    try:
        yield found
    finally:
        found.turn()  # what held the event loop last has let no task see its end
        gc.enable()
        turning.cancel()
        await asyncio.wait({turning})
