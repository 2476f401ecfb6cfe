"""Merges the commit rows of islands into the rows of the job that people see: one per inner step.

island 0    step 0   1   2  outer  3        a step of the job is complete, and told, once all islands made it;
island 1    step 0   1                      outer steps are not told
job         step 0   1
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.brain.explain.step_times import StepTimes
from scheduler.brain.outputs import CommitRow
from swarm.job.course import Course


class Rows:
    """The rows of a job's islands on one timeline of the job; `courses` has one for each island."""

    def __init__(self, timeline: int, courses: Sequence[Course]) -> None:
        self.timeline = timeline
        self._courses = courses
        self._open: dict[int, dict[int, CommitRow]] = {}  # by inner step and island

    def take(self, row: CommitRow) -> CommitRow | None:
        """Take in a row of an island; gives the row of the job's step that is complete with it."""
        island = row.timeline % len(self._courses)
        course = self._courses[island]
        if course.is_outer(row.step):
            return None
        inner = course.inner_steps(row.step)
        rows = self._open.setdefault(inner, {})
        rows[island] = row
        if len(rows) < len(self._courses):
            return None
        del self._open[inner]
        return together([rows[at] for at in sorted(rows)], self.timeline, inner)


def together(rows: Sequence[CommitRow], timeline: int, step: int) -> CommitRow:
    """One row for the same inner step of all islands: losses weigh by tokens, in order of islands."""
    tokens = sum(row.tokens for row in rows)
    skipped = any(row.skip for row in rows)
    loss = sum(row.loss * row.tokens for row in rows) / tokens if tokens else math.nan
    return CommitRow(
        timeline=timeline,
        step=step,
        rounds={},
        loss=rows[0].loss if len(rows) == 1 else loss,
        norm=max(row.norm for row in rows),
        scale=min(row.scale for row in rows),
        learning_rate=rows[0].learning_rate,
        skip=skipped,
        tokens=tokens,
    )


def numbers(steps: Sequence[StepTimes], course: Course) -> tuple[int, ...]:
    """The number of each step of an island for people, from 1; 0: an outer step."""
    return tuple(0 if course.is_outer(one.step) else course.inner_steps(one.step) + 1 for one in steps)
