"""What all audits claim: who gives wrong numbers is found and goes, an honest replica never, and the job ends well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from scheduler.brain.inputs import PeerGone
from scheduler.brain.outputs import Fail
from scheduler.brain.trust.inquiry import ANSWER_S_MAX
from swarm.errors import ReplicaDiverged
from swarm.types import Microbatch, PeerId
from swarm.wire.messages import Check, Checked, Event, Hashed, HashStage, Recheck, Rechecked, Recount, Recounted
from tests.support.obedient import MICROBATCHES, Swarm

SEEDS = range(6)
Members = tuple[PeerId, ...]


@dataclass(frozen=True)
class Case:
    """An audit: what asks a replica, what it answers, and what people are told."""

    command: type
    answer: type
    waits: str  # what a step waits for
    unanswered: str


AUDITS = {
    "spot_check": Case(Check, Checked, "spot check", "is not checked: who was asked gave no answer"),
    "second_owner": Case(Recheck, Rechecked, "reduced once more", "are not compared: nobody else could reduce them"),
    "recount": Case(Recount, Recounted, "computes once more", "is not recounted: nobody gave an answer"),
    "second_hash": Case(HashStage, Hashed, "", "nobody else has hashed it"),
}
OF_STEPS = [name for name in AUDITS if name != "second_hash"]


def makes_false(liar: str, kind: str) -> Callable[[PeerId, str, Microbatch, str], str]:
    return lambda peer, made, microbatch, name: f"false {name}"[:64] if (peer, made) == (liar, kind) else name


def parts(members: Members) -> tuple[str, ...]:
    return tuple(f"part of {member}" for member in members)


def owns_falsely(liar: str) -> Callable[[PeerId, PeerId, Members], Any]:
    """All hold what the owner gave out, which is not what comes out of the parts."""
    return lambda reader, owner, members: (parts(members), "mean", "false" if owner == liar else "mean")


def accuses(liar: str) -> Callable[[PeerId, PeerId, Members], Any]:
    return lambda reader, owner, members: (parts(members), "another" if reader == liar != owner else "mean", "mean")


def gives_falsely(liar: str) -> Callable[[PeerId, PeerId, Members], Any]:
    """A replica gives away another part than the sum of its microbatches; the mean is that of what it gave."""
    return lambda reader, owner, members: (
        tuple(f"{'false ' * (member == liar)}part of {member}" for member in members), "mean", "mean"
    )  # fmt: skip


def recounts_falsely(liar: str) -> Callable[[PeerId, PeerId], str]:
    return lambda recounter, giver: "x" if recounter == liar else f"part of {giver}"


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("pools", [("abc", "def"), ("ab", "c"), ("a", "b")])
@pytest.mark.parametrize("audit", AUDITS)
def test_honest_replicas_are_never_struck(audit: str, pools: tuple[str, ...], rate: float) -> None:
    for seed in SEEDS:
        swarm = Swarm.trained(pools, seed=seed, eval_every_steps=1, **{audit: rate})
        swarm.assert_finished()
        assert (swarm.struck, swarm.unfit) == ([], [])
        asked = [command for _, command in swarm.told if isinstance(command, AUDITS[audit].command)]
        if rate in (0.0, 1.0):
            assert bool(asked) == (rate > 0.0 and len(pools[0]) > 1)


@pytest.mark.parametrize(
    ("audit", "liar", "hook", "evidence"),
    [
        ("spot_check", "a", ("falsify", makes_false("a", "y")), ("output y", "spot check")),
        ("spot_check", "c", ("falsify", makes_false("c", "y")), ("output y", "spot check")),
        ("spot_check", "d", ("falsify", makes_false("d", "dx")), ("gradient dx", "spot check")),
        ("second_owner", "a", ("reduced", owns_falsely("a")), ("was false, b, c got mean (second owner)",)),
        ("second_owner", "c", ("reduced", owns_falsely("c")), ("was false, a, b got mean (second owner)",)),
        ("second_owner", "b", ("reduced", accuses("b")), ("others got mean of mean (second owner)",)),
        ("recount", "b", ("reduced", gives_falsely("b")), ("was false pa, a got part of , c got part of  (recount)",)),
        ("recount", "c", ("recounted", recounts_falsely("c")), ("c got x",)),
        ("recount", "b", ("falsify", makes_false("b", "y")), ("output y", "(recount)")),
    ],
)
@pytest.mark.parametrize("overlap", [0, MICROBATCHES])
def test_of_three_who_gives_wrong_numbers_is_proven_wrong_and_its_work_is_void(
    audit: str, liar: str, hook: tuple[str, object], evidence: tuple[str, ...], overlap: int
) -> None:
    swarms = [Swarm.trained(seed=seed, overlap=overlap, **{audit: 1.0, hook[0]: hook[1]}) for seed in SEEDS]
    for swarm in swarms:
        swarm.assert_finished()
        assert [unfit.peer for unfit in swarm.unfit] == [strike.peer for strike in swarm.struck]
    strikes = [strike for swarm in swarms for strike in swarm.struck]
    assert {(strike.peer, strike.is_proven) for strike in strikes} == {(liar, True)}
    assert any(all(text in strike.evidence for text in evidence) for strike in strikes), strikes[0].evidence


@pytest.mark.parametrize(
    ("audit", "hook"),
    [
        ("spot_check", ("falsify", makes_false("a", "y"))),
        ("second_owner", ("reduced", owns_falsely("b"))),
        ("recount", ("reduced", gives_falsely("b"))),
        ("second_hash", ("state_of", lambda peer, kind, version: f"{version} of {peer}")),
    ],
)
def test_of_two_nobody_is_judged_and_the_job_stops(audit: str, hook: tuple[str, object]) -> None:
    swarms = [Swarm.trained(("ab", "c"), seed=seed, **{audit: 1.0, hook[0]: hook[1]}) for seed in SEEDS]
    ends = [swarm.end for swarm in swarms if isinstance(swarm.end, Fail)]
    assert ends
    assert {end.code for end in ends} == {ReplicaDiverged.code}
    assert all("a, b contradict each other" in end.message and "another stage server" in end.hint for end in ends)
    for swarm in swarms:
        assert swarm.struck == []
        assert all("model/0" not in vouched.files for vouched in swarm.vouched)


@pytest.mark.parametrize("audit", OF_STEPS)
def test_a_step_is_not_committed_while_an_audit_forbids_it(audit: str) -> None:
    swarm = Swarm(eval_every_steps=0, **{audit: 1.0})
    held: list[Event] = []

    def hold(peer: PeerId, event: Event) -> Event | None:
        if not isinstance(event, AUDITS[audit].answer):
            return event
        held.append(event)
        return None

    swarm.lie = hold
    swarm.start()
    swarm.run(lambda: bool(held), most=400)
    while swarm.inbox:
        swarm.obey(*swarm.inbox.popleft())
    assert held
    assert swarm.rows == []
    assert AUDITS[audit].waits in swarm.brain.waiting_for()


@pytest.mark.parametrize("audit", AUDITS)
def test_who_does_not_answer_is_replaced_and_at_last_the_job_goes_on_without(audit: str) -> None:
    case = AUDITS[audit]
    silent = Swarm.trained(lie=lambda peer, event: None if isinstance(event, case.answer) else event, **{audit: 1.0})
    silent.assert_finished()
    assert silent.now_s > ANSWER_S_MAX
    assert silent.struck == []
    assert any(case.unanswered in note for note in silent.notes)


@pytest.mark.parametrize("audit", AUDITS)
def test_an_asked_replica_that_is_lost_does_not_hold_the_job_up(audit: str) -> None:
    swarm = Swarm(eval_every_steps=0, **{audit: 1.0})
    lost: list[PeerId] = []

    def lose(peer: PeerId, event: Event) -> Event | None:
        if isinstance(event, AUDITS[audit].answer) and not lost:
            lost.append(peer)
        return None if peer in lost else event

    swarm.lie = lose
    swarm.start()
    swarm.run(lambda: bool(lost), most=20000)
    swarm.step(PeerGone(lost[0], "lost"))
    swarm.run(most=20000)
    swarm.assert_finished()
    assert swarm.now_s < ANSWER_S_MAX
    assert swarm.struck == []
