"""Curves stay short however long a job is, show its whole course, and go on where the database ends."""

from __future__ import annotations

from math import nan

import pytest

from scheduler.jobs.history import StepMade
from scheduler.web.curves import POINTS_MAX, Curves, every


def step(number: int, loss: float = 2.0, at_unix_s: float = 0.0) -> StepMade:
    return StepMade(number, loss, 1.0, 1e-3, 100, False, at_unix_s, nan)


@pytest.mark.parametrize("steps", [0, 1, POINTS_MAX, POINTS_MAX + 1, 10 * POINTS_MAX - 1, 10**9])
def test_as_many_steps_are_read_as_there_are_points(steps: int) -> None:
    assert steps // every(steps) <= POINTS_MAX
    assert steps < POINTS_MAX or steps // every(steps) >= POINTS_MAX // 2


def test_the_past_is_read_with_speeds_between_its_rows() -> None:
    curves = Curves.read([step(10, 3.0, 100.0), step(20, nan, 110.0), step(30, 2.0, 120.0)], {20: 2.5, 10: 3.5})
    assert curves.values() == {
        "loss": {"10": 3.0, "30": 2.0},
        "validation": {"10": 3.5, "20": 2.5},
        "speed": {"20": 100.0, "30": 100.0},
    }


def test_rows_without_a_time_have_a_loss_and_no_speed() -> None:
    curves = Curves.read([step(1), step(2)], {})
    assert (list(curves.loss), curves.speed) == ([1, 2], {})


def test_a_step_that_was_seen_changes_nothing_and_an_unknown_loss_is_left_out() -> None:
    curves = Curves.read([step(5)], {})
    curves.add(5, 9.0, 50.0)
    curves.add(6, nan, nan)
    curves.evaluated(0, nan)
    assert curves.values() == {"loss": {"5": 2.0}, "validation": {}, "speed": {"5": 50.0}}


def test_a_long_curve_loses_every_second_point_and_neither_its_beginning_nor_its_end() -> None:
    curves = Curves()
    for number in range(1, 20 * POINTS_MAX):
        curves.add(number, 10.0 / number, 1000.0)
        assert len(curves.loss) <= POINTS_MAX
    steps = list(curves.loss)
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 20 * POINTS_MAX - 1)
