"""Who takes part in a round, with which slice; the norm and the clip factor (scheduler/brain/commit/slices.py)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.brain.commit.slices import ALIGNMENT, apportion, plan_round, squared_norms
from scheduler.brain.inputs import ReplicaRecord
from swarm.types import PeerId, set_digest
from swarm.wire.messages import Member, ParameterNorm


def set_of(peer: str) -> frozenset[int]:
    return frozenset(range(1 + ord(peer[-1]) % 7))


def plan(names: Sequence[str], elements: int, shares: Sequence[float] | None = None) -> tuple[Member, ...]:
    replicas = [ReplicaRecord(PeerId(name), 1, f"at {name}", 0) for name in names]
    return plan_round(replicas, {one.peer: set_of(one.peer) for one in replicas}, elements, shares)


def test_members_come_in_order_of_peer_id_with_their_own_digest_and_equal_slices() -> None:
    members = plan("cab", 3 * 640)
    assert [member.peer for member in members] == ["a", "b", "c"]
    assert [(member.start, member.stop) for member in members] == [(0, 640), (640, 1280), (1280, 1920)]
    assert (members[0].digest, members[0].address) == (set_digest(set_of("a")), "at a")
    assert [(member.stage, member.microbatches) for member in members] == [(0, len(set_of(peer))) for peer in "abc"]


def test_a_small_unit_leaves_some_members_an_empty_slice() -> None:
    members = plan("abc", 65)
    assert [(member.start, member.stop) for member in members] == [(0, 64), (64, 65), (65, 65)]


def test_shares_follow_the_given_order_not_the_order_of_ids() -> None:
    members = plan("ba", 4 * ALIGNMENT, shares=[3.0, 1.0])
    assert [(member.peer, member.stop - member.start) for member in members] == [("a", 64), ("b", 192)]


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [(100, (0.5, 0.333, 0.167), [50, 33, 17]), (7, (0.4, 0.35, 0.25), [3, 2, 2]), (0, (1.0, 1.0), [0, 0])],
)
def test_rounding_is_that_of_hagenbach_and_bischoff(total: int, weights: tuple[float, ...], parts: list[int]) -> None:
    assert apportion(total, weights) == parts


@given(st.integers(1, 9), st.integers(0, 5000), st.data())
def test_slices_cover_every_element_exactly_once(count: int, elements: int, data: st.DataObject) -> None:
    weights = st.lists(st.floats(0, 1e6), min_size=count, max_size=count).filter(lambda shares: sum(shares) > 1e-9)
    shares = data.draw(st.none() | weights)
    members = plan([f"p{number:02d}" for number in range(count)], elements, shares)
    assert len(members) == count
    covered = [element for member in members for element in range(member.start, member.stop)]
    assert covered == list(range(elements))
    assert all(member.start % ALIGNMENT == 0 or member.start == elements for member in members)
    if shares is None:
        sizes = [member.stop - member.start for member in members]
        assert max(sizes) - min(sizes) < 2 * ALIGNMENT


def test_a_tied_parameter_counts_once_in_the_global_norm() -> None:
    norms = [ParameterNorm("a", 9.0), ParameterNorm("tied", 16.0), ParameterNorm("tied", 16.0)]
    assert sorted(squared_norms(norms)) == [9.0, 16.0]
