"""The claim: what a new job is told of speeds are medians over the stage servers that it may get."""

from __future__ import annotations

import math

from scheduler.brain.fleet.membership import Measured, Peer
from scheduler.brain.fleet.speeds import fleet_speed
from swarm.job.overlap import UNMEASURED, FleetSpeed
from swarm.types import PeerId, PeerState
from swarm.wire.messages import Hello, LinkSpeed


def peer(name: str, multiply_adds_per_s: float, *links: tuple[str, float, float]) -> Peer:
    hello = Hello(PeerId(name), 1, 1, "0", f"{name}:1", "", "cpu", 1, 0, -1)
    told = tuple(LinkSpeed(PeerId(to), rate, receipt_s) for to, rate, receipt_s in links)
    return Peer(hello, PeerState.IDLE, "", 0.0, 0.0, measured=Measured(told, multiply_adds_per_s))


def test_the_medians_of_computing_and_links_count() -> None:
    peers = [
        peer("a", 1e9, ("b", 1e6, 0.2), ("c", 3e6, 0.1)),
        peer("b", 5e9, ("a", 2e6, 0.3)),
        peer("c", 2e9),
        peer("new", 0.0),
    ]
    assert fleet_speed(peers) == FleetSpeed(2e9, 2e6, 0.2)


def test_links_to_stage_servers_that_are_busy_or_gone_do_not_count() -> None:
    assert fleet_speed([peer("a", 1e9, ("b", 1e6, 0.2))]) is UNMEASURED


def test_nothing_is_known_without_links_or_without_computing() -> None:
    assert fleet_speed([]) is UNMEASURED
    assert fleet_speed([peer("a", 1e9), peer("b", 1e9)]) is UNMEASURED
    assert fleet_speed([peer("a", 0.0, ("b", 1e6, 0.2)), peer("b", 0.0)]) is UNMEASURED


def test_speeds_that_no_machine_has_do_not_count() -> None:
    for odd in (math.nan, math.inf, -1.0, 0.0):
        assert fleet_speed([peer("a", odd, ("b", 1e6, 0.2)), peer("b", 1e9)]) == FleetSpeed(1e9, 1e6, 0.2)
        assert fleet_speed([peer("a", 1e9, ("b", odd, 0.2)), peer("b", 1e9)]) is UNMEASURED
        assert fleet_speed([peer("a", 1e9, ("b", 1e6, odd)), peer("b", 1e9)]) is UNMEASURED
