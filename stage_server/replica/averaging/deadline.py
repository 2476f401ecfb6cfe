"""When a member gives a round up: some seconds after the step is full.

A member may be at work on a round before that, and then waits for others as long as they need to compute.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Deadline:
    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._at_s: float | None = None
        self._waits: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """The seconds count from now; only the first call counts."""
        if self._at_s is None:
            self._at_s = asyncio.get_running_loop().time() + self._after_s
            for wait in self._waits:
                wait.reschedule(self._at_s)

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """TimeoutError if what is done within takes until the deadline."""
        async with asyncio.timeout_at(self._at_s) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)
