"""Where each replica of a stage stands among the others by speed, so that a route can lead from like to like.

    stage 0    | slow |     medium     |              fast              |       a replica's lane is as wide as its
    stage 1    |  slow    |  slow   |               fast                |       share of the stage's speed
               0                                                        1

A microbatch that passes through a slow and a fast replica is in flight as long as the slow one takes, and counts as
work of the fast one meanwhile. The fast replica runs dry although it seems busy. A route within one lane has no such
partners. Decisions: docs/decisions/042, 120.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from swarm.types import PeerId

UNEQUAL = 1.5  # slowest to fastest pace of a stage: below that every route is good
DRIFT = 1.25  # of a pace, before the lanes are drawn anew
BESIDE = 0.1  # of the narrower of two lanes: a smaller overlap is an error of measurement


@dataclass(frozen=True, slots=True)
class Lane:
    """A part of [0, 1)."""

    start: float
    stop: float

    def meets(self, other: Lane) -> bool:
        """Whether they overlap by a tenth of the narrower one."""
        shared = min(self.stop, other.stop) - max(self.start, other.start)
        return shared > BESIDE * min(self.stop - self.start, other.stop - other.start)


ALL = Lane(0.0, 1.0)


class Lanes:
    """The lanes of one stage's replicas, slowest first; drawn anew when a replica comes, goes or changes its pace."""

    def __init__(self) -> None:
        self._pace_s: dict[PeerId, float] = {}  # as the lanes were drawn
        self._order: list[PeerId] = []
        self._of: dict[PeerId, Lane] = {}
        self._starts: list[float] = []
        self._is_stale = False
        self._is_unequal = False
        self._per_s = 0.0

    def enter(self, peer: PeerId, pace_s: float) -> None:
        """The replica may get work and needs `pace_s` > 0 seconds for a microbatch."""
        drawn_s = self._pace_s.get(peer, 0.0)
        if not drawn_s / DRIFT <= pace_s <= drawn_s * DRIFT:
            self._pace_s[peer] = pace_s
            self._is_stale = True

    def leave(self, peer: PeerId) -> None:
        """The replica gets no work any more; nothing happens if it is unknown."""
        self._is_stale |= self._pace_s.pop(peer, None) is not None

    @property
    def is_unequal(self) -> bool:
        """Whether the slowest replica takes more than half as long again as the fastest."""
        self._draw()
        return self._is_unequal

    @property
    def per_s(self) -> float:
        """Microbatches per second of all replicas together."""
        self._draw()
        return self._per_s

    @property
    def best_s(self) -> float:
        """The pace of the fastest replica, as the lanes were drawn."""
        self._draw()
        return self._pace_s[self._order[-1]]

    def pace_s(self, peer: PeerId) -> float:
        """Seconds per microbatch, as the lanes were drawn."""
        return self._pace_s[peer]

    def of(self, peer: PeerId) -> Lane:
        self._draw()
        return self._of[peer]

    def beside(self, lane: Lane) -> list[PeerId]:
        """The replicas whose lanes meet this one, slowest first."""
        self._draw()
        first = max(0, bisect_right(self._starts, lane.start) - 1)
        last = bisect_left(self._starts, lane.stop)
        return [peer for peer in self._order[first:last] if self._of[peer].meets(lane)]

    def fits(self, paces_s: Mapping[PeerId, float]) -> bool:
        """Whether these are the replicas that may get work, with about the known paces."""
        drawn_s = self._pace_s
        return drawn_s.keys() == paces_s.keys() and all(
            drawn_s[peer] / DRIFT <= pace_s <= drawn_s[peer] * DRIFT for peer, pace_s in paces_s.items()
        )

    def _draw(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        self._order = sorted(self._pace_s, key=lambda peer: (-self._pace_s[peer], peer))
        paces_s = [self._pace_s[peer] for peer in self._order]
        self._is_unequal = bool(paces_s) and paces_s[0] > UNEQUAL * paces_s[-1]
        *before, self._per_s = accumulate((1.0 / pace_s for pace_s in paces_s), initial=0.0)
        self._starts = [done / self._per_s for done in before]
        lanes = map(Lane, self._starts, [*self._starts[1:], 1.0])
        self._of = dict(zip(self._order, lanes, strict=True))
