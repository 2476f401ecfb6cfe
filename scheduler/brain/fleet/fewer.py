"""When a job begins with fewer islands than its file asks for.

    goes on, stage servers for all islands ──▶ begins with all
       │ for fewer, but islands.min
       ▼
    waits for the others ──limits.no_progress_s──▶ begins with as many as it can; the others are lost at first

That is as long as islands at work wait for another one. The wait begins when some could begin, not when the job
stalled: machines that fail together come back one after the other. The first start of a job is for a person to see, and
waits for all islands. Pure. Decision: docs/decisions/090.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.text import counted


@dataclass(frozen=True, slots=True)
class Fewer:
    """A job that waits for all its islands could begin with `count` of them, and does so at `at_s`."""

    count: int
    of: int
    at_s: float

    def told(self, now_s: float) -> str:
        """What it waits for, for a person."""
        left_s = max(0, math.ceil(self.at_s - now_s))
        return f"goes on with {self.count} of {counted(self.of, 'island')} in {left_s} s if no more can begin"


def waits_on(before: Fewer | None, count: int, of: int, wait_s: float, now_s: float) -> Fewer | None:
    """How a job waits on that could begin with `count` islands now, after it waited as `before`; None: it has to."""
    if not count:
        return None
    return Fewer(count, of, before.at_s if before is not None else now_s + wait_s)
