"""How much of the possible throughput was kept: E = N / integral of min over stages of the sum of the speeds alive.

    kill -9        ┌ restarts ┐ idle
 ──────────┤       ▼          ├──────────────  a replica leaves at the instant of its kill
  stage 1  └──────────────────┘  stage 1       another one enters when its process can be used, at the stage it is given

N are the committed microbatches, each once however often it was computed, from one commit to another: what lies before
the first and after the last of them belongs to no whole step. The last one is the first after the time is over. That
moment depends on nothing that comes after it, so that on average nothing is gained or lost by it; to stop at the last
commit before would leave out the pauses that it should show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

WARM_UP_STEPS = 2  # the pipeline is full, and with an overlap steps flow into each other


@dataclass(frozen=True, slots=True)
class Stay:
    """A replica was alive in a stage from one moment to another, seconds of any clock."""

    stage: int
    from_s: float
    to_s: float = math.inf


class Stays:
    """Who is alive in which stage, put together from what is seen of each life: one process, from its start to its end.

    A joiner counts in its stage since it was idle; between two stages a mover counts where it was.
    """

    def __init__(self) -> None:
        self._idle_s: dict[str, float] = {}
        self._now: dict[str, Stay] = {}
        self._over: list[Stay] = []
        self.moves = 0

    def idle(self, life: str, at_s: float) -> None:
        """The life's process can be used since then."""
        self._idle_s[life] = at_s

    def seen(self, life: str, stage: int, now_s: float) -> None:
        """The life is in this stage."""
        known = self._now.get(life)
        if known is not None and known.stage == stage:
            return
        if known is not None:
            self.moves += 1
            self._over.append(replace(known, to_s=now_s))
        self._now[life] = Stay(stage, self._idle_s.pop(life, now_s))

    def ended(self, life: str, at_s: float) -> None:
        """The life is over; one that never had a stage never counted."""
        self._idle_s.pop(life, None)
        if (known := self._now.pop(life, None)) is not None:
            self._over.append(replace(known, to_s=at_s))

    def all(self) -> list[Stay]:
        """Those that are over, and those that are not."""
        return [*self._over, *self._now.values()]

    def alive(self, stages: int) -> list[int]:
        """How many there are now, by stage."""
        return [sum(stay.stage == stage for stay in self._now.values()) for stage in range(stages)]


@dataclass(frozen=True, slots=True)
class Window:
    """From one commit to another; `steps` were committed after the one, up to the other."""

    from_s: float
    to_s: float
    steps: int

    @property
    def seconds(self) -> float:
        return self.to_s - self.from_s


@dataclass(frozen=True, slots=True)
class Kept:
    """What was committed in a window; `possible` is the integral of E, in microbatches."""

    microbatches: int
    window: Window
    possible: float

    @property
    def efficiency(self) -> float:
        """E."""
        return self.microbatches / self.possible

    @property
    def speed(self) -> float:
        """Microbatches per second."""
        return self.microbatches / self.window.seconds


def window(commits_s: Sequence[float], until_s: float) -> Window | None:
    """From the commit that ends the warm-up to the first one at or after `until_s`; None while there is none."""
    last = next((n for n, at_s in enumerate(commits_s) if at_s >= until_s and n >= WARM_UP_STEPS), None)
    if last is None:
        return None
    return Window(commits_s[WARM_UP_STEPS - 1], commits_s[last], last + 1 - WARM_UP_STEPS)


def possible(stays: Iterable[Stay], stages: int, speed: float, from_s: float, to_s: float) -> float:
    """What replicas of this speed (microbatches/s) could have done: the integral of the weakest stage's speed."""
    changes: list[tuple[float, int, int]] = []
    for stay in stays:
        begin_s, end_s = max(stay.from_s, from_s), min(stay.to_s, to_s)
        if begin_s < end_s:
            changes += [(begin_s, stay.stage, +1), (end_s, stay.stage, -1)]
    alive = [0] * stages
    total, before_s = 0.0, from_s
    for at_s, stage, change in sorted(changes):
        total += (at_s - before_s) * min(alive) * speed
        alive[stage] += change
        before_s = at_s
    return total + (to_s - before_s) * min(alive) * speed
