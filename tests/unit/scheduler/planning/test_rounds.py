"""What a round takes is what a hand works out."""

from __future__ import annotations

import pytest

from scheduler.planning.pool import PeerPool, PoolLink
from scheduler.planning.rounds import round_s
from tests.support.pools import machine


@pytest.mark.parametrize(("bits_per_s", "seconds"), [(1e9, 2.0), (1e7, 20.0)])
def test_a_round_waits_for_the_slowest_line_or_link_and_three_ways(bits_per_s: float, seconds: float) -> None:
    peers = machine("a", "x", line=1e8), machine("b", "y", line=1e9)
    far = PoolLink(0.1, bits_per_s)
    pool = PeerPool(peers, {("x", "y"): far, ("y", "x"): far})
    assert round_s(pool, peers, (0.5, 0.5), 2e8) == pytest.approx(seconds + 0.3)
    assert round_s(pool, peers[:1], (1.0,), 2e8) == 0.0
