"""The course of a job: the portion of the data and the place in the learning-rate schedule of each step.

A step is a position in a sequence of commits, and says neither by itself. The scheduler, stage servers and the
one-process reference all ask the course. Pure values; standard library only. Decisions: docs/decisions/044, 069, 107.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from swarm.job.leases import Leases
from swarm.job.outer import Rhythm
from swarm.job.schedule import evaluation_due, version_of

TIMELINES_MAX = 1 << 14  # of a job; the lives of its islands are numbered above that


def job_timeline_of(timeline: int, islands: int) -> int:
    """The job's timeline to which an island's timeline belongs (swarm/job/islands.py)."""
    return timeline if islands == 1 else timeline // islands % TIMELINES_MAX


@dataclass(frozen=True, slots=True)
class InnerStep:
    """The portion and rate step of one step. The portion also seeds dropout, alike on every island."""

    portion: int  # global_batch_sequences samples of the data order: portion q begins with sample q * that number
    rate_step: int  # its place in the schedule of the learning rate


@dataclass(frozen=True, slots=True)
class Course:
    """The steps of a job: each trains the next portion."""

    @property
    def steps_ahead(self) -> int:
        """The number of steps that a replica may hear of before it has made the steps in between."""
        return 0

    def version_of(self, step: int, index: int, *, overlap: int, sync_steps: int) -> int:
        """The version of the weights that microbatch `index` of step `step` is computed with."""
        return version_of(step, index, overlap=overlap, sync_steps=sync_steps)

    def outer_at(self, step: int) -> OuterStep:
        """What the outer step `step` does."""
        raise AssertionError(f"step {step} merges nothing")

    def at(self, step: int) -> InnerStep:
        """The portion and rate step of step `step` (from 0)."""
        return InnerStep(portion=step, rate_step=step)

    def microbatches(self, step: int, usual: int) -> int:
        """How many microbatches step `step` has, in a job that usually has this number."""
        return usual

    def may_begin(self, step: int) -> bool:
        """Whether a step that trains may begin, as far as its island's lease goes."""
        return True

    def trained(self, version: int, usual: int) -> int:
        """How many microbatches the first `version` steps have."""
        return self.inner_steps(version) * usual

    def is_outer(self, step: int) -> bool:
        """Whether the step has no microbatches, and merges what the islands propose."""
        return False

    def proposes(self, version: int, step: int) -> bool:
        """Whether a replica of this version holds what its island proposes for an outer step to come."""
        return self.is_outer(step) and self.outer_at(step).captured_version <= version <= step

    def inner_steps(self, version: int) -> int:
        """How many of the first `version` steps train."""
        return version

    def version_after(self, inner_steps: int) -> int:
        """The version at which a job goes on after `inner_steps` of its steps; inverse of `inner_steps`."""
        return inner_steps

    def level_from(self, version: int) -> int:
        """The first version from `version` on that is the same in all islands, and so can be saved."""
        return version

    def is_saved(self, version: int, every_steps: int) -> bool:
        """Whether weights `version` are saved, if that is due every `every_steps` (0 = never)."""
        return every_steps > 0 and version % every_steps == 0

    def is_evaluated(self, version: int, every_steps: int, steps: int) -> bool:
        """Whether weights `version` are evaluated, if that is due every `every_steps` (0 = never) of `steps`."""
        return evaluation_due(version, every_steps, steps)


PLAIN = Course()


@dataclass(frozen=True, slots=True)
class IslandCourse:
    """The inner steps of one of several islands, which lease portions in turn, `lease` of them each.

        lease 2, islands A and B, portions:    A A B B | A A B B | A B    the last lease is what is left, in equal parts

    The rate step counts an island's own steps, so all islands are at the same place of the schedule.
    """

    steps: int  # inner steps of each island
    lease: int
    islands: int
    island: int
    leases: Leases | None = field(default=None, compare=False)  # where they follow speed, and so have other sizes

    def at(self, step: int) -> InnerStep:
        """The portion and rate step of the island's inner step `step` (from 0)."""
        before = step - step % self.lease  # portions that each island had from earlier leases
        leased = min(self.lease, self.steps - before)
        return InnerStep(before * self.islands + self.island * leased + step - before, rate_step=step)


@dataclass(frozen=True, slots=True)
class OuterStep:
    """An outer step of an island: it merges a fragment behind `behind` inner steps, as proposed behind `captured`."""

    step: int
    fragment: int
    since: int  # inner steps behind which the fragment was captured before
    captured: int
    behind: int
    captured_version: int  # the version that the newest of the captured inner steps made

    @property
    def is_held(self) -> bool:
        """Whether inner steps lie between the capture and the merge, so that replicas hold what they proposed."""
        return self.captured < self.behind


@dataclass(frozen=True, slots=True)
class OuterCourse(Course):
    """All steps of an island: inner steps, and outer ones where the rhythm merges.

    diloco, lease 2, 5 inner steps    inner 0 1 . 2 3 . 4 .
                                      step  0 1 2 3 4 5 6 7      steps 2, 5 and 7 are outer ones

    A version is level if it lies behind an outer step and nothing that was captured waits for its merge. Then islands
    differ in nothing but what each has trained since the last captures; with diloco in nothing.
    """

    inner: IslandCourse
    fragments: int = 1
    overlap_steps: int = 0
    streams: bool = False  # weights are never the outer weights, so they are evaluated as they are

    @property
    def outer(self) -> tuple[OuterStep, ...]:
        """All outer steps, in order."""
        return self._table.outer

    @property
    def _table(self) -> _Table:
        return _table(Rhythm(self.inner.steps, self.inner.lease, self.fragments, self.overlap_steps))

    @property
    def steps(self) -> int:
        """Inner and outer steps."""
        return self.inner.steps + len(self.outer)

    def version_of(self, step: int, index: int, *, overlap: int, sync_steps: int) -> int:
        """None is late behind an outer step: it would use weights that the merge has replaced.

        `sync_steps` counts inner steps.
        """
        if self.is_outer(step) or self.is_outer(step - 1):
            return step
        inner = self.inner_steps(step)
        return step - inner + version_of(inner, index, overlap=overlap, sync_steps=sync_steps)

    @property
    def steps_ahead(self) -> int:
        """How many steps an outer step may lie behind the version whose weights are proposed there."""
        return self._table.steps_ahead

    def at(self, step: int) -> InnerStep:
        """The portion and rate step of a step that is no outer one."""
        assert not self.is_outer(step), f"step {step} trains nothing"
        return self.inner.at(self.inner_steps(step))

    def microbatches(self, step: int, usual: int) -> int:
        leases = self.inner.leases
        return usual if leases is None else leases.count(self.inner.island, self.inner_steps(step))

    def may_begin(self, step: int) -> bool:
        leases = self.inner.leases
        return leases is None or leases.may_begin(self.inner.island, self.inner_steps(step))

    def trained(self, version: int, usual: int) -> int:
        steps, leases = self.inner_steps(version), self.inner.leases
        return steps * usual if leases is None else leases.trained(self.inner.island, steps)

    def is_outer(self, step: int) -> bool:
        at = self._outer_before(step)
        return at < len(self.outer) and self.outer[at].step == step

    def outer_at(self, step: int) -> OuterStep:
        """What the outer step `step` does."""
        assert self.is_outer(step), f"step {step} merges nothing"
        return self.outer[self._outer_before(step)]

    def next_outer(self, step: int) -> OuterStep | None:
        """The first outer step from `step` on."""
        at = self._outer_before(step)
        return self.outer[at] if at < len(self.outer) else None

    def held(self, version: int) -> tuple[int, ...]:
        """The fragments whose proposals replicas of this version hold, captured and not merged."""
        return tuple(outer_step.fragment for outer_step in self._waiting(version))

    def captured(self, version: int) -> tuple[int, ...]:
        """Those of them that are captured with this version."""
        return tuple(
            outer_step.fragment for outer_step in self._waiting(version) if outer_step.captured_version == version
        )

    def _waiting(self, version: int) -> Iterator[OuterStep]:
        for at in range(self._outer_before(version), len(self.outer)):
            one = self.outer[at]
            if one.captured_version > version:
                return
            if one.is_held:
                yield one

    def inner_steps(self, version: int) -> int:
        return version - self._outer_before(version)

    def span(self, step: int) -> range:
        """The inner steps, counted without outer ones, whose updates an outer step merges."""
        one = self.outer_at(step)
        return range(one.since, one.captured)

    def trained_before(self, step: int) -> range:
        """The inner steps between an outer step and the one before."""
        at = self._outer_before(step)
        return range(self.outer[at - 1].behind if at else 0, self.outer[at].behind)

    def version_after(self, inner_steps: int) -> int:
        """Behind the outer steps that follow them."""
        return inner_steps + bisect_right(self._table.behind, inner_steps)

    def level_from(self, version: int) -> int:
        """The first level version from `version` on."""
        return self._table.level[bisect_left(self._table.level, version)]

    def outer_before(self, version: int) -> int:
        """The newest version up to `version` that lies behind an outer step; 0 if there is none."""
        at = self._outer_before(version)
        return self.outer[at - 1].step + 1 if at else 0

    def is_saved(self, version: int, every_steps: int) -> bool:
        """Whether the version is saved: saves due since the level version before wait for the next one."""
        if not every_steps or not self._is_level(version):
            return False
        return any((inner + 1) % every_steps == 0 for inner in self._since_level(version))

    def is_evaluated(self, version: int, every_steps: int, steps: int) -> bool:
        """Whether the version is evaluated.

        If islands hold the same weights only where they are level, what was due since then waits.
        """
        if self.streams:
            inner = self.inner_steps(version)
            is_behind = self.version_after(inner) == version
            return version > 0 and is_behind and evaluation_due(inner, every_steps, self.inner.steps)
        if not self._is_level(version):
            return False
        return any(evaluation_due(inner + 1, every_steps, self.inner.steps) for inner in self._since_level(version))

    def _is_level(self, version: int) -> bool:
        return version > 0 and self.level_from(version) == version

    def _since_level(self, version: int) -> range:
        """The inner steps between a level version and the one before."""
        before = self._table.level[bisect_left(self._table.level, version) - 1]
        return range(self.inner_steps(before), self.inner_steps(version))

    def _outer_before(self, step: int) -> int:
        """How many outer steps lie before `step`."""
        return bisect_left(self._table.steps, step)


@dataclass(frozen=True, slots=True)
class _Table:
    """The outer steps of a course, and what is looked up in them."""

    outer: tuple[OuterStep, ...]
    steps: tuple[int, ...]
    behind: tuple[int, ...]
    level: tuple[int, ...]  # level versions, 0 first
    steps_ahead: int


@lru_cache(maxsize=64)
def _table(rhythm: Rhythm) -> _Table:
    """Courses are made anew in many places, so their tables are kept."""
    outer: list[OuterStep] = []
    captured: dict[int, tuple[int, int]] = {}  # by fragment, until merged: inner steps, and their version
    since = [0] * rhythm.fragments
    for inner in rhythm.events():
        captured |= dict.fromkeys(rhythm.captures(inner), (inner + 1, inner + 1 + len(outer)))
        for fragment in rhythm.merges(inner):
            steps, version = captured.pop(fragment)
            outer.append(OuterStep(inner + 1 + len(outer), fragment, since[fragment], steps, inner + 1, version))
            since[fragment] = steps
    level = [0]
    for at, one in enumerate(outer):
        following = outer[at + 1].captured_version if at + 1 < len(outer) else one.step + 2
        if following > one.step + 1:
            level.append(one.step + 1)
    places = tuple(outer_step.step for outer_step in outer), tuple(outer_step.behind for outer_step in outer)
    return _Table(
        tuple(outer), *places, tuple(level), max(outer_step.step - outer_step.captured_version for outer_step in outer)
    )
