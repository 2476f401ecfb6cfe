"""The curves of one job, thinned: from the database when somebody first looks, and then as its steps are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, nan

from scheduler.jobs.history import StepMade
from scheduler.jobs.job import SPEED_STEPS

POINTS_MAX = 240

Curve = dict[int, float]  # by steps committed, in order


def every(steps_done: int) -> int:
    """One of how many steps to read for a curve of at most POINTS_MAX points."""
    return max(1, -(-steps_done // POINTS_MAX))


@dataclass(slots=True)
class Curves:
    """Losses in nats and speeds in tokens per second."""

    loss: Curve = field(default_factory=dict)
    validation: Curve = field(default_factory=dict)
    speed: Curve = field(default_factory=dict)

    @classmethod
    def read(cls, steps: Sequence[StepMade], validation: Curve) -> Curves:
        """The curves of the past, from rows that the database picked; speeds are smoothed as for a job at work."""
        found = cls()
        for one in steps:
            _add(found.loss, one.step, one.loss)
        smooth = nan
        for before, one in pairwise(steps):
            took_s = one.committed_unix_s - before.committed_unix_s if before.committed_unix_s else 0.0
            if took_s > 0.0:
                speed = one.tokens * (one.step - before.step) / took_s
                smooth = smooth + (speed - smooth) / SPEED_STEPS if isfinite(smooth) else speed
                _add(found.speed, one.step, smooth)
        for step in sorted(validation):
            _add(found.validation, step, validation[step])
        return found

    def add(self, step: int, loss: float, tokens_per_s: float) -> None:
        """The job has come to `step`; the same one again changes nothing."""
        _add(self.loss, step, loss)
        _add(self.speed, step, tokens_per_s)

    def evaluated(self, step: int, loss: float) -> None:
        _add(self.validation, step, loss)

    def values(self) -> dict[str, dict[str, float]]:
        """As JSON has them; steps are names, so that a new point is a small change."""
        of = {"loss": self.loss, "validation": self.validation, "speed": self.speed}
        return {name: {str(step): value for step, value in curve.items()} for name, curve in of.items()}


def _add(curve: Curve, step: int, value: float) -> None:
    """A point behind the others; every second one goes when there are too many."""
    if not isfinite(value) or step <= 0 or (curve and step <= next(reversed(curve))):
        return
    curve[step] = float(f"{value:.5g}")
    if len(curve) > POINTS_MAX:
        for old in list(curve)[1:-1:2]:
            del curve[old]
