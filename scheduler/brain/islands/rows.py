"""Merges the commit rows of islands into the rows of the job that people see: one per inner step.

island 0    step 0   1   2  outer  3        a step of the job is complete, and told, once all islands at work made it;
island 1    step 0   1                      outer steps are not told
job         step 0   1

An exchange says which islands took part. What another island made since the exchange before does not count, and people
see it undone. Decision: docs/decisions/064.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler.brain.explain.step_times import StepTimes
from scheduler.brain.outputs import CommitRow, EvaluationRow, Exchanged, Fork
from swarm.job.course import Course, OuterCourse, job_timeline_of
from swarm.job.leases import Cut
from swarm.job.outer_log import Entry, OuterRecord

# Exchanges by which islands go on, beside two for each fragment: between the last one of a fragment in its turn and its
# closing merge all others may have both of theirs.
NEWEST = 2


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
        self.log: list[Entry] = []  # exchanges without all islands, or behind which one began anew; unequal leases
        self.cuts: list[Cut] = []  # of leases, where they follow speed
        self.newest = deque[Exchanged](maxlen=NEWEST + 2 * courses[0].fragments)
        self._courses = courses
        self._open: dict[int, dict[int, CommitRow]] = {}  # by inner step and island
        self._told: dict[int, int] = {}  # tokens by island, of steps that no exchange has made count yet
        self._counts: dict[int, int] = {}  # by island: up to which inner step an exchange said what counts

    def lease(self, cut: Cut) -> None:
        """Leases were cut anew, or left as they are for one more period."""
        self.cuts.append(cut)
        if cut.leases:
            self.log.append(cut)

    def take(
        self,
        rows: Sequence[CommitRow],
        forks: Iterable[Fork],
        present: Collection[int],
        exchange: Exchanged | None = None,
    ) -> Told:
        """Take in rows that became durable together, and the exchange with them; `present` are the islands at work."""
        for row in rows:
            course = self._courses[self._island(row.timeline)]
            if not course.is_outer(row.step):
                self._open.setdefault(course.inner_steps(row.step), {})[self._island(row.timeline)] = row
        if exchange is not None:
            present = set(map(self._island, exchange.islands + exchange.late))
        made = []
        for inner in sorted(self._open):
            of = {island: row for island, row in self._open[inner].items() if island in present}
            if len(of) == len(present):
                del self._open[inner]
                made.append(together([of[island] for island in sorted(of)], self.timeline, inner))
                for island, row in of.items():
                    is_open = inner >= self._counts.get(island, 0)
                    self._told[island] = self._told.get(island, 0) + row.tokens * is_open
        if exchange is None:
            return Told(tuple(made))
        return self._exchanged(exchange, forks, tuple(made))

    def _exchanged(self, exchange: Exchanged, forks: Iterable[Fork], made: tuple[CommitRow, ...]) -> Told:
        before, dropped, left_out = self._courses[0].trained_before(exchange.step), 0, dict[int, int]()
        islands, late = (tuple(sorted(map(self._island, of))) for of in (exchange.islands, exchange.late))
        for island in range(len(self._courses)):
            since = self._counts.setdefault(island, before.start)
            if island in late:
                continue
            tokens, self._counts[island] = self._told.pop(island, 0), before.stop
            if island not in islands:
                dropped, left_out[island] = dropped + tokens, before.stop - since
                for of in self._open.values():
                    of.pop(island, None)  # it was lost
        self.newest.append(exchange)
        begins = {self._island(fork.timeline): self._island(fork.origin) for fork in forks}
        if begins or left_out or late:
            fragment = self._courses[0].outer_at(exchange.step).fragment
            self.log.append(OuterRecord(before.stop, islands, begins, fragment, late))
        return Told(made, dropped, left_out)

    def rebuild(
        self,
        rows: Iterable[CommitRow],
        forks: Collection[Fork],
        absent: Collection[int] = (),
        exchanges: Iterable[Exchanged] = (),
    ) -> tuple[CommitRow, ...]:
        """All rows of this timeline, of every life of every island, as after a restart: the steps that count.

        `absent`: the islands without which the timeline began.
        """
        inner: dict[int, dict[int, CommitRow]] = {}  # by inner step and timeline
        made: dict[int, Exchanged] = {}
        for row in rows:
            course = self._courses[self._island(row.timeline)]
            if course.is_outer(row.step):  # an earlier version wrote them together, and no exchange
                islands = made[row.step].islands if row.step in made else ()
                made[row.step] = Exchanged(row.step, (), row.skip, row.norm, (*islands, row.timeline))
            else:
                inner.setdefault(course.inner_steps(row.step), {})[row.timeline] = row
        made |= {exchange.step: exchange for exchange in exchanges}
        found: list[CommitRow] = []
        first = [island for island in range(len(self._courses)) if island not in absent]
        at_work: dict[int, int | None] = dict.fromkeys(first)  # timelines; None: the first
        left = deque(sorted(inner.items()))
        steps = sorted(made)
        counts, later = dict[int, set[int]](), set(made[steps[-1]].late if steps else ())  # timelines, by exchange
        for step in reversed(steps):
            counts[step] = later = {*made[step].islands, *later.intersection(made[step].late)}
        for step in steps:
            behind = [fork for fork in forks if fork.version == step + 1]
            of = list[CommitRow]()
            while left and left[0][0] < self._courses[0].inner_steps(step):
                of += [row for timeline, row in sorted(left.popleft()[1].items()) if timeline in counts[step]]
            found += self.take(of, behind, (), made[step]).rows
            at_work = {self._island(timeline): timeline for timeline in made[step].islands + made[step].late}
            at_work |= {self._island(fork.timeline): fork.timeline for fork in behind}
        for _, of_step in left:
            for timeline, row in sorted(of_step.items()):
                island = self._island(timeline)
                if island in at_work and at_work[island] in (timeline, None):
                    found += self.take((row,), (), at_work.keys()).rows
        return tuple(found)

    def _island(self, timeline: int) -> int:
        return timeline % len(self._courses)


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
