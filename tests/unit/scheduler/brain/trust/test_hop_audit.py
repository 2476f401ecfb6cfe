"""What replicas say of hops: which words are compared, who computes a hop again, and who is not asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.brain.trust.hop_audit import (
    SILENT_MAX,
    SILENT_S,
    HopAudit,
    HopCase,
    HopId,
    HopInquiry,
    Work,
    _candidates,
    _evidence,
    inconstant,
)
from scheduler.brain.trust.inquiry import ANSWER_S_MAX, Inquiry
from swarm.types import Microbatch, PeerId
from swarm.wire.messages import Accumulated, Check, Checked, Event, Route
from tests.support.obedient import MICROBATCHES, STEPS, Swarm

A, B = (PeerId(name) for name in "ab")
TRUE = Work("x", "y" * 64, "g", "d" * 64, True, "1.5")
FALSE, ELSE = replace(TRUE, y="0" * 64), replace(TRUE, y="else")
Falsify = Callable[[PeerId, str, Microbatch, str], str]


def falsifies(liar: str, kind: str = "", steps: range = range(9), salt: Callable[[], str] = lambda: "") -> Falsify:
    """A replica makes false tensors, of one kind or of both."""

    def falsify(peer: PeerId, made: str, microbatch: Microbatch, name: str) -> str:
        is_false = peer == liar and kind in ("", made) and microbatch.step in steps
        return f"false{salt()} {name}"[:64] if is_false else name

    return falsify


def audit_of(swarm: Swarm) -> HopAudit:
    (audit,) = swarm.brain._parts.audits
    assert isinstance(audit, HopAudit)
    return audit


def overdue(silent: str, fault: str = "", pools: tuple[str, ...] = ("ab", "c"), **changes: object) -> tuple[Swarm, int]:
    """A job with a checker that does not answer, or says why not; how many checks it was asked for."""

    def lie(peer: PeerId, event: Event) -> Event | None:
        if isinstance(event, Checked) and peer == silent:
            return replace(event, fault=fault, digests=()) if fault else None
        return event

    swarm = Swarm.trained(pools, lie=lie, **changes)
    assert len(swarm.rows) == changes.get("steps", STEPS), swarm.notes[-5:]
    asked = [one for peer, one in swarm.told if isinstance(one, Check) and peer == silent == one.hops[one.stage].peer]
    return swarm, len(asked)


def test_a_checker_that_was_silent_three_times_is_not_asked_for_ten_minutes() -> None:
    swarm, asked = overdue("b", spot_check=1.0, seed=2)
    assert SILENT_MAX <= asked < SILENT_MAX + MICROBATCHES
    assert swarm.now_s < SILENT_S
    checks = audit_of(swarm)
    assert set(checks._silent) == {("b", 0)}
    assert checks._rests(PeerId("b"), 0, (PeerId("c"),), swarm.now_s)
    assert not checks._rests(PeerId("b"), 0, (PeerId("c"),), swarm.now_s + SILENT_S)
    hops = {one.microbatch for peer, one in swarm.told if isinstance(one, Route) and peer == "a"}
    assert len(hops) > asked, "others were left unchecked"


def test_a_checker_is_asked_on_beside_others_than_those_whose_tensors_it_lacks() -> None:
    """One that keeps its tensors back must not switch the checks beside others off."""
    swarm = Swarm(("ab", "cd"), routing="uniform", spot_check=1.0)
    checks = audit_of(swarm)
    checks._silent[PeerId("b"), 0] = [(0.0, (PeerId("c"),))] * SILENT_MAX
    swarm.start()
    swarm.run()
    swarm.assert_finished()
    checks_of_a = [one for peer, one in swarm.told if isinstance(one, Check) and peer == "b" and not one.stage]
    assert {check.hops[1].peer for check in checks_of_a} == {"d"}


@pytest.mark.parametrize("seed", range(4))
def test_a_checker_that_is_silent_beside_everybody_costs_a_few_waits(seed: int) -> None:
    """Three beside each pair of neighbours were up to 27 between two stages of three replicas."""
    swarm, asked = overdue("s", pools=("abc", "rst", "xyz"), spot_check=1.0, seed=seed, steps=24)
    late = audit_of(swarm)._silent[PeerId("s"), 1]
    assert SILENT_MAX <= len(late) == asked <= 4 * SILENT_MAX
    assert len({beside for _, beside in late}) > 1
    assert swarm.now_s < (2 * SILENT_MAX) * ANSWER_S_MAX


def test_a_neighbour_on_each_side_that_keeps_its_tensors_back_switches_no_checker_off() -> None:
    """One liar in each of three stages is a minority everywhere: two of them must not hide the third from checks."""
    checks = audit_of(Swarm(("abc", "rst", "xyz"), spot_check=1.0))
    withheld = [("a", "x"), ("a", "y"), ("a", "z"), ("b", "x"), ("c", "x")]
    checks._silent[PeerId("s"), 1] = [(0.0, (PeerId(one), PeerId(other))) for one, other in withheld]
    assert not any(checks._rests(PeerId("s"), 1, (PeerId(one), PeerId(other)), 1.0) for one in "abc" for other in "xyz")
    checks._silent[PeerId("s"), 1].append((0.0, (PeerId("b"), PeerId("y"))))
    assert all(checks._rests(PeerId("s"), 1, (PeerId(one), PeerId(other)), 1.0) for one in "abc" for other in "xyz")


def test_the_log_says_once_that_a_replica_is_not_checked() -> None:
    swarm, _ = overdue("", pools=("a", "bc"), spot_check=1.0)
    said = [note for note in swarm.notes if "of a is not checked: no other replica of the stage could" in note]
    assert len(said) == 1


def test_of_two_the_one_that_contradicts_itself_is_struck_and_at_the_second_time_goes() -> None:
    count = iter(range(1000))
    swarm = Swarm.trained(("ab", "cd"), falsify=falsifies("a", "y", salt=lambda: str(next(count))), spot_check=1.0)
    swarm.assert_finished()
    assert [(strike.peer, strike.is_proven) for strike in swarm.struck] == [("a", False), ("a", False)]
    assert [refusal.peer for refusal in swarm.unfit] == ["a"]
    assert "when it computed it again" in swarm.struck[0].evidence


@pytest.mark.parametrize(("liar", "place"), [("b", 1), ("b", 2), ("e", 0), ("e", 3)])
def test_who_names_what_it_sent_or_took_otherwise_than_two_neighbours_is_wrong(liar: str, place: int) -> None:
    """It commits to the true output and sends a false one, or the like; the tensors do not show which of two lies."""

    def lie(peer: PeerId, event: Event) -> Event:
        if peer == liar and isinstance(event, Accumulated):
            digests = list(event.digests)
            digests[place] = "another"
            return replace(event, digests=tuple(digests))
        return event

    swarms = [Swarm.trained(lie=lie, spot_check=0.001, steps=12, seed=seed) for seed in range(16)]
    for swarm in swarms:
        assert len(swarm.rows) == 12
        assert any("unclear who is right" in note for note in swarm.notes), "nobody is judged by one other"
    strikes = [strike for swarm in swarms for strike in swarm.struck]
    assert {(strike.peer, strike.is_proven) for strike in strikes} == {(liar, True)}
    assert any("its neighbours" in strike.evidence for strike in strikes)


def test_a_hop_that_two_have_done_must_have_the_same_results() -> None:
    """The first has lied and is late with its word: the repeated hop shows it, without any draw."""
    swarm = Swarm(("abc", "d"), spot_check=1e-9, eval_every_steps=0)
    swarm.falsify = falsifies("d", "dx", range(0))
    seen: list[str] = []

    def lie(peer: PeerId, event: Event) -> Event:
        if isinstance(event, Accumulated) and event.stage == 0 and not seen:
            seen.append(peer)
            x, _, g, dx = event.digests
            audit_of(swarm).hear(PeerId("late"), replace(event, digests=(x, "false", g, dx)), 0.0)
        return event

    swarm.lie = lie
    swarm.start()
    swarm.run()
    swarm.assert_finished()
    assert [(strike.peer, strike.is_proven) for strike in swarm.struck] == [("late", True)]
    assert "done again by another replica" in swarm.struck[0].evidence
    assert swarm.unfit == [], "it is gone already"


def test_a_replica_that_does_not_say_what_it_took_and_sent_is_not_heard() -> None:
    swarm = Swarm(spot_check=0.5)
    swarm.lie = lambda peer, event: (
        replace(event, digests=()) if peer == "b" and isinstance(event, Accumulated) else event
    )
    swarm.start()
    swarm.run(most=600)
    assert any("does not say what it took and sent" in note for note in swarm.notes)


def test_only_replicas_on_the_holders_kind_of_device_check_it() -> None:
    swarm = Swarm(spot_check=1.0)
    true = swarm.record
    swarm.record = lambda peer, stage: replace(true(peer, stage), device="gpu" if peer in "cf" else "cpu")  # type: ignore[method-assign]
    swarm.start()
    swarm.run()
    swarm.assert_finished()
    checkers = {
        peer for peer, command in swarm.told if isinstance(command, Check) and peer == command.hops[command.stage].peer
    }
    assert checkers == {"a", "b", "d", "e"}


def test_what_a_liar_did_for_a_step_that_is_averaged_already_is_void_too() -> None:
    swarm = Swarm(spot_check=1.0, routing="uniform", eval_every_steps=0)
    swarm.falsify = falsifies("a", "y")
    held: list[tuple[PeerId, Event]] = []

    def hold(peer: PeerId, event: Event) -> Event | None:
        if isinstance(event, Checked):
            held.append((peer, event))
            return None
        return event

    swarm.lie = hold
    swarm.start()
    while swarm.inbox:
        swarm.obey(*swarm.inbox.popleft())
    assert "spot check" in swarm.brain.waiting_for(), "the step is decided but for its checks"
    swarm.lie = lambda peer, event: event
    for peer, event in held:
        swarm.say(peer, event)
    swarm.run()
    swarm.assert_finished()
    assert [refusal.peer for refusal in swarm.unfit] == ["a"]


# What is said of one hop, and who is asked next


def inquiry(**said: Work) -> HopInquiry:
    case = HopCase(HopId(120, 2, 7), A, "cpu", "spot check")
    return Inquiry(case, {PeerId(name): work for name, work in said.items()})


@pytest.mark.parametrize(
    ("said", "others", "asked"),
    [
        ({"a": TRUE}, "abc", "bc"),
        ({"a": TRUE}, "a", ""),
        ({"a": TRUE, "b": FALSE}, "abc", "c"),
        ({"a": TRUE, "b": FALSE}, "ab", "ab"),  # both once more
        ({"a": TRUE, "b": FALSE, "c": ELSE}, "abcd", "d"),
        ({"a": TRUE, "b": FALSE, "c": ELSE}, "abc", ""),
    ],
)
def test_others_are_asked_before_two_are_asked_again(said: dict[str, Work], others: str, asked: str) -> None:
    assert _candidates(inquiry(**said), [PeerId(name) for name in others]) == list(asked)


def test_two_that_have_spoken_twice_are_not_asked_a_third_time() -> None:
    one = inquiry(a=TRUE, b=FALSE)
    one.about.again[A] = TRUE
    assert _candidates(one, [A, B]) == [B]
    one.about.again[B] = FALSE
    assert _candidates(one, [A, B]) == []


def test_an_answer_about_other_inputs_is_no_word_and_the_log_says_so() -> None:
    def lie(peer: PeerId, event: Event) -> Event:
        return replace(event, digests=("other", *event.digests[1:])) if isinstance(event, Checked) else event

    swarm = Swarm.trained(lie=lie, spot_check=1.0)
    swarm.assert_finished()
    assert swarm.struck == []
    assert any("was given other inputs than" in note for note in swarm.notes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"y": "0" * 64}, "output y of step 120, microbatch 7, stage 2 was 00000000, a and c got yyyyyyyy"),
        ({"dx": "0" * 64}, "gradient dx of step 120, microbatch 7, stage 2 was 00000000, a and c got dddddddd"),
        ({"loss": "9.0"}, "loss of step 120, microbatch 7, stage 2 was 9.0, a and c got 1.5"),
        ({"finite": False}, "finiteness of step 120, microbatch 7, stage 2 was false, a and c got true"),
    ],
)
def test_every_result_counts_and_is_named_in_the_evidence(changes: dict[str, object], told: str) -> None:
    one = inquiry(a=TRUE, b=replace(TRUE, **changes), c=TRUE)  # type: ignore[arg-type]
    assert one.said[B].results != TRUE.results
    assert _evidence(one.about, B, one.said) == f"{told} (spot check)"


def test_of_two_the_one_that_contradicts_itself_is_wrong_but_not_if_it_was_given_other_inputs() -> None:
    said = {A: TRUE, B: FALSE}
    assert inconstant(said, {A: TRUE, B: FALSE}) is None
    assert inconstant(said, {A: TRUE, B: TRUE}) == B
    assert inconstant(said, {A: FALSE, B: TRUE}) is None
    assert inconstant(said, {A: TRUE}) is None
    assert inconstant(said, {A: TRUE, B: replace(TRUE, x="other")}) is None


def test_a_loss_that_is_no_number_is_like_itself() -> None:
    event = Checked(Microbatch(0, 1, 2), 1, 1, False, float("nan"), ("x", "", "", "d"))
    assert Work.of(event) == Work.of(event)
    assert Work.of(event).inputs == ("x", "")
