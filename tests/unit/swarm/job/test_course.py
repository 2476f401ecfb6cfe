"""swarm.job.course: what each step trains."""

from __future__ import annotations

from swarm.job.course import PLAIN, InnerStep


def test_on_the_plain_course_a_step_is_its_own_portion_and_place_in_the_schedule() -> None:
    assert [PLAIN.at(step) for step in (0, 1, 999)] == [InnerStep(0, 0), InnerStep(1, 1), InnerStep(999, 999)]
