"""swarm.job.course: what each step trains."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.job.course import PLAIN, InnerStep, IslandCourse


def test_on_the_plain_course_a_step_is_its_own_portion_and_place_in_the_schedule() -> None:
    assert [PLAIN.at(step) for step in (0, 1, 999)] == [InnerStep(0, 0), InnerStep(1, 1), InnerStep(999, 999)]


def test_islands_lease_portions_in_turn_and_the_last_lease_is_what_is_left() -> None:
    portions = [[IslandCourse(5, 2, 2, island).at(step).portion for step in range(5)] for island in range(2)]
    assert portions == [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]
    assert [IslandCourse(5, 2, 2, 1).at(step).rate_step for step in range(5)] == [0, 1, 2, 3, 4]


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 5))
def test_every_portion_of_a_job_is_trained_once_by_one_island(steps: int, lease: int, islands: int) -> None:
    courses = [IslandCourse(steps, lease, islands, island) for island in range(islands)]
    trained = [course.at(step).portion for course in courses for step in range(steps)]
    assert sorted(trained) == list(range(steps * islands))


@given(st.integers(1, 60), st.integers(1, 70))
def test_one_island_alone_is_on_the_plain_course(steps: int, lease: int) -> None:
    assert all(IslandCourse(steps, lease, 1, 0).at(step) == PLAIN.at(step) for step in range(steps))
