"""Bands: the usual sizes of the tensors between two stages, to find an odd one.

    rms of x or g, as its taker reports ─▶ not a number, infinite or 0 ──────────────────▶ odd
                                      └──▶ LEARNED values of its link are known, and
                                           its logarithm is SIGMAS deviations away ─────▶ odd

An odd tensor proves nothing: another replica computes it again (checks.py). The usual size follows the training: it is
the median of the newest values, and the deviation follows from their median distance to it. A liar that is there from
the start would teach a mean: a few values a thousand times as large would make all sizes usual.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from swarm.types import Direction

LEARNED = 256
SIGMAS = 6.0
SIGMA = 1.4826  # the deviation, in median distances, of what is normally distributed
SPREAD_MIN = 0.01  # of the logarithm: where all are nearly alike, one per cent is nothing odd
AGAIN = 16  # values after which median and distance are taken anew


@dataclass(slots=True)
class _Band:
    """Of one stage's outputs in one direction."""

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=LEARNED))
    count: int = 0
    middle: float = 0.0
    width: float = math.inf

    def is_odd(self, value: float) -> bool:
        if len(self.newest) == LEARNED and self.count % AGAIN == 0:
            self.middle = median(self.newest)
            distance = median(abs(one - self.middle) for one in self.newest)
            self.width = SIGMAS * max(SPREAD_MIN, SIGMA * distance)
        self.newest.append(value)
        self.count += 1
        return abs(value - self.middle) > self.width


@dataclass(slots=True)
class Bands:
    """The bands of one job, by the stage that made the tensors: FORWARD y, BACKWARD dx."""

    _bands: dict[tuple[int, Direction], _Band] = field(default_factory=dict)

    def is_odd(self, maker: int, direction: Direction, rms: float) -> bool:
        """Whether a tensor that the stage `maker` has sent is of an unusual size; it is noted."""
        if not 0.0 < rms < math.inf:
            return True
        return self._bands.setdefault((maker, direction), _Band()).is_odd(math.log(rms))
