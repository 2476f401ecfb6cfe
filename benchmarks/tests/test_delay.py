"""The table of stable rates agrees with what is known in closed form."""

from __future__ import annotations

import pytest

from benchmarks.models.delay import stable_up_to


def test_known_limits() -> None:
    assert stable_up_to(0.0, delay=0, nesterov=False) == pytest.approx(2, rel=1e-3)
    assert stable_up_to(0.0, delay=1, nesterov=False) == pytest.approx(1, rel=1e-3)
    # z^2 - (1 + b) z + b + a z: stable up to a = 2 (1 + b), with a = rate * (1 - b).
    assert stable_up_to(0.9, delay=0, nesterov=False) == pytest.approx(38, rel=1e-3)
    # z^2 - (1 + b) z + b + a: stable while b + a < 1.
    assert stable_up_to(0.9, delay=1, nesterov=False) == pytest.approx(1, rel=1e-3)
