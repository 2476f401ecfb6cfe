"""Events on their way to the scheduler, in order; log lines are left out when the link is slow.

Other events answer commands, so the scheduler's own work bounds their number. Beyond LINES_WAITING_MAX new log lines
are left out, and one line gives their number.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from swarm.wire.messages import Event, Logged

LINES_WAITING_MAX = 1000


class EventQueue:
    """An endless queue of events with one reader."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._lines = 0  # of the events
        self._left_out = 0
        self.ended = False
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        """Append an event; a log line only if there is room for it."""
        if isinstance(event, Logged):
            if self._lines >= LINES_WAITING_MAX:
                self._left_out += 1
                return
            self._lines += 1
            if self._left_out:
                text = f"{self._left_out} log lines were left out: the link to the scheduler is slow"
                self._events.append(replace(event, level="warning", message=text))
                self._lines += 1
                self._left_out = 0
        self._events.append(event)
        self._arrived.set()

    def end(self) -> None:
        """Nothing comes after the events that wait now."""
        self.ended = True
        self._arrived.set()

    async def get(self) -> Event | None:
        """The next event, once there is one; None after the end."""
        while not self._events:
            if self.ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._lines -= isinstance(event, Logged)
        return event
