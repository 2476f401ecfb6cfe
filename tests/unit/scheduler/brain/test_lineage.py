"""What of a job's past counts after it went back to a checkpoint, once and again."""

from __future__ import annotations

import pytest

from scheduler.brain.lineage import checkpoint_counts, resumed, row_counts
from swarm.errors import NotAllowed
from swarm.job.course import TIMELINES_MAX


def test_what_came_after_a_resume_s_step_does_not_count() -> None:
    first_steps = (0, 5, 3)
    assert [step for step in range(9) if row_counts(0, step, first_steps)] == [0, 1, 2]
    assert [step for step in range(5, 9) if row_counts(1, step, first_steps)] == []
    assert row_counts(2, 3, first_steps)
    assert [step for step in range(9) if checkpoint_counts(0, step, first_steps)] == [0, 1, 2, 3]
    assert not checkpoint_counts(1, 5, first_steps)


def test_a_future_that_was_left_counts_again_once_it_is_taken_up() -> None:
    """Timeline 0 ran to 9, timeline 1 went from 2 to 5, timeline 2 goes on from step 9 of timeline 0."""
    assert resumed((0,), 0, 2) == (0, 2)
    first_steps = resumed((0, 2), 0, 9)
    assert [step for step in range(12) if row_counts(0, step, first_steps)] == list(range(9))
    assert [step for step in range(2, 12) if row_counts(1, step, first_steps)] == []
    assert row_counts(2, 9, first_steps)
    assert [step for step in range(1, 12) if checkpoint_counts(0, step, first_steps)] == list(range(1, 10))
    assert [step for step in range(2, 12) if checkpoint_counts(1, step, first_steps)] == []
    assert [step for step in range(9, 12) if checkpoint_counts(2, step, first_steps)] == [9, 10, 11]
    assert resumed(first_steps, 2, 11)[-2:] == (9, 11)


def test_a_job_has_no_more_timelines_than_can_be_told_from_the_lives_of_its_islands() -> None:
    """The next one would be taken for a second life on timeline 0."""
    most = resumed((0,) * (TIMELINES_MAX - 1), 0, 4)
    assert len(most) == TIMELINES_MAX
    with pytest.raises(NotAllowed, match="begun anew 16384 times"):
        resumed(most, 0, 4)
