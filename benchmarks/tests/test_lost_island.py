"""benchmarks.sites.lost_island: which steps are compared, and what the aim is."""

from __future__ import annotations

import pytest

from benchmarks.sites.lost_island import Found, kept_of


def test_the_speed_from_the_next_exchange_on_is_compared_with_that_before() -> None:
    """Not with the steps between the loss and that exchange."""
    usual = [float(step) for step in range(15)]
    slow = [14.0 + 5.0 * step for step in range(1, 6)]
    after = [slow[-1] + 0.8 * step for step in range(1, 31)]
    assert kept_of([*usual, *slow, *after], 10, lost_s=15.0) == pytest.approx(1 / 0.8)


def test_state_has_the_time_that_the_link_needs_for_it_and_ten_seconds() -> None:
    found = Found(kept=1.0, ready_s=5.0, state_s=9.0, state_bytes=50_000_000, first_step_s=2.0, rollbacks=0)
    assert found.again_s() == 11.0
    assert found.aim_s(50.0) == pytest.approx(18.0)
