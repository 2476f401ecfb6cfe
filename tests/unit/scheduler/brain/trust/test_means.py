"""The claim: an owner that gives out a false mean is found and goes, an honest member never, and no row is early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.brain.inputs import PeerGone
from scheduler.brain.outputs import Fail
from scheduler.brain.trust.means import ANSWER_S_MAX
from swarm.errors import ReplicaDiverged
from swarm.types import PeerId
from swarm.wire.messages import Event, Recheck, Rechecked
from tests.support.obedient import Swarm

Reduced = Callable[[PeerId, PeerId, tuple[PeerId, ...]], tuple[tuple[str, ...], str, str]]


def made(pools: tuple[str, ...] = ("abc", "def"), reduced: Reduced | None = None, **changes: object) -> Swarm:
    swarm = Swarm(pools, **{"second_owner": 1.0, "eval_every_steps": 0} | changes)  # type: ignore[arg-type]
    if reduced is not None:
        swarm.reduced = reduced
    swarm.start()
    return swarm


def trained(pools: tuple[str, ...] = ("abc", "def"), reduced: Reduced | None = None, **changes: object) -> Swarm:
    swarm = made(pools, reduced, **changes)
    swarm.run(most=20000)
    return swarm


def parts(members: tuple[PeerId, ...]) -> tuple[str, ...]:
    return tuple(f"part of {one}" for one in members)


def owned_falsely(liar: str) -> Reduced:
    """All hold what the owner gave out, which is not what comes out of the parts."""
    return lambda reader, owner, members: (parts(members), "mean", "false" if owner == liar else "mean")


@pytest.mark.parametrize("second_owner", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("pools", [("abc", "def"), ("ab", "c"), ("a", "b")])
def test_honest_members_are_never_struck(pools: tuple[str, ...], second_owner: float) -> None:
    swarm = trained(pools, second_owner=second_owner)
    swarm.assert_finished()
    assert swarm.struck == []
    asked = [command for _, command in swarm.told if isinstance(command, Recheck)]
    assert bool(asked) == (second_owner > 0.0 and any(len(pool) > 1 for pool in pools))
    assert all(command.owner != command.verifier for command in asked)


@pytest.mark.parametrize("liar", ["a", "b", "c"])
def test_an_owner_that_gives_out_a_false_mean_is_proven_wrong_by_two(liar: str) -> None:
    swarms = [trained(reduced=owned_falsely(liar), seed=seed) for seed in range(5)]
    for swarm in swarms:
        swarm.assert_finished()
        assert [one.peer for one in swarm.unfit] == [one.peer for one in swarm.struck]
    (one, *_), *_ = found = [swarm.struck for swarm in swarms if swarm.struck]
    assert {(one.peer, one.is_proven) for struck in found for one in struck} == {(liar, True)}
    others = ", ".join(sorted({*"abc"} - {liar}))
    assert f"was false, {others} got mean (second owner)" in one.evidence


def test_a_reader_that_accuses_an_honest_owner_is_proven_wrong() -> None:
    def reduced(reader: PeerId, owner: PeerId, members: tuple[PeerId, ...]) -> tuple[tuple[str, ...], str, str]:
        return parts(members), "another" if reader == "b" != owner else "mean", "mean"

    swarms = [trained(reduced=reduced, seed=seed) for seed in range(5)]
    for swarm in swarms:
        swarm.assert_finished()
    assert {(one.peer, one.is_proven) for swarm in swarms for one in swarm.struck} == {("b", True)}


def test_who_sends_readers_another_part_than_the_owner_convicts_no_honest_one() -> None:
    """It frames the owner: nobody can say which of the two lies, but two others are contradicted by it alone."""

    def framed(reader: PeerId, owner: PeerId, members: tuple[PeerId, ...]) -> tuple[tuple[str, ...], str, str]:
        if "b" not in members or owner == "b":
            return parts(members), "mean", "mean"
        took = tuple(f"another {one}" if one == "b" and reader != owner else f"{one}" for one in members)
        return took, "mean" if reader == owner else "other", "mean"

    swarms = [trained(reduced=framed, seed=seed) for seed in range(8)]
    assert {(one.peer, one.is_proven) for swarm in swarms for one in swarm.struck} == {("b", True)}
    for swarm in swarms:
        said = [note.partition(" contradict each other about") for note in swarm.notes]
        pairs = [pair for pair, found, _ in said if found]
        assert pairs
        is_short = len(set(pairs)) == 1 and len(pairs) < 3  # the job ended before more
        assert swarm.struck or isinstance(swarm.end, Fail) or is_short


def test_an_owner_is_heard_before_it_is_judged() -> None:
    """Two readers were right about the parts that they were sent; the owner had been sent another one."""
    swarm = Swarm(("abc",), second_owner=1.0, eval_every_steps=0)
    swarm.reduced = owned_falsely("b")
    swarm.lie = lambda peer, event: None if isinstance(event, Rechecked) and peer == "b" else event
    swarm.start()
    swarm.run(lambda: bool(swarm.struck) or bool(swarm.end), most=20000)
    assert [one.peer for one in swarm.struck] == ["b"], "it has had its time"
    assert swarm.now_s > ANSWER_S_MAX


def test_of_two_nobody_is_judged_and_the_job_stops() -> None:
    swarm = trained(("ab", "c"), reduced=owned_falsely("b"))
    if swarm.end is None or not isinstance(swarm.end, Fail):
        swarm = trained(("ab", "c"), reduced=owned_falsely("a"))
    assert isinstance(swarm.end, Fail)
    assert swarm.end.code == ReplicaDiverged.code
    assert swarm.struck == []


def test_a_step_is_not_committed_while_a_slice_of_it_is_reduced_again() -> None:
    swarm = Swarm(second_owner=1.0, eval_every_steps=0)
    held: list[Event] = []
    swarm.lie = lambda peer, event: held.append(event) if isinstance(event, Rechecked) else event  # type: ignore[func-returns-value]
    swarm.start()
    swarm.run(lambda: len(held) >= 2, most=400)
    while swarm.inbox:
        swarm.obey(*swarm.inbox.popleft())
    assert held
    assert swarm.rows == []
    assert "reduced once more" in swarm.brain.waiting_for()


def test_who_does_not_answer_is_replaced_and_at_last_nothing_is_compared() -> None:
    swarm = Swarm(second_owner=1.0, eval_every_steps=0)

    def lie(peer: PeerId, event: Event) -> Event | None:
        if isinstance(event, Rechecked):
            return None if peer in "ab" else replace(event, took=(), fault="parts did not come")
        return event

    swarm.lie = lie
    swarm.start()
    swarm.run(most=20000)
    swarm.assert_finished()
    assert swarm.struck == []
    assert any("are not compared: nobody else could reduce them" in note for note in swarm.notes)


def test_a_member_that_holds_its_sums_no_more_does_not_hold_the_step_up() -> None:
    """Each of three verifiers was waited for, although one member had lost its session and said nothing."""
    swarm = Swarm(second_owner=1.0, eval_every_steps=0)

    def lie(peer: PeerId, event: Event) -> Event | None:
        if not isinstance(event, Rechecked):
            return event
        commands = [command for _, command in swarm.told if isinstance(command, Recheck)]
        is_verifier = any((peer, event.number) == (command.verifier, command.number) for command in commands)
        return None if is_verifier else replace(event, took=(), fault="the round was given up here")

    swarm.lie = lie
    swarm.start()
    swarm.run(most=20000)
    swarm.assert_finished()
    assert swarm.now_s < ANSWER_S_MAX
    assert any("says that the round was given up here" in note for note in swarm.notes)


def test_a_verifier_that_is_lost_does_not_hold_the_step_up() -> None:
    swarm = Swarm(second_owner=1.0, eval_every_steps=0)
    lost: list[PeerId] = []

    def lie(peer: PeerId, event: Event) -> Event | None:
        if isinstance(event, Rechecked) and not lost:
            asked = [command.verifier for _, command in swarm.told if isinstance(command, Recheck)]
            lost.append(asked[-1])
        return None if peer in lost else event

    swarm.lie = lie
    swarm.start()
    swarm.run(lambda: bool(lost), most=20000)
    swarm.step(PeerGone(lost[0], "lost"))
    swarm.run(most=20000)
    swarm.assert_finished()
    assert swarm.now_s < 30.0
