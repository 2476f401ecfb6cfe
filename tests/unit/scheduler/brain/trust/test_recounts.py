"""The claim: a replica that adds false gradients to its sum is found and goes, an honest one never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.brain.inputs import PeerGone
from scheduler.brain.outputs import Fail
from scheduler.brain.trust.recounts import ANSWER_S_MAX
from swarm.errors import ReplicaDiverged
from swarm.types import Microbatch, PeerId
from swarm.wire.messages import Checked, Event, Rechecked, Recount, Recounted
from tests.support.obedient import Swarm

Reduced = Callable[[PeerId, PeerId, tuple[PeerId, ...]], tuple[tuple[str, ...], str, str]]
SEEDS = range(6)


def trained(pools: tuple[str, ...] = ("abc", "def"), seed: int = 0, **hooks: object) -> Swarm:
    swarm = Swarm(pools, seed=seed, recount=hooks.pop("recount", 1.0), eval_every_steps=0, routing="uniform")
    for name, hook in hooks.items():
        setattr(swarm, name, hook)
    swarm.start()
    swarm.run(most=20000)
    return swarm


def asked(swarm: Swarm) -> list[tuple[PeerId, Recount]]:
    return [(peer, command) for peer, command in swarm.told if isinstance(command, Recount)]


def giving(liar: str, *, to: Callable[[PeerId, PeerId], bool] = lambda reader, owner: True) -> Reduced:
    """A replica gives away another part than the sum of its microbatches; the mean is that of what it gave."""

    def reduced(reader: PeerId, owner: PeerId, members: tuple[PeerId, ...]) -> tuple[tuple[str, ...], str, str]:
        took = (f"false part of {one}" if one == liar and to(reader, owner) else f"part of {one}" for one in members)
        return tuple(took), "mean", "mean"

    return reduced


@pytest.mark.parametrize("recount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("pools", [("abc", "def"), ("ab", "c"), ("a", "b")])
def test_honest_replicas_are_never_struck(pools: tuple[str, ...], recount: float) -> None:
    for seed in SEEDS:
        swarm = trained(pools, seed, recount=recount)
        swarm.assert_finished()
        assert swarm.struck == []
        if recount in (0.0, 1.0):
            assert bool(asked(swarm)) == (recount == 1.0 and len(pools[0]) > 1)


def test_who_gives_away_a_false_sum_is_proven_wrong_by_two() -> None:
    swarms = [trained(seed=seed, reduced=giving("b")) for seed in SEEDS]
    struck = [one for swarm in swarms for one in swarm.struck]
    for swarm in swarms:
        swarm.assert_finished()
        assert [one.peer for one in swarm.unfit] == [one.peer for one in swarm.struck]
    assert {(one.peer, one.is_proven) for one in struck} == {("b", True)}
    assert "the sum of b over elements" in struck[0].evidence
    assert "was false pa, a got part of , c got part of  (recount)" in struck[0].evidence


def test_a_recounter_that_accuses_an_honest_one_is_proven_wrong() -> None:
    swarms = [
        trained(seed=seed, recounted=lambda recounter, giver: "x" if recounter == "c" else f"part of {giver}")
        for seed in SEEDS
    ]
    for swarm in swarms:
        swarm.assert_finished()
    assert {(one.peer, one.is_proven) for swarm in swarms for one in swarm.struck} == {("c", True)}


def test_who_gives_the_owner_another_part_than_others_is_contradicted() -> None:
    """The mean seems right to the reader, so the owner or the giver lies."""
    swarms = [trained(seed=seed, reduced=giving("b", to=lambda reader, owner: reader == owner)) for seed in SEEDS]
    assert {one.peer for swarm in swarms for one in swarm.struck} <= {"b"}
    assert any("contradict each other about" in note for swarm in swarms for note in swarm.notes)
    for swarm in swarms:
        assert isinstance(swarm.end, Fail) or swarm.end is not None


def test_an_owner_that_says_otherwise_of_a_part_has_nobody_convicted() -> None:
    """It frames whose sum is recounted; a reader of the same slice knows better."""

    def framed(reader: PeerId, owner: PeerId, members: tuple[PeerId, ...]) -> tuple[tuple[str, ...], str, str]:
        is_false = owner == reader == "a"
        return tuple(f"{'x' * is_false}part of {one}" for one in members), "mean", "mean"

    swarms = [trained(seed=seed, reduced=framed) for seed in SEEDS]
    assert {one.peer for swarm in swarms for one in swarm.struck} <= {"a"}


def test_the_word_of_one_about_a_part_convicts_nobody() -> None:
    """It frames whose sum is recounted, and the owner of the slice does not answer."""

    def reduced(reader: PeerId, owner: PeerId, members: tuple[PeerId, ...]) -> tuple[tuple[str, ...], str, str]:
        return tuple(f"{'x' * (reader == 'a')}part of {one}" for one in members), "mean", "mean"

    def lie(peer: PeerId, event: Event) -> Event | None:
        return None if isinstance(event, Rechecked) and peer != "a" else event

    swarms = [trained(seed=seed, reduced=reduced, lie=lie) for seed in SEEDS]
    assert [one for swarm in swarms for one in swarm.struck] == []
    assert any("unclear who is right" in note for swarm in swarms for note in swarm.notes)


def test_of_two_nobody_is_judged_and_the_job_stops() -> None:
    swarms = [trained(("ab", "c"), seed, reduced=giving("b")) for seed in SEEDS]
    ends = [swarm.end for swarm in swarms if isinstance(swarm.end, Fail)]
    assert ends
    assert {end.code for end in ends} == {ReplicaDiverged.code}
    assert all(swarm.struck == [] for swarm in swarms)


def test_a_recount_is_a_spot_check_of_all_its_microbatches() -> None:
    """A replica that lies in what it sends to its neighbours is found before the sums are compared."""

    def falsify(peer: PeerId, kind: str, microbatch: Microbatch, name: str) -> str:
        return f"false {name}"[:64] if (peer, kind) == ("b", "y") else name

    swarms = [trained(seed=seed, falsify=falsify) for seed in SEEDS]
    assert {(one.peer, one.is_proven) for swarm in swarms for one in swarm.struck} == {("b", True)}
    assert any("output y" in one.evidence and "recount" in one.evidence for s in swarms for one in s.struck)


def test_a_recounter_that_was_given_other_inputs_has_no_say() -> None:
    def lie(peer: PeerId, event: Event) -> Event:
        if isinstance(event, Checked):
            return replace(event, digests=("another", *event.digests[1:]))
        return replace(event, digest="another") if isinstance(event, Recounted) else event

    swarm = trained(lie=lie)
    swarm.assert_finished()
    assert swarm.struck == []
    assert any("is not recounted: nobody gave an answer" in note for note in swarm.notes)


def test_a_step_is_not_committed_while_a_sum_of_it_is_recounted() -> None:
    swarm = Swarm(recount=1.0, eval_every_steps=0)
    held: list[Event] = []
    swarm.lie = lambda peer, event: held.append(event) if isinstance(event, Recounted) else event  # type: ignore[func-returns-value]
    swarm.start()
    swarm.run(lambda: bool(held), most=400)
    while swarm.inbox:
        swarm.obey(*swarm.inbox.popleft())
    assert held
    assert swarm.rows == []
    assert "computes once more" in swarm.brain.waiting_for()


def test_who_does_not_answer_is_replaced_and_at_last_nothing_is_recounted() -> None:
    swarm = trained(lie=lambda peer, event: None if isinstance(event, Recounted) else event)
    swarm.assert_finished()
    assert swarm.now_s > 2 * ANSWER_S_MAX
    assert any("is not recounted" in note for note in swarm.notes)


def test_a_recounter_that_is_lost_does_not_hold_the_step_up() -> None:
    swarm = Swarm(recount=1.0, eval_every_steps=0)
    lost: list[PeerId] = []

    def lie(peer: PeerId, event: Event) -> Event | None:
        if isinstance(event, Recounted) and not lost:
            lost.append(peer)
        return None if peer in lost else event

    swarm.lie = lie
    swarm.start()
    swarm.run(lambda: bool(lost), most=20000)
    swarm.step(PeerGone(lost[0], "lost"))
    swarm.run(most=20000)
    swarm.assert_finished()
    assert swarm.now_s < ANSWER_S_MAX
