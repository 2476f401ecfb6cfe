"""When a member gives a round up: some seconds after the step is full, or after the round last made progress.

A member may be at work on a round before that, and then waits for others as long as they need to compute. On a slow
line a slice takes longer than a round may stand still, so whatever has come of one counts as progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

STRETCH_MAX = 10  # times as long may a round take that makes progress
_MOVED_S = 1.0  # progress within less than that changes nothing


class Deadline:
    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._at_s: float | None = None
        self._last_s = 0.0
        self._waits: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """The seconds count from now; only the first call counts."""
        if self._at_s is None:
            now_s = asyncio.get_running_loop().time()
            self._last_s = now_s + STRETCH_MAX * self._after_s
            self._set(now_s + self._after_s)

    def moved(self) -> None:
        """The round makes progress: the seconds count from now, but not for ever."""
        if self._at_s is None:
            return
        at_s = min(asyncio.get_running_loop().time() + self._after_s, self._last_s)
        if at_s > self._at_s + _MOVED_S:
            self._set(at_s)

    def _set(self, at_s: float) -> None:
        self._at_s = at_s
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(at_s)

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """TimeoutError if what is done within takes until the deadline."""
        async with asyncio.timeout_at(self._at_s) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)
