"""The claim: lanes are shares of a stage's speed, slowest first, and those that overlap are found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.brain.routing.lanes import ALL, BESIDE, DRIFT, UNEQUAL, Lane, Lanes
from swarm.types import PeerId

A, B, C = (PeerId(name) for name in "abc")


def lanes_of(*paces_s: float) -> Lanes:
    made = Lanes()
    for number, pace_s in enumerate(paces_s):
        made.enter(PeerId(f"{number}"), pace_s)
    return made


def test_a_lane_is_as_wide_as_the_share_of_the_speed_slowest_first() -> None:
    lanes = Lanes()
    lanes.enter(A, 1.0)
    lanes.enter(B, 4.0)
    lanes.enter(C, 2.0)
    ends = [(lanes.of(peer).start, lanes.of(peer).stop) for peer in (B, C, A)]
    assert ends == [pytest.approx(one) for one in [(0.0, 1 / 7), (1 / 7, 3 / 7), (3 / 7, 1.0)]]
    assert lanes.per_s == 1.75
    assert lanes.beside(ALL) == [B, C, A]


def test_replicas_are_beside_a_lane_that_covers_a_tenth_of_theirs() -> None:
    lanes = Lanes()
    for peer in (A, B):
        lanes.enter(peer, 1.0)  # 0 to 0.5, 0.5 to 1
    assert lanes.beside(Lane(0.0, 0.5)) == [A]
    assert lanes.beside(Lane(0.0, 0.5 + 0.6 * BESIDE)) == [A, B]
    assert lanes.beside(Lane(0.0, 0.5 + 0.4 * BESIDE)) == [A]
    assert lanes.beside(Lane(0.99, 1.0)) == [B]


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8), st.floats(0.0, 0.99), st.floats(0.001, 1.0))
def test_those_beside_a_lane_are_found_and_never_none(paces_s: list[float], start: float, width: float) -> None:
    lanes, lane = lanes_of(*paces_s), Lane(start, min(1.0, start + width))
    everybody = lanes.beside(ALL)
    assert sorted(everybody) == sorted(PeerId(f"{number}") for number in range(len(paces_s)))
    assert lanes.beside(lane) == [peer for peer in everybody if lanes.of(peer).meets(lane)] != []
    assert sum(lanes.of(peer).stop - lanes.of(peer).start for peer in everybody) == pytest.approx(1.0)


def test_a_stage_is_unequal_from_half_as_long_again() -> None:
    assert not Lanes().is_unequal
    assert not lanes_of(1.0, UNEQUAL).is_unequal
    assert lanes_of(1.0, 1.01 * UNEQUAL).is_unequal


def test_lanes_are_drawn_anew_for_a_change_that_matters_and_for_those_who_come_and_go() -> None:
    lanes = Lanes()
    lanes.enter(A, 1.0)
    lanes.enter(B, 1.0)
    before = lanes.of(B)
    lanes.enter(B, 0.99 * DRIFT)
    assert lanes.of(B) == before
    assert lanes.fits({A: 1.0, B: 0.99 * DRIFT})
    assert not lanes.fits({A: 1.0, B: 1.01 * DRIFT})
    lanes.enter(B, 1.01 * DRIFT)
    assert lanes.of(B) != before
    lanes.enter(C, 1.0)
    assert lanes.of(C).stop == 1.0, "among equals, the last by id"
    lanes.leave(B)
    lanes.leave(B)
    assert lanes.beside(ALL) == [A, C]
    assert not lanes.fits({A: 1.0})
