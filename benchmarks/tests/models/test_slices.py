"""benchmarks.models.slices: the scheduler's shares, and the fluid as it can be computed by hand."""

from __future__ import annotations

import pytest

from benchmarks.models.slices import Link, by_bandwidth, round_s


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
