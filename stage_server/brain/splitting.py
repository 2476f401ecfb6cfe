"""Whether the backwards of a replica are split: dx at once, the gradients of the weights when nothing else waits.

The bits are the same either way, so each replica decides for itself, by what it measured:

    upper quartiles of dx and weights, added  /  lower quartile of one call   <=   1 + GAIN x idle

Idle is the share of the last step in which this replica's device had nothing to do, or would have had without splits.
A split fills a part of that, but takes a little longer, above all on a CPU, where what is kept falls out of the cache.
Quartiles count scatter as a cost too: on a CPU that other processes use times scatter, and its gaps are not free. A
device of its own has steady times, and fills small gaps too.

Times are compared within a window of backwards that take turns, since a device may be slower an hour later. A window
that was disturbed decides until the next one only. They come ever more rarely, as half of one goes the worse way, and
a split that would fit in no gap ends the trial.

Not chosen: medians and a least share of idle time. The floor that kept a busy CPU from splitting kept late microbatches
from it too (docs/benchmarks.md).
"""

from __future__ import annotations

from collections import deque

from stage_server.brain.cell import Compute, Gradients
from swarm.types import Direction, Microbatch

WINDOW = 10  # backwards that take turns, to measure both ways
PERIODS = 128, 512  # backwards between two windows, at least and at most: as many as there were before
GAIN = 0.6  # how much of the gaps weights fill


class Splitting:
    """The choice at one replica; `held_max`: as many microbatches may owe the gradients of their weights, 0 is none."""

    def __init__(self, held_max: int) -> None:
        self._held_max = held_max
        self._seconds = {part: deque[float](maxlen=WINDOW // 2) for part in Gradients}
        self._in_window: set[Microbatch] = set()
        self._count, self._window_at = 0, 0
        self._is_dear = False  # nothing is tried any more in this window
        self._idle = 0.0
        self._busy_s = 0.0
        self._since_s: float | None = None

    def next(self, work: Compute, owed: int) -> bool:
        """Whether to split this order, if it is a whole backward; `owed`: microbatches that owe gradients now."""
        if not self._held_max or work.direction is not Direction.BACKWARD or work.part is not Gradients.ALL:
            return False
        turn = self._count - self._window_at
        if turn == 0:
            self._in_window.clear()
            for times in self._seconds.values():
                times.clear()
            self._is_dear = False
        elif turn == WINDOW:
            least, most = PERIODS
            self._window_at = self._count + min(max(self._count, least), most)
        is_tried = 0 <= turn < WINDOW and not self._is_dear
        if is_tried:
            self._in_window.add(work.microbatch)
        self._count += 1
        return (bool(turn % 2) if is_tried else self.pays) and owed < self._held_max

    @property
    def pays(self) -> bool:
        """Whether splitting gains more than it costs, by what was measured."""
        return 0.0 < self._cost() <= 1.0 + GAIN * self._idle

    def _cost(self) -> float:
        """Both parts over one call; 0 if not all were measured."""
        once, inputs, weights = (sorted(self._seconds[part]) for part in Gradients)
        if not (once and inputs and weights and once[len(once) // 4]):
            return 0.0
        return (inputs[-1 - len(inputs) // 4] + weights[-1 - len(weights) // 4]) / once[len(once) // 4]

    def computed(self, work: Compute, seconds: float) -> None:
        """The device computed a microbatch, or a part of it."""
        self.worked(seconds)
        if work.direction is Direction.BACKWARD and work.microbatch in self._in_window:
            self._seconds[work.part].append(seconds)
            if work.part is Gradients.WEIGHTS and all(self._seconds.values()):
                once, inputs, weights = map(min, self._seconds.values())
                self._is_dear = inputs + weights > (1.0 + GAIN) * once  # then it fits in no gap

    def worked(self, seconds: float) -> None:
        """The device was busy for so long, with a microbatch, a commit, a check or an evaluation."""
        self._busy_s += seconds

    def committed(self, now_s: float) -> None:
        """A step ended."""
        gaps = 2.0 if self.pays else 1.0  # splits have filled about half of them; else every other step would split
        if self._since_s is not None and now_s > self._since_s:
            self._idle = min(1.0, gaps * max(0.0, 1.0 - self._busy_s / (now_s - self._since_s)))
        self._since_s, self._busy_s = now_s, 0.0
