"""What each step of a job trains: which portion of the data, at which place in the schedule of the learning rate.

A step is a position in a sequence of commits, and says neither by itself. Whoever needs to know asks the course: the
scheduler, stage servers and the one-process reference alike. Pure values; standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InnerStep:
    """What one step trains. Its portion also seeds its dropout, so equal portions drop alike whoever trains them."""

    portion: int  # global_batch_sequences samples of the data order: portion q begins with sample q * that number
    rate_step: int  # its place in the schedule of the learning rate


@dataclass(frozen=True, slots=True)
class Course:
    """The steps of a job: each trains the portion behind that of the step before."""

    def at(self, step: int) -> InnerStep:
        """What step `step` (from 0) trains."""
        return InnerStep(portion=step, rate_step=step)


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
        """What inner step `step` (from 0) of the island trains."""
        before = step - step % self.lease  # portions that each island had from earlier leases
        leased = min(self.lease, self.steps - before)
        return InnerStep(before * self.islands + self.island * leased + step - before, rate_step=step)
