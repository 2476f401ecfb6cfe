"""benchmarks.models.slices: the shares are the best of all, and the fluid agrees with what can be computed by hand."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.models.slices import Link, by_bandwidth, round_s

RATES = st.lists(st.floats(0.1, 10.0), min_size=3, max_size=4)


def least_s(rates: list[float], shares: list[float]) -> float:
    """Seconds of a round in which nothing waits."""
    return max((1.0 + (len(rates) - 2) * share) / rate for rate, share in zip(rates, shares, strict=True))


@given(RATES)
def test_no_other_shares_end_sooner_if_nothing_waits(rates: list[float]) -> None:
    found = by_bandwidth([Link(rate, 2.0 * rate) for rate in rates])
    assert min(found) >= 0.0
    assert sum(found) == pytest.approx(1.0)
    tried = [shares for shares in product(range(11), repeat=len(rates)) if sum(shares) == 10]
    best_s = min(least_s(rates, [share / 10.0 for share in shares]) for shares in tried)
    assert least_s(rates, found) <= best_s * (1.0 + 1e-9)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_links_have_equal_shares(count: int) -> None:
    assert by_bandwidth([Link(3.0, 3.0)] * count) == pytest.approx([1.0 / count] * count)


def test_equal_links_take_two_times_all_slices_but_one() -> None:
    links = [Link(2.0, 2.0)] * 4
    assert round_s(links, [0.25] * 4, 1) == pytest.approx(2 * 0.75 / 2.0)
    assert round_s([Link(1.0, 1.0)], [1.0], 1) == 0.0


def test_shares_by_bandwidth_slow_whole_slices_down_and_speed_chunks_up() -> None:
    """A slow member without a slice first only sends all and then only receives all."""
    links = [*[Link(4.0, 4.0)] * 3, Link(1.0, 1.0)]
    chosen = by_bandwidth(links)
    assert chosen == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])
    assert round_s(links, [0.25] * 4, 1) == pytest.approx(1.5)
    assert round_s(links, chosen, 1) == pytest.approx(2.0)
    assert round_s(links, chosen, 16) < 1.5 / 1.35
