"""How fast a member's links carried one round: what it sent to and took from all others, over the time that it had.

    bytes  |            ....---      what follows waits for others, and says nothing of the link
           |     ...---
           |  .--                    the steepest line from the beginning to a point past a quarter of all bytes
           +----------------- s

The line begins with the round: whatever held bytes up makes it flatter, and receipts that come all at once do not make
it steeper. So it is a lower bound: a fast member is as fast as the others take from it, and looks slower in a round in
which it waits for others that still compute.

Source: the delivery rate of BBR (Cardwell et al., ACM Queue 14-5, 2016), with all of a round as one flight.

Decision: docs/decisions/043.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from swarm.types import PeerId

MEASURED_BYTES_MIN: Final = 1 << 20  # rounds with less to send or to take say more of delays than of bandwidth
SHARE_MIN: Final = 0.25  # of the bytes of a round


@dataclass(slots=True)
class RoundMeter:
    """The deliveries of one round; what came before `begin` does not count."""

    start_s: float | None = None
    _first_s: dict[PeerId, float] = field(default_factory=dict)  # when the first chunk of each member came
    _sent: list[tuple[float, int]] = field(default_factory=list)
    _taken: list[tuple[float, int]] = field(default_factory=list)

    def begin(self, now_s: float) -> None:
        self.start_s = now_s

    def sent(self, size_bytes: int, now_s: float) -> None:
        """A member has said that it has a chunk."""
        self._sent.append((now_s, size_bytes))

    def taken(self, sender: PeerId, size_bytes: int, now_s: float) -> None:
        """A chunk has arrived."""
        self._first_s.setdefault(sender, now_s)
        if self.start_s is not None:
            self._taken.append((now_s, size_bytes))

    @property
    def all_began_s(self) -> float | None:
        """When this member and all that have sent it anything had begun; None before it has."""
        return None if self.start_s is None else max((self.start_s, *self._first_s.values()))

    @property
    def up_bytes_per_s(self) -> float:
        """0 if there was too little to tell."""
        return self._steepest(self._sent)

    @property
    def down_bytes_per_s(self) -> float:
        """0 if there was too little to tell."""
        return self._steepest(self._taken)

    def _steepest(self, deliveries: list[tuple[float, int]]) -> float:
        total_bytes = sum(size_bytes for _, size_bytes in deliveries)
        if self.start_s is None or total_bytes < MEASURED_BYTES_MIN:
            return 0.0
        best, so_far_bytes = 0.0, 0
        for at_s, size_bytes in deliveries:  # in order of time, as they were noted
            so_far_bytes += size_bytes
            if at_s > self.start_s and so_far_bytes >= SHARE_MIN * total_bytes:
                best = max(best, so_far_bytes / (at_s - self.start_s))
        return best
