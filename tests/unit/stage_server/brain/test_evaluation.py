"""What one replica knows of each evaluation microbatch."""

from __future__ import annotations

from itertools import permutations

from stage_server.brain.early_inputs import Claim
from stage_server.brain.evaluation import (
    ComputeEvaluation,
    EmitEvaluation,
    EvaluationTable,
    ForgetEvaluation,
    ReportEvaluation,
)
from swarm.events import Evaluated
from swarm.messages import Evaluate
from swarm.types import EvaluationBatch, Hop, PeerId

HERE = PeerId("here")


def table(stage: int = 1, stages: int = 3, *, version: int = 4, staleness: int = 1) -> EvaluationTable:
    return EvaluationTable(stage, stages, 0, version, staleness, peer=HERE, incarnation=1)


def command(index: int = 0, attempt: int = 1, *, version: int = 4, stage: int = 1, peer: PeerId = HERE) -> Evaluate:
    hops = [Hop(PeerId(f"p{number}"), 1, attempt, "") for number in range(3)]
    hops[stage] = Hop(peer, 1, attempt, "")
    return Evaluate(EvaluationBatch(0, version, index), tuple(hops))


def claim(attempt: int, peer: str = "p0") -> Claim:
    return Claim(PeerId(peer), 1, attempt)


def work(index: int = 0, attempt: int = 1, version: int = 4) -> ComputeEvaluation:
    return ComputeEvaluation(EvaluationBatch(0, version, index), attempt)


def test_command_and_input_in_either_order_make_one_order() -> None:
    early = table()
    assert early.arrived(EvaluationBatch(0, 4, 0), claim(1)).early
    assert early.route(command()) == ()
    assert early.arrived(EvaluationBatch(0, 4, 0), claim(1)).actions == (work(),), "it arrives again with its command"
    late = table()
    assert late.route(command()) == ()
    assert late.arrived(EvaluationBatch(0, 4, 0), claim(1)).actions == (work(),)


def test_the_first_stage_needs_no_input_and_takes_none() -> None:
    first = table(stage=0)
    assert first.route(command(stage=0)) == (work(),)
    assert "no evaluation input" in first.arrived(EvaluationBatch(0, 4, 1), claim(1)).refusal


def test_the_result_goes_to_the_next_hop_and_the_loss_to_the_scheduler() -> None:
    middle, microbatch = table(), EvaluationBatch(0, 4, 0)
    middle.route(command())
    middle.arrived(microbatch, claim(1))
    assert middle.begin(work())
    emit = EmitEvaluation(microbatch, 1, Hop(PeerId("p2"), 1, 1, ""))
    assert middle.computed(work(), 0.0) == (emit, ForgetEvaluation(microbatch))
    last = table(stage=2)
    last.route(command(stage=2))
    assert last.arrived(microbatch, claim(1, "p1")).accepted
    report = ReportEvaluation(Evaluated(microbatch, 1, 2.5))
    assert last.computed(work(), 2.5) == (report, ForgetEvaluation(microbatch))


def test_repetitions_and_old_attempts_change_nothing() -> None:
    microbatch = EvaluationBatch(0, 4, 0)
    for order in permutations(range(4)):
        held = table()
        held.route(command())
        actions = [
            held.route(command()) if number % 2 else held.arrived(microbatch, claim(1)).actions for number in order
        ]
        assert sum(actions, ()) == (work(),)
    held.route(command(attempt=2))
    assert held.route(command(attempt=1)) == ()
    assert not held.arrived(microbatch, claim(1)).accepted
    assert held.arrived(microbatch, claim(1)).refusal == ""
    assert held.arrived(microbatch, claim(2)).actions == (work(attempt=2),)
    held.computed(work(attempt=2), 0.0)
    assert held.computed(work(attempt=2), 0.0) == ()
    assert not held.arrived(microbatch, claim(2)).accepted


def test_a_newer_attempt_withdraws_the_order_and_drops_the_result_of_the_older() -> None:
    held, microbatch = table(), EvaluationBatch(0, 4, 0)
    held.route(command())
    held.arrived(microbatch, claim(1))
    held.route(command(attempt=2))
    assert not held.begin(work())
    assert held.computed(work(), 0.0) == ()
    assert held.arrived(microbatch, claim(2)).actions == (work(attempt=2),)


def test_a_replica_that_lost_its_place_forgets_and_takes_no_input() -> None:
    held, microbatch = table(), EvaluationBatch(0, 4, 0)
    held.route(command())
    held.arrived(microbatch, claim(1))
    assert held.route(command(attempt=2, peer=PeerId("other"))) == (ForgetEvaluation(microbatch),)
    assert not held.begin(work())
    assert not held.arrived(microbatch, claim(2)).accepted
    assert not held.wants(microbatch)


def test_an_evaluation_of_weights_to_come_waits_for_the_commit() -> None:
    held = table(version=3)
    assert held.route(command()) == ()
    assert held.arrived(EvaluationBatch(0, 4, 0), claim(1)).actions == ()
    assert held.commit(4) == (work(),)


def test_a_version_that_is_gone_is_dropped_and_its_late_tensors_are_only_acknowledged() -> None:
    for staleness in (0, 1):
        held, microbatch = table(staleness=staleness), EvaluationBatch(0, 4, 0)
        held.route(command())
        held.arrived(microbatch, claim(1))
        dropped = held.commit(5 + staleness)
        assert dropped == (ForgetEvaluation(microbatch),)
        assert len(held) == 0
        assert not held.begin(work())
        late = held.arrived(microbatch, claim(1))
        assert (late.accepted, late.refusal) == (False, "")
        assert held.route(command()) == ()
        assert len(held) == 0


def test_what_is_too_far_ahead_or_of_another_timeline_is_refused() -> None:
    held = table()
    assert held.arrived(EvaluationBatch(0, 6, 0), claim(1)).early
    assert "version 4" in held.arrived(EvaluationBatch(0, 7, 0), claim(1)).refusal
    assert "timeline 1" in held.arrived(EvaluationBatch(1, 4, 0), claim(1)).refusal
    assert held.route(command(version=7)) == ()


def test_an_input_of_anybody_but_the_hop_before_ours_is_refused_and_leaves_its_place_free() -> None:
    """Whoever claimed a higher attempt made an entry of it: the command that came then was older, and was ignored."""
    held, microbatch = table(), EvaluationBatch(0, 4, 0)
    assert held.arrived(microbatch, claim(1 << 31, "x")).early
    held.route(command())
    assert len(held) == held.newest_attempt() == 1
    assert held.arrived(microbatch, claim(1 << 31, "x")).early
    for stranger in (claim(1, "x"), claim(1, "p2"), Claim(PeerId("p0"), 2, 1)):
        assert "names Claim(peer='p0'" in held.arrived(microbatch, stranger).refusal
    assert held.arrived(microbatch, claim(1)).actions == (work(),)
