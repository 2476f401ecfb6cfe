"""What the links of a simulation do to traffic; they are healthy until told otherwise.

A link is a pair (from, to): it may be stopped in one direction only. What travels on a stopped link waits; after
`DETECT_S` the keepalive of a real connection would give up, so the network breaks what the two have open with each
other, both ways. Loss on a packet level is latency to a stream; here a tensor or its receipt vanishes, as with a stream
that breaks in just that moment, and the sender is told `REPORT_S` later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

DELAY_S: Final = (0.0005, 0.02)
DETECT_S: Final = 2.0
REPORT_S: Final = (0.01, 0.3)
RESEND_S: Final = (0.05, 0.6)  # what a lost packet costs a session message


@dataclass(slots=True)
class _Stop:
    """A direction of a link that is stopped, with the number of causes."""

    opened: asyncio.Event
    causes: int = 0


class Weather:
    """The state of all links; all chance comes from the generator that is handed in."""

    def __init__(
        self,
        rng: Random,
        *,
        delay_s: tuple[float, float] = DELAY_S,
        loss: float = 0.0,
        duplicate_ratio: float = 0.0,
        copies_max: int = 2,
        late_s_max: float = 0.0,
    ) -> None:
        self.delay_s = delay_s
        self.loss = loss
        self.duplicate_ratio = duplicate_ratio
        self.copies_max = copies_max
        self.late_s_max = late_s_max
        self.slow: dict[str, float] = {}  # address -> factor on the delay of its links
        self.on_broken: Callable[[str, str], None] = lambda _one, _other: None
        self._rng = rng
        self._stops: dict[tuple[str, str], _Stop] = {}

    def calm(self) -> None:
        """Everything heals."""
        self.loss = self.duplicate_ratio = self.late_s_max = 0.0
        self.slow.clear()
        for stop in self._stops.values():
            stop.opened.set()
        self._stops.clear()

    def stop(self, sender: str, receiver: str) -> None:
        """Nothing gets from one to the other any more; stopped twice needs two `let`."""
        link = (sender, receiver)
        if link in self._stops:
            self._stops[link].causes += 1
            return
        stop = self._stops[link] = _Stop(asyncio.Event(), 1)

        def detect() -> None:
            if self._stops.get(link) is stop:
                self.on_broken(sender, receiver)

        asyncio.get_running_loop().call_later(DETECT_S, detect)

    def let(self, sender: str, receiver: str) -> None:
        """Undo one `stop`."""
        stop = self._stops.get((sender, receiver))
        if stop is None:
            return
        stop.causes -= 1
        if not stop.causes:
            del self._stops[sender, receiver]
            stop.opened.set()

    # For the network

    def delay(self, sender: str, receiver: str) -> float:
        """Seconds on the way."""
        return self._rng.uniform(*self.delay_s) * max(self.slow.get(sender, 1.0), self.slow.get(receiver, 1.0))

    def delay_in_stream(self, sender: str, receiver: str) -> float:
        """Like `delay`, for a message that is sent again until it arrives."""
        seconds = self.delay(sender, receiver)
        while self.loss and self._rng.random() < self.loss:
            seconds += self._rng.uniform(*RESEND_S)
        return seconds

    def loses(self) -> bool:
        """Whether the next tensor, or receipt, vanishes."""
        return bool(self.loss) and self._rng.random() < self.loss

    def report_s(self) -> float:
        """Seconds until a sender knows of a loss."""
        return self._rng.uniform(*REPORT_S)

    def lateness(self) -> list[float]:
        """How many seconds later than its first copy each copy of the next tensor leaves; the first is 0."""
        if self._rng.random() >= self.duplicate_ratio:
            return [0.0]
        count = self.copies_max if self.copies_max == 2 else self._rng.randint(2, self.copies_max)
        return [0.0] + [self._rng.uniform(0.0, self.late_s_max) if self.late_s_max else 0.0 for _ in range(count - 1)]

    async def passage(self, sender: str, receiver: str) -> bool:
        """Wait while the link is stopped, DETECT_S at most; whether it is open."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + DETECT_S
        while (stop := self._stops.get((sender, receiver))) is not None:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await stop.opened.wait()
            except TimeoutError:
                return False
        return True
