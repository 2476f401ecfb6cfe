"""scheduler.brain.islands.brain: how much of a step each island trains behind an outer step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.brain.islands.brain import Pacing
from scheduler.brain.islands.forks import Division
from scheduler.brain.outputs import CommitRow, Fork
from swarm.job.course import IslandCourse, OuterCourse
from swarm.job.shares import Shares


def test_what_an_earlier_life_of_an_island_took_does_not_count() -> None:
    """An island was lost while it waited for the others, and its time stayed."""
    shares = Shares(2, 16)
    course = OuterCourse(IslandCourse(8, 2, 2, 0, shares))
    at_work = {0: SimpleNamespace(outer_step=None), 1: SimpleNamespace(outer_step=None)}
    roster: Any = SimpleNamespace(courses=(course, course), present=(0, 1), at_work=lambda: at_work)
    pacing = Pacing(roster, shares)
    assert pacing.decide(2, ()) == (8, 8)
    pacing.durable([CommitRow(0, 2, {}, 0.0, 1.0, 1.0, 0.0, False, 0)], 10.0)
    at_work[1].outer_step = 5
    pacing.note(11.0)
    del at_work[1]
    roster.present = (0,)
    at_work[0].outer_step = 5
    pacing.note(14.0)
    begins = Division(1, 0, Fork(1, 0, 6), {})
    assert pacing.decide(5, [begins]) == (8, 8)
    assert pacing.decide(5, ()) == (16, 0)


@pytest.mark.parametrize(("steps", "expected"), [(7, (13, 3)), (8, (13, 3)), (9, (38, 10)), (30, (38, 10))])
def test_shares_are_of_the_steps_up_to_the_next_exchange(steps: int, expected: tuple[int, int]) -> None:
    shares = Shares(2, 16)
    course = OuterCourse(IslandCourse(steps, 3, 2, 0, shares))
    at_work = {0: SimpleNamespace(outer_step=None), 1: SimpleNamespace(outer_step=None)}
    roster: Any = SimpleNamespace(courses=(course, course), present=(0, 1), at_work=lambda: at_work)
    pacing = Pacing(roster, shares)
    assert pacing.decide(3, ()) == (8, 8)
    pacing.durable([CommitRow(0, 3, {}, 0.0, 1.0, 1.0, 0.0, False, 0)], 10.0)
    for island, now_s in enumerate((11.0, 13.8)):
        at_work[island].outer_step = 7
        pacing.note(now_s)
    assert pacing.decide(7, ()) == expected
