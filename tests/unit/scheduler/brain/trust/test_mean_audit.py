"""What a slice that is reduced once more proves, whatever its owner, its readers and the givers of its parts say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.brain.outputs import Fail
from scheduler.brain.trust.inquiry import ANSWER_S_MAX, InquiryState
from scheduler.brain.trust.mean_audit import ReductionFinding, Sums, finding
from swarm.types import PeerId
from swarm.wire.messages import Event, Recheck, Rechecked
from tests.support.obedient import Swarm


def test_who_sends_readers_another_part_than_the_owner_convicts_no_honest_one() -> None:
    """It frames the owner: nobody can say which of the two lies, but two others are contradicted by it alone."""

    def framed(reader: PeerId, owner: PeerId, members: tuple[PeerId, ...]) -> tuple[tuple[str, ...], str, str]:
        if "b" not in members or owner == "b":
            return members, "mean", "mean"
        took = tuple(f"another {member}" if member == "b" and reader != owner else f"{member}" for member in members)
        return took, "mean" if reader == owner else "other", "mean"

    swarms = [Swarm.trained(reduced=framed, seed=seed, second_owner=1.0) for seed in range(8)]
    assert {(strike.peer, strike.is_proven) for swarm in swarms for strike in swarm.struck} == {("b", True)}
    for swarm in swarms:
        said = [note.partition(" contradict each other about") for note in swarm.notes]
        pairs = [pair for pair, found, _ in said if found]
        assert pairs
        is_short = len(set(pairs)) == 1 and len(pairs) < 3  # the job ended before more
        assert swarm.struck or isinstance(swarm.end, Fail) or is_short


def test_an_owner_is_heard_before_it_is_judged() -> None:
    """Two readers were right about the parts that they were sent; the owner had been sent another one."""
    swarm = Swarm.trained(
        ("abc",),
        second_owner=1.0,
        reduced=lambda reader, owner, members: (members, "mean", "false" if owner == "b" else "mean"),
        lie=lambda peer, event: None if isinstance(event, Rechecked) and peer == "b" else event,
    )
    assert [strike.peer for strike in swarm.struck] == ["b"], "it has had its time"
    assert swarm.now_s > ANSWER_S_MAX


def test_readers_that_cannot_read_are_replaced_and_at_last_nothing_is_compared() -> None:
    def lie(peer: PeerId, event: Event) -> Event | None:
        if isinstance(event, Rechecked):
            return None if peer in "ab" else replace(event, took=(), fault="parts did not come")
        return event

    swarm = Swarm.trained(second_owner=1.0, lie=lie)
    swarm.assert_finished()
    assert swarm.struck == []
    assert any("are not compared: nobody else could reduce them" in note for note in swarm.notes)


def test_a_member_that_holds_its_sums_no_more_does_not_hold_the_step_up() -> None:
    """Each of three verifiers was waited for, although one member had lost its session and said nothing."""

    def lie(peer: PeerId, event: Event) -> Event | None:
        if not isinstance(event, Rechecked):
            return event
        commands = [command for _, command in swarm.told if isinstance(command, Recheck)]
        is_verifier = any((peer, event.number) == (command.verifier, command.number) for command in commands)
        return None if is_verifier else replace(event, took=(), fault="the round was given up here")

    swarm = Swarm(second_owner=1.0, eval_every_steps=0)
    swarm.lie = lie
    swarm.start()
    swarm.run(most=20000)
    swarm.assert_finished()
    assert swarm.now_s < ANSWER_S_MAX
    assert any("says that the round was given up here" in note for note in swarm.notes)


A, B, C = PeerId("a"), PeerId("b"), PeerId("c")  # a owns the slice
PARTS = ("1", "2", "3")
RIGHT = Sums(PARTS, "m", "m")  # the mean is that of the parts
FALSE = Sums(PARTS, "m", "x")  # the owner gave out another one
OTHER = Sums(PARTS, "y", "m")  # a reader that says that it got something else
ODD_B = Sums(("1", "other", "3"), "z", "m")  # b's part was another one
WRONG, PAIR = InquiryState.ODD, InquiryState.SPLIT


@pytest.mark.parametrize(
    ("said", "may_ask", "expected"),
    [
        ({}, True, ReductionFinding(InquiryState.ASKS)),
        ({A: RIGHT}, True, ReductionFinding(InquiryState.ASKS)),
        ({}, False, ReductionFinding(InquiryState.UNANSWERED)),
        ({A: RIGHT, B: RIGHT}, True, ReductionFinding(InquiryState.ALIKE)),
        ({B: RIGHT}, True, ReductionFinding(InquiryState.ALIKE)),
        ({A: RIGHT, B: FALSE}, True, ReductionFinding(InquiryState.ASKS)),
        ({A: RIGHT, B: FALSE, C: FALSE}, True, ReductionFinding(WRONG, wrong=(A,))),
        ({A: FALSE, B: FALSE, C: FALSE}, True, ReductionFinding(WRONG, wrong=(A,))),
        ({B: FALSE, C: FALSE}, False, ReductionFinding(WRONG, wrong=(A,))),
        ({A: Sums(PARTS, "x", "x"), B: FALSE, C: FALSE}, False, ReductionFinding(WRONG, wrong=(A,))),
        ({A: RIGHT, B: OTHER, C: RIGHT}, False, ReductionFinding(WRONG, wrong=(B,))),
        ({A: RIGHT, B: FALSE, C: RIGHT}, False, ReductionFinding(WRONG, wrong=(B,))),
        ({A: RIGHT, B: FALSE}, False, ReductionFinding(PAIR, pair=(B, A))),
        ({B: FALSE}, False, ReductionFinding(PAIR, pair=(B, A))),
        ({B: OTHER, C: RIGHT}, False, ReductionFinding(PAIR, pair=(B, C))),
        ({A: ODD_B, B: FALSE, C: FALSE}, False, ReductionFinding(PAIR, pair=(B, A))),
        ({A: RIGHT, B: RIGHT, C: Sums(("1", "other", "3"), "z", "m")}, False, ReductionFinding(PAIR, pair=(B, C))),
        ({A: RIGHT, B: ODD_B, C: RIGHT}, False, ReductionFinding(PAIR, pair=(B, A))),
    ],
)
def test_what_follows_from_what_is_said(said: dict[PeerId, Sums], may_ask: bool, expected: ReductionFinding) -> None:
    assert finding(A, (A, B, C), said, may_ask=may_ask) == expected
