"""Who takes part in a round, with which slice; the norm and the clip factor (scheduler/brain/commit/slices.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.brain.commit.slices import ALIGNMENT, apportion, plan_round, seconds_of, shares_of, squared_norms
from scheduler.brain.inputs import PeerGone, ReplicaRecord
from scheduler.brain.outputs import Note
from swarm.types import PeerId, RoundFault, set_digest
from swarm.wire.messages import Average, Commit, LoadStage, Member, ParameterNorm, RoundFailed, Route
from tests.support.brain import Swarm
from tests.support.situations import Calls, Situation, beside


def set_of(peer: str) -> frozenset[int]:
    return frozenset(range(1 + ord(peer[-1]) % 7))


def plan(names: Sequence[str], elements: int, shares: Sequence[float] | None = None) -> tuple[Member, ...]:
    replicas = [ReplicaRecord(PeerId(name), 1, f"at {name}", 0) for name in names]
    return plan_round(replicas, {replica.peer: set_of(replica.peer) for replica in replicas}, elements, shares)


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


RATES = st.lists(st.floats(0.1, 10.0), min_size=3, max_size=4)
ELEMENTS = 1000  # of the unit


@given(RATES)
def test_no_other_shares_end_sooner_if_nothing_waits(rates: list[float]) -> None:
    found = shares_of(rates)
    assert min(found) >= 0.0
    assert sum(found) == pytest.approx(1.0)
    tried = [shares for shares in product(range(11), repeat=len(rates)) if sum(shares) == 10]
    best_s = min(seconds_of([share / 10.0 for share in shares], rates) for shares in tried)
    assert seconds_of(found, rates) <= best_s * (1.0 + 1e-9)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([1.0, 1.0, 2.0, 4.0], [0.0, 0.0, 0.5, 0.5]),
        ([1.0, 2.0, 3.0, 4.0], [0.0, 1 / 3, 1 / 3, 1 / 3]),
        ([1.0] * 7 + [10.0], [0.0] * 7 + [1.0]),
        ([1.0] * 8, [1 / 8] * 8),
        ([1.0, 4.0], [0.5, 0.5]),
        ([3.0], [1.0]),
    ],
)
def test_shares_are_those_of_the_linear_program_and_as_even_as_can_be(
    rates: list[float], expected: list[float]
) -> None:
    assert shares_of(rates) == pytest.approx(expected, abs=1e-9)


class Job:
    """A job of one stage, whose members say how fast their links are, and that rounds take as long as a test says."""

    def __init__(self, names: str = "abcd", **changes: Any) -> None:
        self.swarm = Swarm({PeerId(name): 0 for name in names}, steps=1000, microbatches=4, **changes)
        self.swarm.answer(LoadStage)
        self.rates: dict[str, float] = dict.fromkeys(names, 1e6)
        self.down: dict[str, float] = {}  # where it is not as fast as up
        self.seconds: dict[str, float] = {}  # that members say, whatever they take
        self.equal_s, self.shared_s = 1.0, 0.5

    def says(self, **rates: float) -> None:
        self.rates |= rates

    def average(self) -> dict[str, int]:
        """Begin a round; gives who owns how many elements."""
        for peer, route in self.swarm.pop(Route):
            said: Any = self.swarm.reply(peer, route)
            if said is not None:
                self.swarm.hear(peer, replace(said, digests=("x", "y", "g", "dx")))
        self.asked = self.swarm.pop(Average)
        command: Average = self.asked[0][1]
        assert (command.members[0].start, command.members[-1].stop) == (0, ELEMENTS)
        return {member.peer: member.stop - member.start for member in command.members}

    def ends(self, seconds: float = 1.0) -> None:
        """All say that they have averaged, and commit."""
        for peer, command in self.asked:
            up, took_s = self.rates[peer], self.seconds.get(peer, seconds)
            rates = {"up_bytes_per_s": up, "down_bytes_per_s": self.down.get(peer, 2 * up)}
            self.swarm.obey(peer, command, duration_s=took_s, **rates)
        self.swarm.write()
        self.swarm.answer(Commit)

    def steps(self, count: int) -> str:
        """Make steps; gives who owned how much in how many of them."""
        made = []
        for _ in range(count):
            owned = self.average()
            made.append(" ".join(f"{peer}:{elements}" for peer, elements in owned.items()))
            self.ends(self.equal_s if max(owned.values()) - min(owned.values()) <= 64 else self.shared_s)
        return ", ".join(f"{len(list(alike))} x {owned}" for owned, alike in groupby(made))

    def lose(self, peer: str) -> None:
        self.swarm.tell(PeerGone(PeerId(peer), "it died"))

    def fails(self, accused: str) -> None:
        """The first member cannot exchange slices with another."""
        peer, command = self.asked[0]
        named = (0, command.step, command.unit, command.round, "no mean came", PeerId(accused))
        self.swarm.now_s += 1.0
        self.swarm.hear(peer, RoundFailed(*named, RoundFault.MEMBER))

    @property
    def told(self) -> list[str]:
        return [
            output.message for output in self.swarm.outputs if isinstance(output, Note) and "slices" in output.message
        ]


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_slices_are_shared_as_the_text_says(situation: Situation) -> None:
    situation.check(Calls(None, Job=Job).play)
