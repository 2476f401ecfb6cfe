"""What each event of a replica means for its job."""

from __future__ import annotations

from typing import assert_never

from scheduler.brain.commit.digests import Expel
from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.outputs import Fail, WriteEvaluation
from scheduler.brain.parts import Parts
from scheduler.brain.state.mode import Mode
from scheduler.brain.state.step import Phase
from scheduler.brain.validity import fault_of, is_of_the_past, strike
from swarm.errors import OutOfMemory, StaleMessage
from swarm.messages import (
    Accumulated,
    Averaged,
    ChaosBegun,
    Committed,
    Evaluated,
    EvaluationUndelivered,
    Event,
    Failed,
    Forwarded,
    Heartbeat,
    Hello,
    Leaving,
    Loaded,
    Logged,
    RoundFailed,
    Saved,
    Undelivered,
)
from swarm.types import PeerId


def hear(parts: Parts, peer: PeerId, event: Event, now_s: float) -> bool:
    """Pass an event on to the parts that it concerns, and end the job where one of them says so.

    False if nothing can follow from the event.
    """
    state, settings = parts.state, parts.state.settings
    is_known = peer in state.joiners or peer in state.pool
    if not is_known and not isinstance(event, Hello):
        return False
    if is_of_the_past(event, settings):
        state.ledger.duplicates += 1
        return False
    if fault := fault_of(peer, event, settings, state.progress.committed):
        state.ledger.violations += 1
        _on_nonsense(parts, peer, event, fault, now_s)
        return True
    if peer in state.joiners:
        parts.admission.hear(peer, event, now_s)
        return True
    if isinstance(event, Hello):
        _on_hello(parts, event, now_s)
        return True
    match event:
        case Accumulated() if state.census is not None:
            state.census.accumulated(peer, event)
        case Accumulated():
            if fault := parts.dispatch.accumulated(peer, event, now_s):
                _on_nonsense(parts, peer, event, fault, now_s)
        case Forwarded():
            parts.dispatch.forwarded(peer, event, now_s)
            return False
        case Averaged():
            parts.departures.remedy(parts.rounds.averaged(peer, event, now_s), now_s)
        case RoundFailed():
            _on_round_failed(parts, peer, event, now_s)
        case Committed():
            _on_committed(parts, peer, event, now_s)
        case Loaded():
            current = (event.job, event.timeline) == (state.settings.job, state.settings.timeline)
            if current and state.mode in (Mode.LOADING, Mode.GATHERING):
                parts.departures.remedy(parts.loading.loaded(peer, event), now_s)
        case Saved():
            state.conclude(parts.collector.saved(peer, event, now_s))
        case Undelivered():
            cause = parts.dispatch.undelivered(peer, event, now_s)
            if cause:
                run = state.progress.runs[event.microbatch.step]
                parts.rounds.void(run, peer, cause, now_s, "timeout")
        case EvaluationUndelivered():
            parts.dispatch.evaluation_undelivered(peer, event, now_s)
        case Failed():
            _on_failed(parts, peer, event, now_s)
        case Leaving():
            state.outbox.note("warning", f"{state.pool.name(peer)} wants to leave: {event.reason}")
        case Evaluated():
            row = parts.evaluations.evaluated(peer, event)
            if row is not None:
                state.outbox.put(WriteEvaluation(row))
        case Heartbeat() | Logged() | ChaosBegun():
            return False
        case _:
            assert_never(event)
    return True


def _on_nonsense(parts: Parts, peer: PeerId, event: Event, fault: str, now_s: float) -> None:
    """A peer says what cannot be: ignored, unless it goes on with that, or all wait for what it should have said."""
    state = parts.state
    joiner = state.joiners.get(peer)
    if joiner is None and peer not in state.pool:
        state.outbox.release(peer, f"it {fault}")
        return
    is_enough = strike(state, peer, fault)
    if joiner is not None:
        if is_enough or isinstance(event, Hello):
            parts.admission.refuse(joiner, f"it {fault}", now_s)
    elif _owes(parts, peer, event) or (is_enough and parts.departures.can_spare(peer)):
        parts.departures.expel(peer, f"it {fault}", "refused", now_s, unfit=True)


def _owes(parts: Parts, peer: PeerId, event: Event) -> bool:
    """Whether nothing goes on before the replica has given the answer that the event pretends to be."""
    runs = parts.state.progress.runs.values()
    match event:
        case Hello():
            return True
        case Loaded():
            return parts.state.pool[peer].loaded is None
        case Averaged():
            return any(peer in averaging.missing() for run in runs for averaging in run.rounds.values())
        case Committed():
            return any(run.phase is Phase.COMMITTING and peer in parts.commits.owing(run) for run in runs)
    return False


def _on_round_failed(parts: Parts, peer: PeerId, event: RoundFailed, now_s: float) -> None:
    match parts.rounds.failed(peer, event, now_s):
        case Expel(peer=leaver, cause=cause):
            parts.departures.expel(leaver, cause, "timeout", now_s)
        case Fail() as fault:
            parts.state.conclude(fault)


def _on_committed(parts: Parts, peer: PeerId, event: Committed, now_s: float) -> None:
    if not parts.commits.is_awaited(event):
        parts.state.ledger.duplicates += 1
        return
    first = parts.commits.is_first(event)
    found = parts.commits.enter(peer, event)
    if not found and first and event.version == parts.state.progress.committed:
        parts.admission.digest_known(event.stage)
    parts.departures.remedy(found, now_s)


def _on_failed(parts: Parts, peer: PeerId, event: Failed, now_s: float) -> None:
    """A replica gives up: the others of its stage go on, if there are any and the job was at work."""
    if event.job != parts.state.settings.job:
        return
    pool, settings, departures = parts.state.pool, parts.state.settings, parts.departures
    name, others = pool.name(peer), len(pool.by_stage[pool.stage_of(peer)]) - 1
    is_loading = parts.state.mode is Mode.LOADING
    least = max(1, settings.rebalance.min_replicas) if is_loading else 1  # so many must be there to start with
    if settings.recover and others >= least:
        reason = "oom" if event.code == OutOfMemory.code else "refused"
        departures.expel(peer, event.message, reason, now_s, unfit=is_loading)
    elif settings.recover and not is_loading and event.code == StaleMessage.code:
        # Those that had what it lacks are gone, such as the averaged gradient of a round before it joined.
        departures.stage_lost(f"{name} cannot go on: {event.message}; the stage has no other replica")
    else:
        parts.state.conclude(Fail(event.code, f"{name} cannot go on: {event.message}", event.hint))


def _on_hello(parts: Parts, hello: Hello, now_s: float) -> None:
    """A peer of the job dialled: after its session broke, or after the scheduler was restarted."""
    peer, state = hello.peer, parts.state
    if peer not in state.pool:
        if not parts.reattach.admits(hello):
            state.outbox.release(peer, "the job went on without it")
            return
        pinned = hello.pinned_stage >= 0
        parts.reattach.enlist(ReplicaRecord(peer, hello.incarnation, hello.address, hello.stage, hello.device, pinned))
    parts.reattach.heard(hello)
    if state.census is not None and not parts.reattach.holds_stage(hello):
        departures = parts.departures
        departures.expel(peer, f"it holds stage {hello.stage} of timeline {hello.timeline}", "refused", now_s)
        return
    if state.census is not None:
        state.census.report(hello)
    elif state.mode is Mode.LOADING:
        if not parts.reattach.holds_stage(hello):
            parts.loading.send(state.pool.replica(peer))
    elif parts.reattach.reattach(hello, now_s):
        # Whether it was asked for its state, or has answered, is not known.
        state.conclude(parts.collector.saver_gone(peer, state.pool.stage_of(peer), now_s))
    else:
        parts.departures.expel(peer, f"it holds version {hello.version}", "refused", now_s)
        return
    parts.reattach.trust(peer)
