"""The claim: whatever one peer names that does not exist, the job lives and ends with what it would have ended with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from scheduler.brain.events import KNOWN_ATTEMPTS_MAX, NONSENSE_MAX, fault_of
from scheduler.brain.inputs import Happened
from scheduler.brain.state.brain_state import Mode
from swarm.types import EvaluationBatch, Microbatch, PeerId, Round
from swarm.wire.messages import (
    Accumulated,
    Averaged,
    Committed,
    Evaluated,
    EvaluationUndelivered,
    Forwarded,
    Loaded,
    RoundFailed,
    Undelivered,
)
from tests.support.nonsense import NONSENSE, S0, SAID, A
from tests.support.obedient import MICROBATCHES, Swarm


def at(moment: str, swarm: Swarm) -> None:
    """Bring a job to a moment of its life."""
    swarm.start()
    if moment == "loading":
        swarm.run(until=lambda: len(swarm.brain._parts.loading.missing()) == 2)
    elif moment == "running":
        swarm.run(until=lambda: swarm.brain.counts().in_flight > 1)
    elif moment == "averaging":
        swarm.run(until=lambda: any(run.rounds for run in runs(swarm)))
    elif moment == "committing":
        swarm.run(until=lambda: any(run.commits for run in runs(swarm)))
    elif moment == "saving":
        swarm.run(until=lambda: swarm.brain.mode is Mode.SAVING)
    elif moment == "gathering":
        swarm.run(until=lambda: bool(swarm.rows))
        swarm.restart()
        for peer in ("b", "e"):
            swarm.say(PeerId(peer), swarm.hello(PeerId(peer)))
    elif moment == "joined":
        swarm.run(until=lambda: swarm.brain.counts().in_flight > 1)
        swarm.join("a", 0)
    assert swarm.end is None


def runs(swarm: Swarm) -> list[Any]:
    return list(swarm.brain._state.progress.runs.values())


def go_on(moment: str, swarm: Swarm) -> None:
    if moment == "gathering":
        for peer in swarm.replicas:
            if peer not in swarm.released:
                swarm.say(peer, swarm.hello(peer))
                one = swarm.replicas[peer]
                version, one.version = one.version, 0
                swarm.say(peer, swarm.loaded(one))
                one.version = version
    swarm.run()


MOMENTS = ("loading", "running", "averaging", "committing", "saving", "gathering", "joined")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_outlives_whatever_one_peer_names(moment: str) -> None:
    size = NONSENSE_MAX - 1
    batches = [NONSENSE[start : start + size] for start in range(0, len(NONSENSE), size)]
    for number, events in enumerate(batches):
        pools = ("bc", "def") if moment == "joined" else ("abc", "def")
        swarm = Swarm(
            pools, seed=number, overlap=MICROBATCHES * (number % 2), eval_every_steps=0 if moment == "gathering" else 1
        )
        at(moment, swarm)
        for event in events:
            swarm.step(Happened(A, event))
        go_on(moment, swarm)
        swarm.assert_finished()


def test_whoever_goes_on_with_nonsense_is_expelled_and_the_log_stays_short() -> None:
    swarm = Swarm()
    at("running", swarm)
    for _ in range(NONSENSE_MAX):
        assert "a" not in swarm.released
        swarm.step(Happened(A, Undelivered(Microbatch(1, 0, 10**6), 1, PeerId("d"), 1, "")))
    swarm.run()
    swarm.assert_finished()
    assert swarm.released[A] == "it names microbatch 1000000, which does not exist"
    assert [refusal.peer for refusal in swarm.unfit] == ["a"]


def test_the_last_replica_of_a_stage_is_not_expelled_for_nonsense_and_cannot_flood_the_log() -> None:
    swarm = Swarm(("a", "d"))
    at("running", swarm)
    before = len(swarm.notes)
    for _ in range(1000):
        swarm.step(Happened(A, Undelivered(Microbatch(1, 0, 10**6), 1, PeerId("d"), 1, "")))
    assert len(swarm.notes) - before == 10  # the first, second, fourth ... 512th
    assert swarm.brain.counts().violations == 1000
    swarm.run()
    swarm.assert_finished()


def test_an_answer_that_all_wait_for_and_that_cannot_be_costs_the_job_its_sender_only() -> None:
    for kind, changes in ((Loaded, {"stage": 9}), (Averaged, {"step": 9}), (Committed, {"step": 9})):
        swarm = Swarm(("ab", "cd"))
        swarm.lie = lambda peer, event, kind=kind, changes=changes: (  # type: ignore[misc]
            replace(event, **changes) if peer == A and isinstance(event, kind) else event
        )
        swarm.start()
        swarm.run()
        swarm.assert_finished()
        assert A in swarm.released


@pytest.mark.parametrize(
    ("attempt", "is_sane"), [(0, True), (KNOWN_ATTEMPTS_MAX, True), (KNOWN_ATTEMPTS_MAX + 1, False), (-1, False)]
)
def test_an_attempt_that_leaves_no_room_for_greater_ones_is_not_believed(attempt: int, *, is_sane: bool) -> None:
    hello = replace(SAID[0], attempt=attempt)
    assert (fault_of(A, hello, Swarm().settings, 0) == "") == is_sane


def test_events_of_an_earlier_timeline_are_late_and_no_nonsense() -> None:
    swarm = Swarm()
    at("running", swarm)
    for event in SAID:
        if isinstance(event, Evaluated | EvaluationUndelivered):
            swarm.step(Happened(A, replace(event, batch=EvaluationBatch(0, 10**6, 10**6))))
        elif isinstance(event, Accumulated | Forwarded | Undelivered):
            swarm.step(Happened(A, replace(event, microbatch=Microbatch(0, 10**6, 10**6))))
        elif isinstance(event, Averaged | RoundFailed | Committed):
            swarm.step(Happened(A, replace(event, timeline=0, step=10**6)))
    assert swarm.brain.counts().violations == 0
    swarm.run()
    swarm.assert_finished()


@pytest.mark.parametrize("field", ["duration_s", "up_bytes_per_s", "down_bytes_per_s"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_no_link_and_no_round_is_as_fast_as_that(field: str, value: float) -> None:
    said = Averaged(1, 0, S0, Round(3, 1), "mean", (), 0.1, 1e6, 1e300)
    settings = Swarm().settings
    assert fault_of(A, said, settings, 0) == ""
    assert str(value) in fault_of(A, replace(said, **{field: value}), settings, 0)
