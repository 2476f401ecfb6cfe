"""Who takes part in a round, with which slice; the norm and the clip factor (scheduler/brain/commit/slices.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.brain.commit.slices import (
    AGAIN_ROUNDS,
    ALIGNMENT,
    ROUNDS_MIN,
    apportion,
    plan_round,
    seconds_of,
    shares_of,
    squared_norms,
)
from scheduler.brain.inputs import PeerGone, ReplicaRecord
from scheduler.brain.outputs import Note
from swarm.types import PeerId, RoundFault, set_digest
from swarm.wire.messages import AbortRound, Average, Commit, LoadStage, Member, ParameterNorm, RoundFailed, Route
from tests.support.brain import Swarm


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


RATES = st.lists(st.floats(0.1, 10.0), min_size=3, max_size=4)
NAMES = tuple(PeerId(name) for name in "abcd")
ELEMENTS = 1000  # of the unit
EQUAL = {"a": 256, "b": 256, "c": 256, "d": 232}


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
        self.equal_s, self.shared_s = 1.0, 0.5

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

    def step(self) -> dict[str, int]:
        """Make a step; gives who owned how many elements."""
        owned = self.average()
        seconds = self.equal_s if max(owned.values()) - min(owned.values()) <= 64 else self.shared_s
        for peer, command in self.asked:
            said: Any = self.swarm.reply(peer, command)
            rate = self.rates[peer]
            self.swarm.hear(peer, replace(said, duration_s=seconds, up_bytes_per_s=rate, down_bytes_per_s=2 * rate))
        self.swarm.write()
        self.swarm.answer(Commit)
        return owned

    def steps(self, count: int) -> list[dict[str, int]]:
        return [self.step() for _ in range(count)]

    @property
    def told(self) -> list[str]:
        return [one.message for one in self.swarm.outputs if isinstance(one, Note) and "slices" in one.message]


@pytest.mark.parametrize("rates", [dict.fromkeys("abcd", 0.0), dict.fromkeys("abcd", 1e6), {"a": 0.0}, {"a": 0.9e6}])
def test_slices_are_equal_if_rates_are_unknown_or_differ_little(rates: Mapping[str, float]) -> None:
    job = Job()
    job.rates |= rates
    assert job.steps(40) == [EQUAL] * 40
    assert job.told == []


def test_a_member_with_a_slow_link_owns_nothing_once_rates_are_known() -> None:
    job = Job()
    job.rates["b"] = 0.25e6
    assert job.steps(ROUNDS_MIN) == [EQUAL] * ROUNDS_MIN
    assert job.steps(100) == [{"a": 384, "b": 0, "c": 320, "d": 296}] * 100
    assert len(job.told) == 1
    assert "b 0%" in job.told[0]


def test_a_link_that_is_slow_in_one_direction_is_slow() -> None:
    job = Job()
    for _ in range(ROUNDS_MIN):
        job.average()
        for peer, command in job.asked:
            said: Any = job.swarm.reply(peer, command)
            down = 1e5 if peer == "c" else 1e6
            job.swarm.hear(peer, replace(said, up_bytes_per_s=1e6, down_bytes_per_s=down))
        job.swarm.write()
        job.swarm.answer(Commit)
    assert job.average()["c"] == 0


def test_slices_that_do_not_shorten_rounds_are_equal_again_for_longer_each_time() -> None:
    """A member that says that its links are the fastest of all would own everything, and rounds would take long."""
    job = Job()
    job.rates["d"] = 1e300
    job.shared_s = 3.0
    wait = 0
    for pause in (ROUNDS_MIN, AGAIN_ROUNDS[0], 2 * AGAIN_ROUNDS[0]):
        assert job.steps(pause) == [EQUAL] * pause, wait
        assert job.steps(ROUNDS_MIN) == [{"a": 0, "b": 0, "c": 0, "d": ELEMENTS}] * ROUNDS_MIN
        wait += pause
    assert job.step() == EQUAL
    assert "took no less time" in job.told[-1]


@pytest.mark.parametrize("tried", [ROUNDS_MIN, 1])
def test_a_change_of_members_ends_no_pause_and_begins_one_if_shares_could_not_be_judged(tried: int) -> None:
    """Each change began with the shortest pause: with one every 12 rounds, a third of all rounds were slow."""
    job = Job("abcdef", recover=True)
    job.rates["d"] = 1e300
    job.shared_s = 3.0

    def slow(rounds: int) -> int:
        return sum(owned["d"] == ELEMENTS for owned in job.steps(rounds))

    assert slow(ROUNDS_MIN) == 0
    assert slow(tried) == tried
    job.swarm.tell(PeerGone(PeerId("a"), "it died"))
    assert slow(AGAIN_ROUNDS[0] // 2) == 0
    job.swarm.tell(PeerGone(PeerId("b"), "it died"))
    assert slow(AGAIN_ROUNDS[0] // 2) == 0, "the pause goes on"
    assert slow(ROUNDS_MIN) == ROUNDS_MIN
    assert slow(2 * AGAIN_ROUNDS[0]) == 0, "and the next is longer"


def test_one_member_cannot_say_how_long_rounds_take() -> None:
    job = Job()
    job.rates["d"] = 1e300
    for at in range(2 * ROUNDS_MIN):
        owned = job.average()
        for peer, command in job.asked:
            said: Any = job.swarm.reply(peer, command)
            seconds = 1.0 if at < ROUNDS_MIN else (1e-9 if peer == "d" else 3.0)
            rate = job.rates[peer]
            job.swarm.hear(peer, replace(said, duration_s=seconds, up_bytes_per_s=rate, down_bytes_per_s=rate))
        job.swarm.write()
        job.swarm.answer(Commit)
    assert owned["d"] == ELEMENTS
    assert job.average() == EQUAL


def test_shares_follow_rates_that_change() -> None:
    job = Job()
    job.rates["b"] = 0.25e6
    job.steps(20)
    job.rates |= {"b": 1e6, "c": 0.25e6}
    assert job.steps(40)[-1] == {"a": 384, "b": 320, "c": 0, "d": 296}
    assert len(job.told) <= 3, "they do not flap"


def test_slices_are_equal_again_when_members_change() -> None:
    job = Job(recover=True)
    job.rates["b"] = 0.25e6
    job.steps(10)
    job.swarm.tell(PeerGone(PeerId("d"), "it died"))
    assert job.steps(ROUNDS_MIN) == [{"a": 384, "b": 320, "c": 296}] * ROUNDS_MIN
    assert job.step() == {"a": 512, "b": 0, "c": 488}


def test_a_round_that_failed_is_repeated_with_the_owners_that_reach_each_other() -> None:
    job = Job(recover=True)
    job.rates["b"] = 0.25e6
    job.steps(10)
    assert job.average()["b"] == 0
    peer, command = job.asked[0]
    failed = RoundFailed(0, command.step, command.unit, command.round, "no mean came", PeerId("b"), RoundFault.MEMBER)
    job.swarm.now_s += 1.0
    job.swarm.hear(peer, failed)
    assert job.swarm.pop(AbortRound)
    assert {name for name, elements in job.average().items() if elements} == {"c", "d"}
    for to, again in job.asked:
        job.swarm.obey(to, again)
    job.swarm.write()
    job.swarm.answer(Commit)
    assert job.step() == {"a": 384, "b": 0, "c": 320, "d": 296}


@pytest.mark.parametrize("guard", [{"recount": 1e-9}, {"second_owner": 1e-9}, {"clips": True}], ids=str)
def test_a_job_that_checks_its_replicas_keeps_equal_slices(guard: dict[str, Any]) -> None:
    """Who says that its links are fast would own all, and nobody else would receive its part of it to recount."""
    job = Job(**guard)
    job.rates["d"] = 1e300
    assert job.steps(20) == [EQUAL] * 20


def test_two_members_own_the_same() -> None:
    job = Job("ab")
    job.rates["b"] = 1.0
    assert job.steps(20) == [{"a": 512, "b": 488}] * 20
