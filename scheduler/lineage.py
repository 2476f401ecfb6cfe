"""Which of a job's past counts: every resume begins a timeline at some step, and what came after that step before is
history of another future.

`first_steps[t]` is the step at which timeline t began.
"""

from __future__ import annotations

from collections.abc import Sequence


def row_counts(timeline: int, step: int, first_steps: Sequence[int]) -> bool:
    """Whether the commit of a step still counts: no later timeline began at it or before."""
    return all(step < first for first in first_steps[timeline + 1 :])


def checkpoint_counts(timeline: int, step: int, first_steps: Sequence[int]) -> bool:
    """Whether a checkpoint after so many steps lies on the way to the present: no later timeline began before it."""
    return all(step <= first for first in first_steps[timeline + 1 :])
