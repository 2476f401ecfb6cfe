"""Checks and evaluations at one replica: when they are computed, and to whom it lends what it made."""

from __future__ import annotations

from itertools import permutations

import pytest

from stage_server.brain import side_work
from stage_server.brain.cell import CellTable
from stage_server.brain.neighbours import Claim
from stage_server.brain.side_work import SideWork, Subject, Timing
from swarm.errors import StaleMessage
from swarm.types import Direction, EvaluationBatch, Hop, Microbatch, PeerId
from swarm.wire.messages import Check, Evaluate

HERE = PeerId("here")
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
BATCH = EvaluationBatch(0, 4, 0)


class Table(SideWork[str]):
    """The side work of a replica of three stages that holds `version`, with the commits of its cells."""

    def __init__(self, stage: int = 1, *, version: int = 4, staleness: int = 1) -> None:
        here = {"peer": HERE, "incarnation": 1}
        self.cells = CellTable(stage=stage, stages=3, timeline=0, version=version, staleness=staleness, **here)
        super().__init__(self.cells, HERE, 1)

    def commit_until(self, version: int) -> None:
        while self.cells.version < version:
            step = self.cells.version
            self.cells.commit(step, step + 1)
            self.commit(step)

    def came(self, attempt: int = 1, batch: EvaluationBatch = BATCH, peer: str = "p0") -> Timing:
        """An activation of an evaluation; it is held if it is wanted."""
        arrival = self.judge(batch, Claim(PeerId(peer), 1, attempt))
        if arrival is Timing.WANTED:
            self.arrived(batch, FORWARD, f"x of {attempt}")
        return arrival

    def taken_out(self) -> tuple[Subject, int, list[str]] | None:
        task = self.next()
        return None if task is None else (task.subject, task.number, list(task.inputs.values()))


def check(index: int = 0, number: int = 1, *, stage: int = 1, version: int = 4, step: int = 5) -> Check:
    hops = [Hop(PeerId(f"p{at}"), 1, 2, "") for at in range(3)]
    hops[stage] = Hop(HERE, 1, 3, "")
    return Check(Microbatch(0, step, index), version, stage, number, tuple(hops))


def evaluate(index: int = 0, attempt: int = 1, *, version: int = 4, stage: int = 1, peer: PeerId = HERE) -> Evaluate:
    hops = [Hop(PeerId(f"p{number}"), 1, attempt, "") for number in range(3)]
    hops[stage] = Hop(peer, 1, attempt, "")
    return Evaluate(EvaluationBatch(0, version, index), tuple(hops))


# Checks


def test_a_check_is_ready_once_its_inputs_are_here_from_whom_the_scheduler_named_and_its_weights_are_held() -> None:
    table, microbatch = Table(version=3), check().microbatch
    assert table.take(check())
    assert not table.wants(microbatch, FORWARD, PeerId("p2"), 1)
    assert not table.wants(microbatch, FORWARD, PeerId("p0"), 2)
    for direction, peer in ((FORWARD, "p0"), (BACKWARD, "p2")):
        assert table.next() is None
        assert table.wants(microbatch, direction, PeerId(peer), 1)
        table.arrived(microbatch, direction, direction.value)
        assert not table.wants(microbatch, direction, PeerId(peer), 1), "once is enough"
    assert table.next() is None
    table.commit_until(4)
    assert table.taken_out() == (microbatch, 1, [FORWARD.value, BACKWARD.value])
    assert table.next() is None


def test_the_ends_of_the_pipeline_need_one_input_only() -> None:
    for stage, direction in ((0, BACKWARD), (2, FORWARD)):
        table = Table(stage)
        assert table.take(check(stage=stage))
        assert list(table.lacking(check(stage=stage))) == [direction]


def test_a_newer_check_replaces_an_older_one_and_not_the_other_way_round() -> None:
    table = Table()
    assert table.take(check(number=2))
    assert not table.take(check(number=1))
    assert table.lacking(check(number=2))
    table.arrived(check().microbatch, FORWARD, "x")
    assert table.take(check(number=3))
    assert not table.lacking(check(number=2))
    assert len(table.lacking(check(number=3))) == 2, "what came for the older one is not known to be the same"


def test_what_does_not_come_by_itself_is_asked_for_at_the_second_look() -> None:
    table = Table()
    table.take(check())
    assert table.overdue() == []
    assert [(direction, of.peer) for _, direction, of in table.overdue()] == [(FORWARD, "p0"), (BACKWARD, "p2")]


def test_an_output_is_lent_to_the_named_checker_only_and_until_the_step_is_over() -> None:
    before, behind = Table(0), Table(2)
    assert before.lend(check()) is FORWARD
    assert behind.lend(check()) is BACKWARD
    assert before.lend(check(stage=2)) is None
    microbatch = check().microbatch
    assert before.may_ask(microbatch, FORWARD, HERE, 1)
    assert not before.may_ask(microbatch, BACKWARD, HERE, 1)
    assert not before.may_ask(microbatch, FORWARD, PeerId("stranger"), 1)
    assert not before.may_ask(microbatch, FORWARD, HERE, 2)
    before.forget(lambda microbatch: microbatch.step <= 5)
    assert not before.may_ask(microbatch, FORWARD, HERE, 1)


def test_checks_are_forgotten_with_their_step_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_work, "WAITING_MAX", 2)
    table = Table()
    assert table.take(check(0))
    assert table.take(check(1, step=6))
    assert not table.take(check(2))
    assert table.take(evaluate()), "nobody sends an evaluation again"
    table.commit(5)
    assert not table.lacking(check(0))
    assert table.lacking(check(1, step=6))
    table.drop(check(1, step=6).microbatch)
    assert not table.lacking(check(1, step=6))
    assert table.take(check(2))


# Evaluations


def test_command_and_input_in_either_order_make_one_order() -> None:
    early, late = Table(), Table()
    assert early.came() is Timing.EARLY
    assert early.take(evaluate())
    assert early.came() is Timing.WANTED, "it arrives again with its command"
    assert late.take(evaluate())
    assert late.came() is Timing.WANTED
    assert early.taken_out() == late.taken_out() == (BATCH, 1, ["x of 1"])
    assert early.next() is None


def test_the_first_stage_needs_no_input_and_takes_none() -> None:
    first = Table(0)
    assert first.take(evaluate(stage=0))
    with pytest.raises(StaleMessage, match="no evaluation input"):
        first.came()
    assert first.taken_out() == (BATCH, 1, [])


def test_repetitions_and_old_attempts_change_nothing() -> None:
    for order in permutations(range(4)):
        table = Table()
        table.take(evaluate())
        for number in order:
            assert not table.take(evaluate()) if number % 2 else table.came()
        assert table.taken_out() == (BATCH, 1, ["x of 1"])
        assert table.next() is None
    assert table.take(evaluate(attempt=2))
    assert not table.take(evaluate(attempt=1))
    assert table.came(1) is Timing.LATE
    assert table.came(2) is Timing.WANTED
    assert table.taken_out() == (BATCH, 2, ["x of 2"])
    assert table.came(2) is Timing.LATE


def test_a_newer_attempt_withdraws_the_order_and_drops_the_result_of_the_older() -> None:
    waiting, computing = Table(), Table()
    for table in (waiting, computing):
        table.take(evaluate())
        table.came()
    task = computing.next()
    assert task is not None
    assert computing.is_current(task)
    for table in (waiting, computing):
        assert table.take(evaluate(attempt=2))
        assert table.next() is None
    assert not computing.is_current(task)


def test_a_replica_that_lost_its_place_forgets_and_takes_no_input() -> None:
    table = Table()
    table.take(evaluate())
    table.came()
    assert not table.take(evaluate(attempt=2, peer=PeerId("other")))
    assert table.next() is None
    assert table.came(2) is Timing.LATE


def test_an_evaluation_of_weights_to_come_waits_for_the_commit() -> None:
    table = Table(version=3)
    table.take(evaluate())
    assert table.came() is Timing.WANTED
    assert table.next() is None
    table.commit_until(4)
    assert table.taken_out() == (BATCH, 1, ["x of 1"])


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_version_that_is_gone_is_dropped_and_its_late_tensors_are_only_acknowledged(staleness: int) -> None:
    table = Table(staleness=staleness)
    table.take(evaluate())
    table.came()
    table.commit_until(5 + staleness)
    assert len(table) == 0
    assert table.next() is None
    assert table.came() is Timing.LATE
    assert not table.take(evaluate())
    assert len(table) == 0


def test_what_is_too_far_ahead_or_of_another_timeline_is_refused() -> None:
    table = Table()
    assert table.came(batch=EvaluationBatch(0, 6, 0)) is Timing.EARLY
    for batch, fault in ((EvaluationBatch(0, 7, 0), "version 4"), (EvaluationBatch(1, 4, 0), "timeline 1")):
        with pytest.raises(StaleMessage, match=fault):
            table.came(batch=batch)
    assert not table.take(evaluate(version=7))


def test_an_input_of_anybody_but_the_hop_before_ours_is_refused_and_leaves_its_place_free() -> None:
    """Whoever claimed a higher attempt made an entry of it: the command that came then was older, and was ignored."""
    table = Table()
    assert table.came(1 << 31, peer="x") is Timing.EARLY
    table.take(evaluate())
    assert len(table) == table.newest_attempt() == 1
    assert table.came(1 << 31, peer="x") is Timing.EARLY
    for stranger in (Claim(PeerId("x"), 1, 1), Claim(PeerId("p2"), 1, 1), Claim(PeerId("p0"), 2, 1)):
        with pytest.raises(StaleMessage, match="names Claim\\(peer='p0'"):
            table.judge(BATCH, stranger)
    assert table.came() is Timing.WANTED
