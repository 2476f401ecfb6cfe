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
from tests.support.situations import Calls, Situation, beside


def evaluations(
    microbatches: int = 3, *, every_steps: int = 2, steps: int = 7, staleness: int = 1, evaluates: bool = True
) -> Evaluations:
    values: dict[str, Any] = dict.fromkeys(field.name for field in fields(BrainSettings))
    values |= {"timeline": 0, "steps": steps, "overlap": staleness, "eval_every_steps": every_steps}
    values["evaluates"] = evaluates
    return Evaluations(BrainSettings(**values | {"evaluation_microbatches": microbatches, "evaluation_tokens": 10}))


def loads(*stages: str, without: str = "") -> list[tuple[ReplicaLoad, ...]]:
    return [tuple(ReplicaLoad(PeerId(name), 0, 1.0, name not in without) for name in stage) for stage in stages]


def loss(version: int, index: int, attempt: int, value: float) -> Evaluated:
    return Evaluated(EvaluationBatch(0, version, index), attempt, value)


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_evaluations_go_as_the_text_says(situation: Situation) -> None:
    situation.check(Calls(None, evaluations=evaluations, loads=loads, loss=loss, nan=math.nan).play)


def test_every_so_many_versions_and_the_last_are_evaluated() -> None:
    due = []
    for version in range(1, 8):
        plan = evaluations()
        plan.made(version)
        if not plan.is_idle:
            due.append(version)
    assert due == [2, 4, 6, 7]


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
        row = plan.evaluated(turn.peers[-1], loss(turn.version, turn.index, turn.attempt, float(2**turn.index)))
        if row is not None:
            rows.append(row)
        if rng.random() < 0.8:  # else it may be answered again
            given.remove(turn)
    assert sorted(row.version for row in rows) == [1, 2]
    assert {row.loss for row in rows} == {(2**count - 1) / 10}
