"""The part of a job's past that counts: every resume begins a timeline at some step and abandons all later steps.

`first_steps[t]` is the step at which timeline t began. If a later resume returns to a timeline older than t, that
number is raised above the step of the resume, so that nothing of t counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import NotAllowed
from swarm.job.course import TIMELINES_MAX


def resumed(first_steps: Sequence[int], timeline: int, step: int) -> tuple[int, ...]:
    """The first steps once a new timeline resumes from a checkpoint of `timeline` after `step` steps; NotAllowed."""
    if len(first_steps) >= TIMELINES_MAX:
        raise NotAllowed(
            f"the job has begun anew {TIMELINES_MAX} times",
            hint="start another one from its newest checkpoint: swarm submit FILE --resume-from JOB:latest",
        )
    left = (max(first, step + 1) for first in first_steps[timeline + 1 :])
    return (*first_steps[: timeline + 1], *left, step)


def row_counts(timeline: int, step: int, first_steps: Sequence[int]) -> bool:
    """Whether the commit of a step still counts: no later timeline began at or before it."""
    own = first_steps[timeline : timeline + 1]
    return all(first <= step for first in own) and all(step < first for first in first_steps[timeline + 1 :])


def checkpoint_counts(timeline: int, step: int, first_steps: Sequence[int]) -> bool:
    """Whether a checkpoint after `step` steps leads to the present: no later timeline began before it."""
    own = first_steps[timeline : timeline + 1]
    return all(first <= step for first in own) and all(step <= first for first in first_steps[timeline + 1 :])
