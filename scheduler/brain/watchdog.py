"""The watchdog: limits how long a job may run, and how long it may stand still.

    begin ──▶ running ──moved──▶ ...          nothing moved for too long ──▶ STILL, and again after the same time
                 └──its runtime is over──▶ RAN_OUT, once ──it could not be paused──▶ once more, later

All times are by one clock, in seconds. Decision: docs/decisions/027.
"""

from __future__ import annotations

import math
from enum import StrEnum

PAUSE_AGAIN_S = 60.0  # after a pause that could not be saved
STOOD_STILL_S = 1.0  # a check that comes later than this was itself delayed: the job did not stand still


class Over(StrEnum):
    """A limit that a job has exceeded."""

    RAN_OUT = "ran out"
    STILL = "still"


class Watchdog:
    """The limits of one job; `runtime_s_max` 0 = it may run for as long as it takes."""

    def __init__(self, still_s_max: float, runtime_s_max: float) -> None:
        self.still_s_max = still_s_max
        self.runtime_s_max = runtime_s_max
        self._moved_s = self._runs_out_s = math.inf
        self._ran_out = False

    def begin(self, now_s: float) -> None:
        self._moved_s = now_s
        self._runs_out_s = now_s + self.runtime_s_max if self.runtime_s_max else math.inf

    def moved(self, now_s: float) -> None:
        """A step was committed, or something else made progress."""
        self._moved_s = now_s

    def goes_on(self, now_s: float) -> None:
        """The job could not be paused; if its runtime was over, the pause is tried again."""
        if self._ran_out:
            self._runs_out_s = now_s + min(self.runtime_s_max, PAUSE_AGAIN_S)

    def over(self, now_s: float, rests_until_s: float = -math.inf) -> Over | None:
        """The limit that has been exceeded, reported once each; None if none.

        Nothing can move before `rests_until_s`.
        """
        if now_s >= self._runs_out_s:
            self._runs_out_s, self._ran_out = math.inf, True
            return Over.RAN_OUT
        late_s = now_s - self._still_s(rests_until_s)
        if late_s >= 0.0:
            self._moved_s = now_s
        return Over.STILL if 0.0 <= late_s < STOOD_STILL_S else None

    def due_s(self, rests_until_s: float = -math.inf) -> float:
        """When to call `over` next."""
        return min(self._runs_out_s, self._still_s(rests_until_s))

    def _still_s(self, rests_until_s: float) -> float:
        return max(self._moved_s, rests_until_s) + self.still_s_max
