"""scheduler.brain.fleet.fewer: how long a job waits for all its islands."""

from __future__ import annotations

from scheduler.brain.fleet.fewer import Fewer, waits_on


def test_the_wait_begins_when_some_could_begin_and_goes_on_when_more_could() -> None:
    first = waits_on(None, 1, 3, 300.0, 20.0)
    assert first == Fewer(1, 3, 320.0)
    assert waits_on(first, 2, 3, 300.0, 200.0) == Fewer(2, 3, 320.0)
    assert waits_on(first, 1, 3, 300.0, 400.0) == first


def test_a_job_for_which_too_few_are_there_waits_anew() -> None:
    assert waits_on(None, 0, 2, 300.0, 20.0) is None
    assert waits_on(Fewer(1, 2, 320.0), 0, 2, 300.0, 100.0) is None


def test_people_are_told_how_long_it_still_waits() -> None:
    assert Fewer(1, 2, 320.0).told(79.5) == "goes on with 1 of 2 islands in 241 s if no more can begin"
    assert Fewer(2, 3, 320.0).told(321.0) == "goes on with 2 of 3 islands in 0 s if no more can begin"
