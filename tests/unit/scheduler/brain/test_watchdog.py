"""How long a job may run, and how long it may stand still."""

from __future__ import annotations

import math

from scheduler.brain.watchdog import PAUSE_AGAIN_S, Over, Watchdog


def test_a_job_that_moves_may_run_for_ever() -> None:
    patience = Watchdog(300.0, 0.0)
    assert patience.due_s() == math.inf
    patience.begin(10.0)
    assert patience.due_s() == 310.0
    patience.moved(200.0)
    assert patience.over(310.0) is None
    assert patience.due_s() == 500.0


def test_that_a_job_stands_still_is_said_again_when_as_long_has_passed() -> None:
    patience = Watchdog(300.0, 0.0)
    patience.begin(0.0)
    assert patience.over(300.0) is Over.STILL
    assert patience.over(300.0) is None
    assert patience.over(599.0) is None
    assert patience.over(600.0) is Over.STILL


def test_nothing_can_move_while_the_job_rests() -> None:
    patience = Watchdog(10.0, 0.0)
    patience.begin(0.0)
    assert patience.due_s(60.0) == 70.0
    assert patience.over(69.0, 60.0) is None
    assert patience.over(70.0, 60.0) is Over.STILL


def test_a_job_whose_time_is_over_is_told_once_and_again_if_it_could_not_be_paused() -> None:
    patience = Watchdog(1e6, 100.0)
    patience.begin(5.0)
    assert patience.over(104.0) is None
    assert patience.over(105.0) is Over.RAN_OUT
    assert patience.over(1000.0) is None
    patience.goes_on(1000.0)
    assert patience.due_s() == 1000.0 + PAUSE_AGAIN_S
    assert patience.over(1000.0 + PAUSE_AGAIN_S) is Over.RAN_OUT


def test_a_pause_that_a_person_asked_for_and_that_failed_takes_nothing_from_the_time() -> None:
    patience = Watchdog(1e6, 100.0)
    patience.begin(0.0)
    patience.goes_on(10.0)
    assert patience.over(70.0) is None
    assert patience.over(100.0) is Over.RAN_OUT


def test_a_short_time_is_waited_for_as_long_as_it_is() -> None:
    patience = Watchdog(1e6, 5.0)
    patience.begin(0.0)
    assert patience.over(5.0) is Over.RAN_OUT
    patience.goes_on(6.0)
    assert patience.due_s() == 11.0


def test_a_watchdog_that_asks_far_too_late_stood_still_itself() -> None:
    patience = Watchdog(300.0, 0.0)
    patience.begin(0.0)
    assert patience.over(5000.0) is None, "the scheduler was stopped"
    assert patience.over(5300.0) is Over.STILL
