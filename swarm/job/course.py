"""The course of a job: the portion of the data and the place in the learning-rate schedule of each step.

A step is a position in a sequence of commits, and says neither by itself. The scheduler, stage servers and the
one-process reference all ask the course. Pure values; standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.job.schedule import evaluation_due

TIMELINES_MAX = 1 << 14  # of a job; the lives of its islands are numbered above that


def job_timeline_of(timeline: int, islands: int) -> int:
    """The timeline of a job to which that of one of its islands belongs (swarm/job/islands.py)."""
    return timeline if islands == 1 else timeline // islands % TIMELINES_MAX


@dataclass(frozen=True, slots=True)
class InnerStep:
    """The portion and rate step of one step. The portion also seeds dropout, alike on every island."""

    portion: int  # global_batch_sequences samples of the data order: portion q begins with sample q * that number
    rate_step: int  # its place in the schedule of the learning rate


@dataclass(frozen=True, slots=True)
class Course:
    """The steps of a job: each trains the portion behind that of the step before."""

    def at(self, step: int) -> InnerStep:
        """The portion and rate step of step `step` (from 0)."""
        return InnerStep(portion=step, rate_step=step)

    def is_outer(self, step: int) -> bool:
        """Whether the step has no microbatches, and merges what the islands propose."""
        return False

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

    def at(self, step: int) -> InnerStep:
        """The portion and rate step of the island's inner step `step` (from 0)."""
        before = step - step % self.lease  # portions that each island had from earlier leases
        leased = min(self.lease, self.steps - before)
        return InnerStep(before * self.islands + self.island * leased + step - before, rate_step=step)


@dataclass(frozen=True, slots=True)
class OuterCourse(Course):
    """All steps of an island: an outer step follows each lease of inner steps.

    lease 2, 5 inner steps    inner 0 1 . 2 3 . 4 .
                              step  0 1 2 3 4 5 6 7      steps 2, 5 and 7 are outer ones
    """

    inner: IslandCourse

    @property
    def steps(self) -> int:
        """Inner and outer steps."""
        return self.inner.steps + -(-self.inner.steps // self.inner.lease)

    def at(self, step: int) -> InnerStep:
        """The portion and rate step of a step that is no outer one."""
        assert not self.is_outer(step), f"step {step} trains nothing"
        return self.inner.at(self.inner_steps(step))

    def is_outer(self, step: int) -> bool:
        return step % (self.inner.lease + 1) == self.inner.lease or step == self.steps - 1

    def inner_steps(self, version: int) -> int:
        leases, more = divmod(version, self.inner.lease + 1)
        return min(self.inner.steps, leases * self.inner.lease + more)

    def span(self, step: int) -> range:
        """The inner steps, counted without outer ones, whose updates an outer step merges."""
        stop = self.inner_steps(step)
        return range((stop - 1) // self.inner.lease * self.inner.lease, stop)

    def version_after(self, inner_steps: int) -> int:
        """Behind the outer step that follows them."""
        return inner_steps + -(-inner_steps // self.inner.lease)

    def level_from(self, version: int) -> int:
        """Behind an outer step, or at the start, all islands hold the outer weights and no others."""
        period = self.inner.lease + 1
        return min(self.steps, -(-version // period) * period)

    def level_before(self, version: int) -> int:
        """The newest level version up to `version`."""
        period = self.inner.lease + 1
        return version if version == self.steps else version // period * period

    def is_saved(self, version: int, every_steps: int) -> bool:
        """Whether the version is saved: saves due since the last outer step wait for the next one."""
        if version == 0 or not self.is_outer(version - 1) or not every_steps:
            return False
        return any((inner + 1) % every_steps == 0 for inner in self.span(version - 1))

    def is_evaluated(self, version: int, every_steps: int, steps: int) -> bool:
        """Only behind an outer step do all islands hold the same weights, so what was due since the last one waits."""
        if version == 0 or not self.is_outer(version - 1):
            return False
        return any(evaluation_due(inner + 1, every_steps, self.inner.steps) for inner in self.span(version - 1))
