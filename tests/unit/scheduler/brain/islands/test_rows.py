"""scheduler.brain.islands.rows: what people are told of a step that several islands made."""

from __future__ import annotations

import math
from dataclasses import replace

from scheduler.brain.islands.rows import Rows, Told
from scheduler.brain.outputs import CommitRow, Exchanged, Fork
from swarm.job.course import TIMELINES_MAX, IslandCourse, OuterCourse
from swarm.job.leases import Cut
from swarm.job.outer_log import OuterRecord

COURSES = [OuterCourse(IslandCourse(3, 2, 2, island)) for island in range(2)]  # inner steps 0, 1, 3; outer 2 and 4


def row(island: int, step: int, loss: float = 1.0, tokens: int = 8, *, skip: bool = False) -> CommitRow:
    return CommitRow(6 + island, step, {}, loss, 2.0 + island, 0.5 + island, 0.1, skip, tokens)


def exchange(*islands: int, step: int = 2, late: tuple[int, ...] = ()) -> Exchanged:
    in_it, behind = (tuple(6 + island for island in of) for of in (islands, late))
    return Exchanged(step, (), False, 2.0, in_it, late=behind)


BOTH = (0, 1)


def told(rows: Rows, *ones: CommitRow, present: tuple[int, ...] = BOTH) -> list[int]:
    """The steps that are told, row by row; the two of an outer step come together."""
    found = []
    for commit in ones:
        found += [row.step for row in rows.take((commit,), (), present).rows]
    return found


def test_a_step_is_told_once_all_islands_made_it_and_outer_steps_never() -> None:
    rows = Rows(3, COURSES)
    assert told(rows, row(0, 0), row(0, 1)) == []
    assert told(rows, row(1, 0)) == [0]
    assert told(rows, row(1, 1)) == [1]
    assert rows.take((row(0, 2), row(1, 2)), (), BOTH, exchange(0, 1)) == Told(())
    assert told(rows, row(1, 3)) == []
    (last,) = rows.take((row(0, 3),), (), BOTH).rows
    assert (last.timeline, last.step) == (3, 2), "the job's timeline, and an inner step"
    assert rows.log == []


def test_losses_weigh_by_tokens_and_a_skipped_island_shows() -> None:
    rows = Rows(3, COURSES)
    rows.take((row(1, 0, 4.0, 10),), (), BOTH)
    (one,) = rows.take((row(0, 0, 1.0, 30, skip=True),), (), BOTH).rows
    assert (one.loss, one.tokens, one.skip) == ((1.0 * 30 + 4.0 * 10) / 40, 40, True)
    assert (one.norm, one.scale) == (3.0, 0.5)


def test_one_island_alone_is_told_as_it_is() -> None:
    (one,) = Rows(3, COURSES[:1]).take((CommitRow(3, 0, {}, 0.1, 2.0, 1.0, 0.1, False, 7),), (), (0,)).rows
    assert (one.loss, one.tokens) == (0.1, 7)
    empty = Rows(0, COURSES)
    empty.take((row(0, 0, 0.0, 0),), (), BOTH)
    (nothing,) = empty.take((row(1, 0, 0.0, 0),), (), BOTH).rows
    assert math.isnan(nothing.loss)


def test_steps_are_told_without_an_island_that_is_lost_and_what_was_told_of_it_is_taken_back() -> None:
    rows = Rows(3, COURSES)
    assert told(rows, row(0, 0, tokens=5), row(1, 0, tokens=7), row(0, 1)) == [0]
    made = rows.take((row(0, 2),), (), (0,), exchange(0))
    assert [row.step for row in made.rows] == [1]
    assert made.dropped_tokens == 7
    assert made.left_out == {1: 2}, "steps 0 and 1"
    assert rows.log == [OuterRecord(2, (0,))]


NEW = 1 + 2 * TIMELINES_MAX  # the next life of island 1


def test_an_island_that_begins_anew_is_waited_for_again() -> None:
    rows = Rows(3, COURSES)
    rows.take((row(0, 0), row(0, 1)), (), (0,))
    rows.take((row(0, 2),), (Fork(NEW, 6, 3),), (0,), exchange(0))
    assert rows.log == [OuterRecord(2, (0,), {1: 0})]
    assert told(rows, row(0, 3)) == []
    assert told(rows, replace(row(1, 3), timeline=NEW)) == [2]


def test_rows_are_put_together_again_as_they_count() -> None:
    """As after a restart: of an island that was lost only what was exchanged, and its next life behind that."""
    rows = Rows(3, COURSES)
    fork = Fork(NEW, 6, 3)
    all_of_them = [row(0, step, tokens=5) for step in range(4)] + [row(1, 0, tokens=7)]
    made = rows.rebuild([*all_of_them, replace(row(1, 3, tokens=9), timeline=NEW)], [fork])
    assert [(record.step, record.tokens) for record in made] == [(0, 5), (1, 5), (2, 14)]
    assert rows.log == [OuterRecord(2, (0,), {1: 0})]
    assert Rows(3, COURSES).rebuild(all_of_them[:2], [fork], (), [exchange(0)]) == made[:2], "its row is not there yet"
    early = Rows(3, COURSES)
    assert [record.step for record in early.rebuild([row(0, 0), row(0, 1), row(1, 0)], [])] == [0]
    assert told(early, row(1, 1)) == [1], "it goes on from there"


def test_an_exchange_counts_steps_that_an_island_makes_after_it() -> None:
    """It is made once all have proposed; with overlap an island may still train up to its merge, and be lost there."""
    rows = Rows(3, COURSES)
    assert told(rows, row(0, 0), row(1, 0), row(0, 1)) == [0]
    assert rows.take((row(0, 2),), (), BOTH, exchange(0, 1)).rows == ()
    assert told(rows, row(1, 1), row(1, 2), row(0, 3)) == [1]
    last = rows.take((row(0, 4),), (), (0,), exchange(0, step=4))
    assert (last.dropped_tokens, last.left_out, [record.step for record in last.rows]) == (0, {1: 1}, [2])


def test_steps_of_a_late_island_are_waited_for_and_count_unless_it_is_lost() -> None:
    rows = Rows(3, COURSES)
    assert told(rows, row(0, 0), row(1, 0, tokens=5), row(0, 1)) == [0]
    assert rows.take((row(0, 2),), (), BOTH, exchange(0, late=(1,))) == Told(())
    assert told(rows, row(0, 3)) == []
    assert told(rows, row(1, 1, tokens=7), row(1, 2)) == [1]
    durable = [row(0, 0), row(1, 0, tokens=5), row(0, 1), row(0, 2), row(0, 3), row(1, 1, tokens=7), row(1, 2)]
    again = Rows(3, COURSES)
    made = again.rebuild(durable, [], (), [exchange(0, late=(1,))])
    assert [(record.step, record.tokens) for record in made] == [(0, 13), (1, 15)]
    lost = rows.take((row(0, 4),), (), (0,), exchange(0, step=4))
    assert (lost.dropped_tokens, lost.left_out) == (12, {1: 3}), "of two periods"
    assert rows.log == [OuterRecord(2, (0,), late=(1,)), OuterRecord(3, (0,))]
    without = Rows(3, COURSES).rebuild([*durable, row(0, 4)], [], (), [exchange(0, late=(1,)), exchange(0, step=4)])
    assert [(record.step, record.tokens) for record in without] == [(0, 8), (1, 8), (2, 8)]


def test_rows_are_put_together_again_without_going_through_all_later_exchanges_for_a_late_island() -> None:
    asked: list[int] = []

    class Step(int):
        def __hash__(self) -> int:
            asked.append(self)
            return super().__hash__()

    courses = [OuterCourse(IslandCourse(400, 2, 2, island)) for island in range(2)]
    made = [exchange(0, step=Step(outer.step), late=(1,)) for outer in courses[0].outer]
    Rows(3, courses).rebuild([], [], (), made)
    assert len(asked) <= 8 * len(made)


def test_rows_of_a_timeline_that_began_without_an_island_are_put_together_without_it() -> None:
    rows = Rows(3, COURSES)
    assert [record.step for record in rows.rebuild([row(0, 0), row(0, 1)], [], absent={1})] == [0, 1]
    assert rows.take((row(0, 2),), (), (0,), exchange(0)).left_out == {1: 2}
    assert rows.log == [OuterRecord(2, (0,))]
    again, fork = Rows(3, COURSES), Fork(NEW, 6, 3)
    made = again.rebuild([row(0, step) for step in range(4)], [fork], absent={1})
    assert [record.step for record in made] == [0, 1], "it began anew, and is waited for"


def test_leases_are_in_the_log_unless_they_stayed_equal() -> None:
    rows, equal, unequal = Rows(3, COURSES), Cut({0: 2, 1: 2}), Cut({0: 1, 1: 1}, {0: ((4, 11),), 1: ((11, 12),)})
    again = Cut({0: 2, 1: 3}, {0: ((8, 11),), 1: ((11, 12),)})
    for cut in (unequal, equal, again):
        rows.lease(cut)
    assert (rows.log, rows.cuts) == ([unequal, again], [unequal, equal, again])
