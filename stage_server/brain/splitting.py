"""Whether the backwards of a replica are split: dx at once, the gradients of the weights when nothing else waits.

The bits are the same either way, so each replica decides for itself, by what it measures:

    (dx + weights) / one call  <=  1 + GAIN x idle

Idle is the share of the last step in which this replica's device had nothing to do, or would have had without splits.
A split fills a part of that, but takes a little longer, above all on a CPU, where what is kept falls out of the cache.
So a busy CPU does not split.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from stage_server.brain.cell import Compute, Gradients
from swarm.types import Direction

WINDOW = 8  # backwards that take turns, to measure both ways
PERIOD = 64  # the next backwards are measured after so many
GAIN = 0.2  # weights fill more of the gaps, but on a processor that others use as well a split costs them too
IDLE_MIN = 0.2  # with less, what was measured on a busy processor says too little
TRIED_MAX = 1.6  # what costs more fits in no gap


class Splitting:
    """The choice at one replica; `held_max`: as many microbatches may owe the gradients of their weights, 0 is none."""

    def __init__(self, held_max: int) -> None:
        self._held_max = held_max
        self._seconds = {part: deque[float](maxlen=WINDOW // 2) for part in Gradients}
        self._count = 0
        self._idle = 0.0
        self._busy_s = 0.0
        self._since_s: float | None = None

    def next(self, work: Compute, owed: int) -> bool:
        """Whether to split this order, if it is a whole backward; `owed`: microbatches that owe gradients now."""
        if not self._held_max or work.direction is not Direction.BACKWARD or work.part is not Gradients.ALL:
            return False
        turn = self._count % PERIOD
        self._count += 1
        is_tried = turn < WINDOW and self._cost() <= TRIED_MAX
        return (bool(turn % 2) if is_tried else self.pays) and owed < self._held_max

    @property
    def pays(self) -> bool:
        """Whether splitting gains more than it costs, by what was measured."""
        return self._idle >= IDLE_MIN and 0.0 < self._cost() <= 1.0 + GAIN * self._idle

    def _cost(self) -> float:
        """Both parts over one call; 0 if not all were measured."""
        if not all(self._seconds.values()):
            return 0.0
        once, inputs, weights = (median(self._seconds[part]) for part in Gradients)
        return (inputs + weights) / once if once else 0.0

    def computed(self, work: Compute, seconds: float) -> None:
        """The device computed a microbatch, or a part of it."""
        self._busy_s += seconds
        if work.direction is Direction.BACKWARD:
            self._seconds[work.part].append(seconds)

    def committed(self, now_s: float, seconds: float) -> None:
        """A step ended, with `seconds` of the device for its commit."""
        busy_s = self._busy_s + seconds
        gaps = 2.0 if self.pays else 1.0  # splits have filled about half of them; else every other step would split
        if self._since_s is not None and now_s > self._since_s:
            self._idle = gaps * max(0.0, 1.0 - busy_s / (now_s - self._since_s))
        self._since_s, self._busy_s = now_s, 0.0
