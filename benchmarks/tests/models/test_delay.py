"""benchmarks.models.delay against what can be worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.models.delay import BETA, stable_up_to


def test_momentum_without_delay_is_stable_up_to_its_known_bound() -> None:
    assert stable_up_to(late=0.0, lookahead=0.0) == pytest.approx(2 * (1 + BETA) / (1 - BETA), rel=1e-3)


def test_without_momentum_a_delay_halves_the_bound_and_with_it_nothing_else_counts() -> None:
    """All gradient and no moment: 2 without delay, 1 with a delay of one step."""
    assert stable_up_to(late=0.0, lookahead=1.0) == pytest.approx(2.0, rel=1e-3)
    assert stable_up_to(late=1.0, lookahead=1.0) == pytest.approx(1.0, rel=1e-3)


def test_with_lookahead_a_quarter_late_bears_more_than_without() -> None:
    assert stable_up_to(late=0.25, lookahead=0.3) > 2.5 * stable_up_to(late=0.25, lookahead=0.0)
