"""A course on which neither portion nor rate step is the step: who takes the step for either gets something else."""

from __future__ import annotations

from swarm.job.course import Course, InnerStep

PORTIONS_AHEAD, RATE_STEPS_AHEAD = 3, 20


class ShiftedCourse(Course):
    """Each step trains a later portion, at a place in the schedule that is later still."""

    __slots__ = ()

    def at(self, step: int) -> InnerStep:
        return InnerStep(step + PORTIONS_AHEAD, step + RATE_STEPS_AHEAD)
