"""How a curve is drawn with letters."""

from __future__ import annotations

from math import nan

from client.board import sparkline


def test_a_curve_ends_with_the_newest_value_and_fits_its_columns() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert len(sparkline(range(1000), 60)) == 60
    assert sparkline([1.0] * 59 + [2.0], 60)[-1] == "█"


def test_nothing_is_drawn_of_what_is_not_finite() -> None:
    assert sparkline([]) == ""
    assert sparkline([nan]) == ""
    assert sparkline([1.0, nan, 1.0]) == "▁▁"
