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
