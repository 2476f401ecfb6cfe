"""The claim: a replica that computes wrong numbers is found and goes, an honest one never, and the job ends well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.brain.outputs import Fail
from scheduler.brain.trust.checks import ANSWER_S_MAX, SILENT_MAX, SILENT_S
from swarm.errors import ReplicaDiverged
from swarm.types import Microbatch, PeerId
from swarm.wire.messages import Accumulated, Check, Checked, Event, Route
from tests.support.obedient import MICROBATCHES, STEPS, Swarm

Falsify = Callable[[PeerId, str, Microbatch, str], str]


def falsifies(liar: str, kind: str = "", steps: range = range(9), salt: Callable[[], str] = lambda: "") -> Falsify:
    """A replica makes false tensors, of one kind or of both."""

    def falsify(peer: PeerId, made: str, microbatch: Microbatch, name: str) -> str:
        is_false = peer == liar and kind in ("", made) and microbatch.step in steps
        return f"false{salt()} {name}"[:64] if is_false else name

    return falsify


def trained(pools: tuple[str, ...] = ("abc", "def"), falsify: Falsify | None = None, **changes: object) -> Swarm:
    swarm = Swarm(pools, **{"spot_check": 1.0, "routing": "uniform"} | changes)  # type: ignore[arg-type]
    if falsify is not None:
        swarm.falsify = falsify
    swarm.start()
    swarm.run()
    return swarm


@pytest.mark.parametrize("spot_check", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("pools", [("abc", "def"), ("ab", "cd", "e"), ("abc",), ("a", "b")])
def test_honest_replicas_are_never_struck(pools: tuple[str, ...], spot_check: float) -> None:
    swarm = trained(pools, spot_check=spot_check)
    swarm.assert_finished()
    assert (swarm.struck, swarm.unfit) == ([], [])
    asked = [command for _, command in swarm.told if isinstance(command, Check)]
    assert bool(asked) == (spot_check > 0.0 and any(len(pool) > 1 for pool in pools))


@pytest.mark.parametrize("overlap", [0, MICROBATCHES])
@pytest.mark.parametrize(("liar", "kind"), [("a", "y"), ("c", "y"), ("d", "dx"), ("e", "dx")])
def test_a_liar_among_three_is_proven_wrong_by_a_third_and_its_work_is_void(liar: str, kind: str, overlap: int) -> None:
    swarm = trained(falsify=falsifies(liar, kind), overlap=overlap)
    swarm.assert_finished()
    assert {(one.peer, one.is_proven) for one in swarm.struck} == {(liar, True)}
    assert [one.peer for one in swarm.unfit] == [liar]
    what = "output y" if kind == "y" else "gradient dx"
    assert what in swarm.struck[0].evidence
    assert "spot check" in swarm.struck[0].evidence


def overdue(silent: str, fault: str = "", pools: tuple[str, ...] = ("ab", "c"), **changes: object) -> tuple[Swarm, int]:
    """A job with a checker that does not answer, or says why not; how many checks it was asked for."""
    swarm = Swarm(pools, routing="uniform", **changes)  # type: ignore[arg-type]

    def lie(peer: PeerId, event: Event) -> Event | None:
        if isinstance(event, Checked) and peer == silent:
            return replace(event, fault=fault, digests=()) if fault else None
        return event

    swarm.lie = lie
    swarm.start()
    swarm.run(most=20000)
    assert len(swarm.rows) == changes.get("steps", STEPS), swarm.notes[-5:]
    asked = [one for peer, one in swarm.told if isinstance(one, Check) and peer == silent == one.hops[one.stage].peer]
    return swarm, len(asked)


def test_a_checker_that_was_silent_three_times_is_not_asked_for_ten_minutes() -> None:
    swarm, asked = overdue("b", spot_check=1.0, seed=2)
    assert SILENT_MAX <= asked < SILENT_MAX + MICROBATCHES
    assert swarm.now_s < SILENT_S
    checks = swarm.brain._parts.checks
    assert set(checks._silent) == {("b", 0)}
    assert checks._rests(PeerId("b"), 0, (PeerId("c"),), swarm.now_s)
    assert not checks._rests(PeerId("b"), 0, (PeerId("c"),), swarm.now_s + SILENT_S)
    hops = {one.microbatch for peer, one in swarm.told if isinstance(one, Route) and peer == "a"}
    assert len(hops) > asked, "others were left unchecked"


def test_a_checker_is_asked_on_beside_others_than_those_whose_tensors_it_lacks() -> None:
    """One that keeps its tensors back must not switch the checks beside others off."""
    swarm = Swarm(("ab", "cd"), routing="uniform", spot_check=1.0)
    checks = swarm.brain._parts.checks
    checks._silent[PeerId("b"), 0] = [(0.0, (PeerId("c"),))] * SILENT_MAX
    swarm.start()
    swarm.run()
    swarm.assert_finished()
    checks_of_a = [one for peer, one in swarm.told if isinstance(one, Check) and peer == "b" and not one.stage]
    assert {one.hops[1].peer for one in checks_of_a} == {"d"}


@pytest.mark.parametrize("seed", range(4))
def test_a_checker_that_is_silent_beside_everybody_costs_a_few_waits(seed: int) -> None:
    """Three beside each pair of neighbours were up to 27 between two stages of three replicas."""
    swarm, asked = overdue("s", pools=("abc", "rst", "xyz"), spot_check=1.0, seed=seed, steps=24)
    late = swarm.brain._parts.checks._silent[PeerId("s"), 1]
    assert SILENT_MAX <= len(late) == asked <= 4 * SILENT_MAX
    assert len({beside for _, beside in late}) > 1
    assert swarm.now_s < (2 * SILENT_MAX) * ANSWER_S_MAX


def test_a_neighbour_on_each_side_that_keeps_its_tensors_back_switches_no_checker_off() -> None:
    """One liar in each of three stages is a minority everywhere: two of them must not hide the third from checks."""
    checks = Swarm(("abc", "rst", "xyz"), spot_check=1.0).brain._parts.checks
    withheld = [("a", "x"), ("a", "y"), ("a", "z"), ("b", "x"), ("c", "x")]
    checks._silent[PeerId("s"), 1] = [(0.0, (PeerId(one), PeerId(other))) for one, other in withheld]
    assert not any(checks._rests(PeerId("s"), 1, (PeerId(one), PeerId(other)), 1.0) for one in "abc" for other in "xyz")
    checks._silent[PeerId("s"), 1].append((0.0, (PeerId("b"), PeerId("y"))))
    assert all(checks._rests(PeerId("s"), 1, (PeerId(one), PeerId(other)), 1.0) for one in "abc" for other in "xyz")


def test_the_log_says_once_that_a_replica_is_not_checked() -> None:
    swarm, _ = overdue("", pools=("a", "bc"), spot_check=1.0)
    said = [note for note in swarm.notes if "of a is not checked: no other replica of the stage could" in note]
    assert len(said) == 1


def test_a_step_is_not_committed_while_a_check_of_it_is_open() -> None:
    swarm = Swarm(spot_check=1.0, eval_every_steps=0)
    held: list[Event] = []
    swarm.lie = lambda peer, event: held.append(event) if isinstance(event, Checked) else event  # type: ignore[func-returns-value]
    swarm.start()
    swarm.run(lambda: len(held) >= 2 * MICROBATCHES, most=400)
    while swarm.inbox:
        swarm.obey(*swarm.inbox.popleft())
    assert held
    assert swarm.rows == []
    assert "spot check" in swarm.brain.waiting_for()


def test_who_does_not_answer_is_replaced_and_at_last_the_check_is_given_up() -> None:
    swarm = Swarm(spot_check=1.0)
    swarm.lie = lambda peer, event: None if isinstance(event, Checked) else event
    swarm.start()
    swarm.run(most=20000)
    swarm.assert_finished()
    assert swarm.struck == []
    assert any("is not checked: who was asked gave no answer" in note for note in swarm.notes)


def test_of_two_the_one_that_contradicts_itself_is_struck_and_at_the_second_time_goes() -> None:
    count = iter(range(1000))
    swarm = trained(("ab", "cd"), falsifies("a", "y", salt=lambda: str(next(count))))
    swarm.assert_finished()
    assert [(one.peer, one.is_proven) for one in swarm.struck] == [("a", False), ("a", False)]
    assert [one.peer for one in swarm.unfit] == ["a"]
    assert "when it computed it again" in swarm.struck[0].evidence


def test_two_that_stand_by_what_they_say_stop_the_job_and_nobody_is_struck() -> None:
    swarm = trained(("ab", "cd"), falsifies("a", "y"))
    assert isinstance(swarm.end, Fail)
    assert swarm.end.code == ReplicaDiverged.code
    assert "a, b contradict each other" in swarm.end.message
    assert "another stage server" in swarm.end.hint
    assert swarm.struck == []
    assert sum("unclear who is right" in note for note in swarm.notes) == 2


@pytest.mark.parametrize(("liar", "place"), [("b", 1), ("b", 2), ("e", 0), ("e", 3)])
def test_who_names_what_it_sent_or_took_otherwise_than_two_neighbours_is_wrong(liar: str, place: int) -> None:
    """It commits to the true output and sends a false one, or the like; the tensors do not show which of two lies."""
    swarm = Swarm(spot_check=0.001, routing="uniform")

    def lie(peer: PeerId, event: Event) -> Event:
        if peer == liar and isinstance(event, Accumulated):
            digests = list(event.digests)
            digests[place] = "another"
            return replace(event, digests=tuple(digests))
        return event

    swarm.lie = lie
    swarm.start()
    swarm.run()
    swarm.assert_finished()
    struck = [(one.peer, one.is_proven) for one in swarm.struck]
    assert struck == [(liar, True)] or (liar == "e" and not struck), "e meets one neighbour only before the job is over"
    assert all("its neighbours" in one.evidence for one in swarm.struck)
    assert any("unclear who is right" in note for note in swarm.notes), "nobody is judged by one other"


def test_a_hop_that_two_have_done_must_have_the_same_results() -> None:
    """The first has lied and is late with its word: the repeated hop shows it, without any draw."""
    swarm = Swarm(("abc", "d"), spot_check=1e-9, eval_every_steps=0)
    swarm.falsify = falsifies("d", "dx", range(0))
    seen: list[str] = []

    def lie(peer: PeerId, event: Event) -> Event:
        if isinstance(event, Accumulated) and event.stage == 0 and not seen:
            seen.append(peer)
            x, _, g, dx = event.digests
            checks = swarm.brain._parts.checks
            checks.accumulated(PeerId("late"), replace(event, digests=(x, "false", g, dx)))
        return event

    swarm.lie = lie
    swarm.start()
    swarm.run()
    swarm.assert_finished()
    assert [(one.peer, one.is_proven) for one in swarm.struck] == [("late", True)]
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
    assert [one.peer for one in swarm.unfit] == ["a"]
