"""Which evaluation microbatch goes where, and how long a version of the weights must stay."""

from __future__ import annotations

import math
from dataclasses import fields
from random import Random
from typing import Any

import pytest

from scheduler.brain.outputs import EvaluationRow
from scheduler.brain.routing.evaluation import EvaluationRoute, Evaluations
from scheduler.brain.routing.policies import ReplicaLoad
from scheduler.brain.settings import BrainSettings
from swarm.types import EvaluationBatch, PeerId
from swarm.wire.messages import Evaluated

A, B, C, D = (PeerId(name) for name in "abcd")


def evaluations(
    microbatches: int = 3, *, every_steps: int = 2, steps: int = 7, staleness: int = 1, evaluates: bool = True
) -> Evaluations:
    values: dict[str, Any] = dict.fromkeys(field.name for field in fields(BrainSettings))
    values |= {"timeline": 0, "steps": steps, "overlap": staleness, "eval_every_steps": every_steps}
    values["evaluates"] = evaluates
    return Evaluations(BrainSettings(**values | {"evaluation_microbatches": microbatches, "evaluation_tokens": 10}))


def loads(*stages: str, without: str = "") -> list[tuple[ReplicaLoad, ...]]:
    return [tuple(ReplicaLoad(PeerId(name), 0, 1.0, name not in without) for name in stage) for stage in stages]


def answer(turn: EvaluationRoute, loss: float) -> tuple[PeerId, Evaluated]:
    return turn.peers[-1], Evaluated(EvaluationBatch(0, turn.version, turn.index), turn.attempt, loss)


def test_every_so_many_versions_and_the_last_are_evaluated() -> None:
    due = []
    for version in range(1, 8):
        plan = evaluations()
        plan.made(version)
        if not plan.is_idle:
            due.append(version)
    assert due == [2, 4, 6, 7]


def test_an_island_evaluates_once_another_one_that_did_is_lost() -> None:
    plan = evaluations(evaluates=False)
    plan.made(2)
    assert plan.is_idle
    plan.take_over()
    plan.made(4)
    assert not plan.is_idle


def test_nothing_is_evaluated_without_steps_or_without_data() -> None:
    for plan in (evaluations(every_steps=0), evaluations(microbatches=0)):
        plan.made(2)
        assert plan.is_idle
        assert plan.feed(loads("a"), 8) == []


def test_the_row_that_overwrites_a_version_waits_for_its_evaluation() -> None:
    for staleness in (0, 1):
        plan = evaluations(1, staleness=staleness)
        plan.made(2)
        assert [plan.permits(step) for step in (0, 1, 2, 3, 4)] == [step < 2 + staleness for step in (0, 1, 2, 3, 4)]
        (turn,) = plan.feed(loads("a"), 8)
        plan.evaluated(*answer(turn, 1.0))
        assert plan.permits(3)
        assert plan.is_idle


def test_microbatches_are_fed_in_order_while_there_is_room_and_go_to_whom_is_free_first() -> None:
    plan = evaluations(5)
    plan.made(2)
    first = plan.feed(loads("ab", "c"), 3)
    assert [(turn.index, turn.attempt, turn.peers) for turn in first] == [
        (0, 1, (A, C)),
        (1, 1, (B, C)),
        (2, 1, (A, C)),
    ]
    assert plan.feed(loads("ab", "c"), 3) == []
    plan.evaluated(*answer(first[0], 1.0))
    assert [turn.index for turn in plan.feed(loads("ab", "c"), 3)] == [3]


def test_losses_are_added_in_order_of_the_microbatches() -> None:
    plan = evaluations(3)
    plan.made(2)
    losses = (0.1, 1e16, -1e16)
    turns = plan.feed(loads("a", "c"), 8)
    assert plan.evaluated(*answer(turns[2], losses[2])) is None
    assert plan.evaluated(*answer(turns[0], losses[0])) is None
    row = plan.evaluated(*answer(turns[1], losses[1]))
    assert row == EvaluationRow(0, 2, (0.0 + 0.1 + 1e16 - 1e16) / 10, 10)


def test_a_loss_that_is_not_finite_is_no_error() -> None:
    plan = evaluations(1)
    plan.made(2)
    row = plan.evaluated(*answer(plan.feed(loads("a"), 8)[0], math.nan))
    assert row is not None
    assert math.isnan(row.loss)


def test_what_a_lost_replica_had_part_in_is_done_again_as_a_whole() -> None:
    plan = evaluations(2)
    plan.made(2)
    first, second = plan.feed(loads("ab", "cd"), 8)
    assert (first.peers, second.peers) == ((A, C), (B, D))
    plan.withdraw(C)
    (again,) = plan.feed(loads("ab", "d"), 8)
    assert again == EvaluationRoute(2, 0, 2, (A, D), ())
    plan.withdraw(D)
    moved = plan.feed(loads("b", "c"), 8)
    assert moved == [EvaluationRoute(2, 0, 3, (B, C), (A,)), EvaluationRoute(2, 1, 2, (B, C), ())]
    assert plan.evaluated(*answer(first, 5.0)) is None, "an old attempt"
    assert plan.evaluated(D, answer(moved[0], 5.0)[1]) is None, "not asked"
    assert plan.duplicates == 2
    plan.evaluated(*answer(moved[1], 1.0))
    row = plan.evaluated(*answer(moved[0], 2.0))
    assert row is not None
    assert row.loss == 3.0 / 10


def test_without_a_replica_that_may_be_given_work_nothing_is_fed_and_nothing_is_lost() -> None:
    plan = evaluations(1)
    plan.made(2)
    assert plan.feed(loads("a", "c", without="c"), 8) == []
    assert plan.feed([*loads("a"), ()], 8) == []
    assert [turn.index for turn in plan.feed(loads("a", "c"), 8)] == [0]
    assert "0 of 1" in plan.waiting_for()


@pytest.mark.parametrize("seed", range(100))
def test_whatever_is_lost_and_repeated_every_microbatch_counts_once(seed: int) -> None:
    rng = Random(seed)
    count, room = rng.randint(1, 12), rng.randint(1, 6)
    plan = evaluations(count, every_steps=1, steps=3)
    plan.made(1)
    plan.made(2)
    given: list[EvaluationRoute] = []
    rows: list[EvaluationRow] = []
    while not plan.is_idle:
        given += plan.feed(loads("ab", "cd"), room)
        assert plan.in_flight <= room
        turn = rng.choice(given)
        if rng.random() < 0.2:
            plan.withdraw(rng.choice(turn.peers))
            continue
        row = plan.evaluated(*answer(turn, float(2**turn.index)))
        if row is not None:
            rows.append(row)
        if rng.random() < 0.8:  # else it may be answered again
            given.remove(turn)
    assert sorted(row.version for row in rows) == [1, 2]
    assert {row.loss for row in rows} == {(2**count - 1) / 10}
