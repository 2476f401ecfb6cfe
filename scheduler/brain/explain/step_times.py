"""The times at which each step entered each of its phases, for drawing a timeline.

began          full          averaged                     agreed
  │  feeding    │  averaging    │  deciding, writing,      │
  │             │               │  committing              │
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import nan

from scheduler.brain.state.step import Phase, StepRun

KEPT = 24  # steps that are over


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times by the clock of the job's brain; nan: not yet. A step that is not finite is averaged at once."""

    step: int
    began_s: float
    full_s: float = nan
    averaged_s: float = nan
    agreed_s: float = nan
    repeats: int = 0  # how often it went back to be fed, as contributions were void


class StepClock:
    """Notes the time when a step has moved on; look at it after each input of the brain."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Phase, StepTimes]] = {}
        self._over: deque[StepTimes] = deque(maxlen=KEPT)

    def look(self, runs: Mapping[int, StepRun], now_s: float) -> None:
        """Note new phases; steps that are no longer among the `runs` are agreed."""
        for step, run in runs.items():
            before = self._open.get(step)
            if before is None or before[0] is not run.phase:
                self._open[step] = run.phase, _moved(before, run, now_s)
        if len(self._open) > len(runs):
            for step in sorted(self._open.keys() - runs.keys()):
                self._over.append(replace(self._open.pop(step)[1], agreed_s=now_s))

    def steps(self) -> tuple[StepTimes, ...]:
        """The newest steps, oldest first."""
        return (*self._over, *(times for _, times in self._open.values()))


def _moved(before: tuple[Phase, StepTimes] | None, run: StepRun, now_s: float) -> StepTimes:
    times = StepTimes(run.step, now_s) if before is None else before[1]
    match run.phase:
        case Phase.FEEDING:
            return times if before is None else replace(times, full_s=nan, averaged_s=nan, repeats=times.repeats + 1)
        case Phase.AVERAGING:
            return replace(times, full_s=now_s)
    full_s = times.full_s if times.full_s == times.full_s else now_s
    averaged_s = times.averaged_s if times.averaged_s == times.averaged_s else now_s
    return replace(times, full_s=full_s, averaged_s=averaged_s)
