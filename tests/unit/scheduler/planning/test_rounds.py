"""What a round takes is what a hand works out."""

from __future__ import annotations

import pytest

from scheduler.planning.pool import PeerPool, PoolLink, PoolPeer
from scheduler.planning.rounds import RoundTimes
from swarm.types import PeerId, Round, UnitName
from swarm.wire import messages
from tests.support.pools import machine

UNIT = UnitName("stage-0")
FIXED_S = 0.25


def round_of(peers: tuple[PoolPeer, ...], timeline: int = 0, step: int = 1) -> messages.Average:
    members = tuple(messages.Member(PeerId(peer.name), 1, "", at, at + 1, "") for at, peer in enumerate(peers))
    return messages.Average(timeline, step, UNIT, Round(1, 1), members, 1, 60.0)


def at_two_sites(bits_per_s: float) -> tuple[RoundTimes, dict[PeerId, PoolPeer]]:
    peers = machine("a", "x", line=1e8), machine("b", "y", line=1e9)
    far = PoolLink(0.1, bits_per_s)
    pool = PeerPool(peers, {("x", "y"): far, ("y", "x"): far})
    return RoundTimes(pool, adds_up=True), {PeerId(peer.name): peer for peer in peers}


@pytest.mark.parametrize(("bits_per_s", "seconds"), [(1e9, 2.0), (1e7, 20.0)])
def test_a_round_waits_for_the_slowest_line_or_link_and_three_ways(bits_per_s: float, seconds: float) -> None:
    times, peers = at_two_sites(bits_per_s)
    both = round_of(tuple(peers.values()))
    assert times.begun(both, peers, 2e8 / 8.0, FIXED_S, now_s=5.0) == pytest.approx(seconds + 0.3 + FIXED_S)


def test_the_round_of_one_replica_takes_what_all_rounds_take() -> None:
    times, peers = at_two_sites(1e9)
    alone = round_of(tuple(peers.values())[:1])
    assert times.begun(alone, peers, 2e8 / 8.0, FIXED_S, now_s=5.0) == FIXED_S


def test_a_round_waits_for_the_one_before_until_that_has_ended_or_the_job_stalls() -> None:
    times, peers = at_two_sites(1e9)
    first, second, third = (round_of(tuple(peers.values()), step=step) for step in range(3))
    takes_s = 2.0 + 0.3 + FIXED_S

    def begun(round_: messages.Average, now_s: float) -> float:
        return times.begun(round_, peers, 2e8 / 8.0, FIXED_S, now_s)

    assert [begun(first, 0.0), begun(second, 1.0)] == pytest.approx([takes_s, 2.0 * takes_s - 1.0])
    assert begun(round_of(tuple(peers.values()), timeline=1), 1.0) == pytest.approx(takes_s), "its lines are others"
    times.aborted(second)  # the first goes on until its end
    assert begun(third, 2.0) == pytest.approx(2.0 * takes_s - 2.0)
    times.lines_changed()
    assert begun(second, 2.0) == pytest.approx(3.0 * takes_s - 2.0), "rounds go on where a peer comes"
    for round_ in (first, second, third):
        times.aborted(round_)
    assert begun(first, 2.5) == pytest.approx(takes_s), "no round is before it any more"
    times.clear()
    times.aborted(first)  # the job stalled meanwhile
    assert begun(first, 3.0) == pytest.approx(takes_s)
