"""scheduler.brain.islands.rows: what people are told of a step that several islands made."""

from __future__ import annotations

import math

from scheduler.brain.islands.rows import Rows
from scheduler.brain.outputs import CommitRow
from swarm.job.course import IslandCourse, OuterCourse

COURSES = [OuterCourse(IslandCourse(3, 2, 2, island)) for island in range(2)]  # inner steps 0, 1, 3; outer 2 and 4


def row(island: int, step: int, loss: float = 1.0, tokens: int = 8, *, skip: bool = False) -> CommitRow:
    return CommitRow(6 + island, step, {}, loss, 2.0 + island, 0.5 + island, 0.1, skip, tokens)


def test_a_step_is_told_once_all_islands_made_it_and_outer_steps_never() -> None:
    rows = Rows(3, COURSES)
    told = [rows.take(one) for one in (row(0, 0), row(0, 1), row(1, 0), row(1, 1), row(0, 2), row(1, 2), row(1, 3))]
    assert [one and one.step for one in told] == [None, None, 0, 1, None, None, None]
    last = rows.take(row(0, 3))
    assert last is not None
    assert (last.timeline, last.step) == (3, 2), "the job's timeline, and an inner step"


def test_losses_weigh_by_tokens_and_a_skipped_island_shows() -> None:
    rows = Rows(3, COURSES)
    rows.take(row(1, 0, 4.0, 10))
    told = rows.take(row(0, 0, 1.0, 30, skip=True))
    assert told is not None
    assert (told.loss, told.tokens, told.skip) == ((1.0 * 30 + 4.0 * 10) / 40, 40, True)
    assert (told.norm, told.scale) == (3.0, 0.5)


def test_one_island_alone_is_told_as_it_is() -> None:
    told = Rows(3, COURSES[:1]).take(CommitRow(3, 0, {}, 0.1, 2.0, 1.0, 0.1, False, 7))
    assert told is not None
    assert (told.loss, told.tokens) == (0.1, 7)
    empty = Rows(0, COURSES)
    empty.take(row(0, 0, 0.0, 0))
    nothing = empty.take(row(1, 0, 0.0, 0))
    assert nothing is not None
    assert math.isnan(nothing.loss)
