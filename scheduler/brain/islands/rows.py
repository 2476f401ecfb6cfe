"""Merges the commit rows of islands into the rows of the job that people see: one per inner step.

island 0    step 0   1   2  outer  3        a step of the job is complete, and told, once all islands at work made it;
island 1    step 0   1                      outer steps are not told
job         step 0   1

The rows of an outer step say which islands took part. What another island made since the outer step before does not
count, and people see it undone. Decision: docs/decisions/064.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler.brain.explain.step_times import StepTimes
from scheduler.brain.outputs import CommitRow, EvaluationRow, Fork
from swarm.job.course import Course, OuterCourse, job_timeline_of
from swarm.job.leases import Cut
from swarm.job.outer_log import Entry, OuterRecord


@dataclass(frozen=True, slots=True)
class Told:
    """Steps that are complete now, and the tokens of earlier ones that do not count after all.

    `left_out`: by lost island, the number of steps without its part.
    """

    rows: tuple[CommitRow, ...]
    dropped_tokens: int = 0
    left_out: Mapping[int, int] = field(default_factory=dict)


class Rows:
    """The rows of a job's islands on one timeline of the job; `courses` has one for each island."""

    def __init__(self, timeline: int, courses: Sequence[OuterCourse]) -> None:
        self.timeline = timeline
        self.log: list[Entry] = []  # outer steps without all islands, or behind which one began anew; unequal leases
        self.cuts: list[Cut] = []  # of leases, where they follow speed
        self._courses = courses
        self._open: dict[int, dict[int, CommitRow]] = {}  # by inner step and island
        self._told: dict[int, int] = {}  # tokens by island, since the newest outer step

    def lease(self, cut: Cut) -> None:
        """Leases were cut anew, or left as they are for one more period."""
        self.cuts.append(cut)
        if cut.leases:
            self.log.append(cut)

    def take(self, rows: Sequence[CommitRow], forks: Iterable[Fork], present: Collection[int]) -> Told:
        """Take in rows that became durable together; `present` are the islands at work."""
        outer, dropped, left_out = None, 0, dict[int, int]()
        for row in rows:
            course = self._courses[self._island(row)]
            if course.is_outer(row.step):
                outer = row.step
            else:
                self._open.setdefault(course.inner_steps(row.step), {})[self._island(row)] = row
        if outer is not None:
            present = {self._island(row) for row in rows}
        made = []
        for inner in sorted(self._open):
            of = {island: row for island, row in self._open[inner].items() if island in present}
            if len(of) == len(present):
                del self._open[inner]
                made.append(together([of[island] for island in sorted(of)], self.timeline, inner))
                for island, row in of.items():
                    self._told[island] = self._told.get(island, 0) + row.tokens
        if outer is not None:
            dropped = sum(tokens for island, tokens in self._told.items() if island not in present)
            self._told.clear()
            self._open.clear()  # what is left is of islands that were lost
            self._note(outer, present, forks)
            absent = set(range(len(self._courses))) - set(present)
            left_out = dict.fromkeys(sorted(absent), len(self._courses[0].trained_before(outer)))
        return Told(tuple(made), dropped, left_out)

    def rebuild(
        self, rows: Iterable[CommitRow], forks: Collection[Fork], absent: Collection[int] = ()
    ) -> tuple[CommitRow, ...]:
        """All rows of this timeline, of every life of every island, as after a restart: the steps that count.

        `absent`: the islands without which the timeline began.
        """
        inner: dict[tuple[int, int], CommitRow] = {}
        outer: dict[int, list[CommitRow]] = {}
        for row in rows:
            course = self._courses[self._island(row)]
            if course.is_outer(row.step):
                outer.setdefault(row.step, []).append(row)
            else:
                inner[row.timeline, course.inner_steps(row.step)] = row
        made: list[CommitRow] = []
        first = [island for island in range(len(self._courses)) if island not in absent]
        at_work: dict[int, int | None] = dict.fromkeys(first)  # timelines; None: the first
        begun = 0
        for step in sorted(outer):
            took_part = {self._island(row): row.timeline for row in outer[step]}
            for at in self._courses[0].trained_before(step):
                of = [inner[took_part[island], at] for island in sorted(took_part)]
                made.append(together(of, self.timeline, at))
            behind = [fork for fork in forks if fork.version == step + 1]
            self._note(step, took_part, behind)
            at_work = {**took_part, **{fork.timeline % len(self._courses): fork.timeline for fork in behind}}
            begun = self._courses[0].inner_steps(step + 1)
        for (timeline, at), row in sorted(inner.items(), key=lambda item: (item[0][1], item[1].timeline)):
            island = self._island(row)
            if at >= begun and island in at_work and at_work[island] in (timeline, None):
                made += self.take((row,), (), at_work.keys()).rows
        return tuple(made)

    def _note(self, step: int, present: Collection[int], forks: Iterable[Fork]) -> None:
        begins = {fork.timeline % len(self._courses): fork.origin % len(self._courses) for fork in forks}
        after_step = self._courses[0].inner_steps(step)
        if begins or len(present) < len(self._courses):
            fragment = self._courses[0].outer_at(step).fragment
            self.log.append(OuterRecord(after_step, tuple(sorted(present)), begins, fragment))

    def _island(self, row: CommitRow) -> int:
        return row.timeline % len(self._courses)


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
    return tuple(0 if course.is_outer(step.step) else course.inner_steps(step.step) + 1 for step in steps)


def evaluation_of(row: EvaluationRow, course: OuterCourse) -> EvaluationRow:
    """What an island evaluated, as the job's."""
    timeline = job_timeline_of(row.timeline, course.inner.islands)
    return replace(row, timeline=timeline, version=course.inner_steps(row.version))
