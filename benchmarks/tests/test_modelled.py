"""benchmarks.measured.modelled: a computation takes the time that it was given."""

from __future__ import annotations

import pytest

from benchmarks.measured.modelled import takes


@pytest.mark.parametrize(("own_s", "lasts_s"), [(0.0, 0.5), (0.2, 0.5), (0.5, 0.5), (0.7, 0.7)])
def test_a_computation_lasts_as_long_as_it_was_given_or_longer_if_it_does_so_by_itself(
    own_s: float, lasts_s: float
) -> None:
    now_s = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        assert seconds >= 0.0
        now_s += seconds

    class Adder:
        def add(self, a: int, *, b: int) -> int:
            sleep(own_s)
            return a + b

    takes(Adder, "add", 0.5, lambda: now_s, sleep)
    assert Adder().add(1, b=2) == 3
    assert now_s == pytest.approx(100.0 + lasts_s)
