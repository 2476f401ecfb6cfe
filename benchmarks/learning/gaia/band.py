"""A band around what the links may carry: the threshold rises while an island sends more, and falls while it sends
less.

    use = bytes of the last `window_s` / (what the limit allows in `window_s`)
    use > 1.1: adjust += step       use < 0.9: adjust -= step       clamped to [-T0, 0.2]

Judged once in each step of an island, behind what it sends, for the next step. What an island sends is counted when it
is handed to the links, to all others together: what a full link has carried would never be more than it can.

Source: Gaia (NSDI 2017), and its authors' code (kevinhsieh/non_iid_dml), which judges once in each step too, by the
bytes of the newest step alone. Ours is the window. With `holds`, what the band has no room for stays pending.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

MOST = 0.2  # that the threshold is raised by


@dataclass(frozen=True, slots=True)
class Band:
    """How closely the bytes that an island sends are to follow the limit, and how the threshold is moved for that."""

    share: float = 1.0  # of what the links carry, that is the limit
    window_s: float = 10.0
    step: float = 0.005
    low: float = 0.9
    high: float = 1.1
    holds: bool = False


class Meter:
    """What one island has sent of late, and by how much its threshold is raised for that."""

    def __init__(self, band: Band, limit_bytes_per_s: float, threshold: float) -> None:
        """The limit is for what goes to all others together; `threshold` is T0, the most that is taken off."""
        self.adjust = 0.0
        self._band, self._limit_bytes_per_s = band, limit_bytes_per_s
        self._threshold = threshold
        self._sent: deque[tuple[float, int]] = deque()

    def record(self, now_s: float, sent_bytes: int) -> None:
        self._sent.append((now_s, sent_bytes))

    def use(self, now_s: float) -> float:
        """The share of the limit that the newest window has used."""
        allowed = self._allowed(now_s)
        return self._newest(now_s) / allowed if allowed else 0.0

    def judge(self, now_s: float) -> None:
        """Raise or lower the threshold by what was sent."""
        use = self.use(now_s)
        if use > self._band.high:
            self.adjust = min(MOST, self.adjust + self._band.step)
        elif use < self._band.low:
            self.adjust = max(-self._threshold, self.adjust - self._band.step)

    def room_bytes(self, now_s: float) -> float:
        """What may still be sent now, if what the band has no room for is held."""
        return self._band.high * self._allowed(now_s) - self._newest(now_s) if self._band.holds else math.inf

    def _newest(self, now_s: float) -> int:
        while self._sent and self._sent[0][0] <= now_s - self._band.window_s:
            self._sent.popleft()
        return sum(sent for _, sent in self._sent)

    def _allowed(self, now_s: float) -> float:
        return self._limit_bytes_per_s * min(self._band.window_s, now_s)  # at first less than a window has passed
