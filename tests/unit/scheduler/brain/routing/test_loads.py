"""The claim: the loads that are kept are those that would be found anew, whatever happened since."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.routing.loads import UNKNOWN_S, Loads, Pace
from scheduler.brain.settings import BrainSettings
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.pool import Leave, Trust
from swarm.job.course import PLAIN
from swarm.types import Hop, JobId, PeerId
from tests.support.situations import Calls, Situation, beside

A, B, C = (PeerId(name) for name in "abc")


@pytest.fixture
def books() -> BrainState:
    values: dict[str, Any] = {
        "job": JobId("job"), "epoch": 1, "timeline": 0, "steps": 2, "microbatches": 4, "split": (1, 1), "spec_json": "",
        "overlap": 0, "max_in_flight": None, "units": {}, "grad_clip_norm": 0.0, "averaging_timeout_s": 1.0,
        "fail_on_nonfinite": False, "learning_rate": lambda step: 0.1, "tokens_of": lambda step: 8,
    }  # fmt: skip
    made = BrainState(BrainSettings(**values), PLAIN)
    for peer, stage in ((A, 0), (B, 0), (C, 1)):
        made.pool.add(ReplicaRecord(peer, 1, "", stage))
    return made


@pytest.fixture
def loads(books: BrainState) -> Loads:
    made = Loads(books)
    for peer in books.pool:
        made.add(peer)
    return made


def test_a_replica_that_was_never_measured_is_believed_to_be_as_fast_as_the_best(
    books: BrainState, loads: Loads
) -> None:
    assert loads.pace_s(A, 0) == UNKNOWN_S
    loads.measured(A, 0.5)
    assert [load.pace_s for load in loads.by_stage()[0]] == [0.5, 0.5]
    assert (loads.measured_s(A), loads.measured_s(B)) == (0.5, 0.0)
    loads.measured(B, 0.25)
    assert [load.pace_s for load in loads.by_stage()[0]] == [0.5, 0.25]
    assert loads.best_s(0) == 0.25
    loads.validate()


def test_what_a_replica_was_given_counts_at_once(books: BrainState, loads: Loads) -> None:
    loads.by_stage()
    books.ledger.open(0)
    books.ledger.feed(0, [Hop(A, 1, 1, ""), Hop(C, 1, 1, "")], 0.0)
    loads.validate()
    assert [[load.outstanding for load in stage] for stage in loads.by_stage()] == [[1, 0], [1]]


def test_suspects_and_who_leaves_have_no_credit(books: BrainState, loads: Loads) -> None:
    books.pool[A].trust = Trust.SUSPECT
    loads.changed(A)
    assert [load.has_credit for load in loads.by_stage()[0]] == [False, True]
    assert not loads.load(A, keep=True).has_credit
    books.pool[A].trust = Trust.TRUSTED
    books.pool.leaves.ask(A, Leave("drained"))
    books.pool.leaves.begin(books.pool.by_stage[0], [], 0)
    loads.changed(A)
    assert [load.has_credit for load in loads.by_stage()[0]] == [False, True]
    assert loads.load(A, keep=True).has_credit, "it keeps what it has"
    loads.validate()


def test_a_replica_that_comes_back_is_measured_anew(books: BrainState, loads: Loads) -> None:
    loads.measured(A, 0.5)
    loads.by_stage()
    books.pool.remove(A)
    loads.remove(A, 0)
    loads.validate()
    assert [[load.peer for load in stage] for stage in loads.by_stage()] == [[B], [C]]
    books.pool.add(ReplicaRecord(A, 2, "", 0))
    loads.add(A)
    assert not loads.is_measured(A)
    assert loads.by_stage()[0][0].pace_s == UNKNOWN_S


def slow_and_fast() -> Pace:
    """A takes five seconds, B half a second."""
    pace = Pace()
    pace.observe(A, 5.0)
    pace.observe(B, 0.5)
    return pace


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_paces_are_measured_as_the_text_says(situation: Situation) -> None:
    situation.check(Calls(None, Pace=Pace, slow_and_fast=slow_and_fast, nan=math.nan, inf=math.inf).play)
