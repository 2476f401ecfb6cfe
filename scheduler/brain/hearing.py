"""Hands each event of a replica to the parts of its job's brain."""

from __future__ import annotations

from typing import assert_never

from scheduler.brain.commit.digests import Expel
from scheduler.brain.inputs import Happened, ReplicaRecord
from scheduler.brain.outputs import Fail, WriteEvaluation
from scheduler.brain.parts import Parts
from scheduler.brain.state.brain_state import Mode
from scheduler.brain.state.step import Phase
from scheduler.brain.validity import fault_of, is_of_the_past, strike
from swarm.errors import OutOfMemory, StaleMessage
from swarm.types import PeerId
from swarm.wire import messages
from swarm.wire.messages import Event


def hear(parts: Parts, happened: Happened, now_s: float) -> bool:
    """Pass an event to the parts that it concerns, and end the job if one of them says so.

    Gives False if nothing can follow from the event.
    """
    peer, event = happened.peer, happened.event
    state, settings = parts.state, parts.state.settings
    is_known = peer in state.joiners or peer in state.pool
    if not is_known and not isinstance(event, messages.Hello):
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
    if isinstance(event, messages.Hello):
        _on_hello(parts, happened, event, now_s)
        return True
    match event:
        case messages.Accumulated() if state.census is not None:
            state.ledger.violations += not state.census.accumulated(peer, event)
        case messages.Accumulated():
            if fault := parts.dispatch.accumulated(peer, event, now_s):
                _on_nonsense(parts, peer, event, fault, now_s)
            else:
                parts.audited(peer, event, now_s)
                if event.overflow and (run := state.progress.runs.get(event.microbatch.step)) is not None:
                    run.overflows.setdefault(event.stage, event.overflow)
        case messages.Checked() | messages.Recounted() | messages.Rechecked() | messages.Hashed():
            if not parts.audited(peer, event, now_s):
                state.ledger.duplicates += 1
        case messages.Forwarded():
            parts.dispatch.forwarded(peer, event, now_s)
            return False
        case messages.Averaged():
            parts.departures.remedy(parts.rounds.averaged(peer, event, now_s), now_s)
        case messages.RoundFailed():
            _on_round_failed(parts, peer, event, now_s)
        case messages.Committed():
            _on_committed(parts, peer, event, now_s)
        case messages.Loaded():
            current = (event.job, event.timeline) == (state.settings.job, state.settings.timeline)
            if current and state.mode in (Mode.LOADING, Mode.GATHERING):
                parts.departures.remedy(parts.loading.loaded(peer, event), now_s)
        case messages.Saved():
            state.conclude(parts.collector.saved(peer, event, now_s))
        case messages.Undelivered():
            if unreached := parts.dispatch.undelivered(peer, event, now_s):
                run = state.progress.runs[event.microbatch.step]
                parts.rounds.void(run, *unreached, now_s, "timeout")
        case messages.EvaluationUndelivered():
            parts.dispatch.evaluation_undelivered(peer, event, now_s)
        case messages.Failed():
            _on_failed(parts, peer, event, now_s)
        case messages.Leaving():
            state.outbox.note("warning", f"{state.pool.name(peer)} wants to leave: {event.reason}")
        case messages.Evaluated():
            row = parts.evaluations.evaluated(peer, event)
            if row is not None:
                state.outbox.put(WriteEvaluation(row))
        case messages.Heartbeat() | messages.Logged():
            return False
        case _:
            assert_never(event)
    return True


def _on_nonsense(parts: Parts, peer: PeerId, event: Event, fault: str, now_s: float) -> None:
    """Ignore an impossible event; expel its sender if it keeps sending them, or if the job waits for its answer."""
    state = parts.state
    joiner = state.joiners.get(peer)
    if joiner is None and peer not in state.pool:
        state.outbox.release(peer, f"it {fault}")
        return
    is_enough = strike(state, peer, fault)
    has_others = joiner is None and len(state.pool.by_stage[state.pool.stage_of(peer)]) > 1
    if joiner is not None:
        if is_enough or isinstance(event, messages.Hello):
            parts.admission.refuse(joiner, f"it {fault}", now_s)
    elif _owes(parts, peer, event) or (is_enough and state.settings.recover and has_others):
        parts.departures.expel(peer, f"it {fault}", "refused", now_s, unfit=True)


def _owes(parts: Parts, peer: PeerId, event: Event) -> bool:
    """Whether the job waits for the answer that the event pretends to be."""
    runs = parts.state.progress.runs.values()
    match event:
        case messages.Hello():
            return True
        case messages.Loaded():
            return parts.state.pool[peer].loaded is None
        case messages.Averaged():
            return any(peer in averaging.missing() for run in runs for averaging in run.told)
        case messages.Committed():
            return any(run.phase is Phase.COMMITTING and peer in parts.commits.owing(run) for run in runs)
    return False


def _on_round_failed(parts: Parts, peer: PeerId, event: messages.RoundFailed, now_s: float) -> None:
    match parts.rounds.failed(peer, event, now_s):
        case Expel(peer=leaver, cause=cause):
            parts.departures.expel(leaver, cause, "timeout", now_s)
        case Fail() as fault:
            parts.state.conclude(fault)


def _on_committed(parts: Parts, peer: PeerId, event: messages.Committed, now_s: float) -> None:
    if not parts.commits.is_awaited(event):
        parts.state.ledger.duplicates += 1
        return
    news = bool(parts.state.joiners) and event.version == parts.state.progress.committed
    first = news and all(one.stage != event.stage for one in parts.state.progress.runs[event.step].commits.values())
    found = parts.commits.enter(peer, event)
    if not found and first:
        parts.admission.tell(event.stage)
    parts.departures.remedy(found, now_s)


def _on_failed(parts: Parts, peer: PeerId, event: messages.Failed, now_s: float) -> None:
    """A replica gives up. The other replicas of its stage go on without it, if there are enough."""
    if event.job != parts.state.settings.job:
        return
    pool, settings, departures = parts.state.pool, parts.state.settings, parts.departures
    name, others = pool.name(peer), len(pool.by_stage[pool.stage_of(peer)]) - 1
    is_loading = parts.state.mode is Mode.LOADING
    least = max(1, settings.rebalance.min_replicas) if is_loading else 1  # a job needs this many to start
    if settings.recover and others >= least:
        reason = "oom" if event.code == OutOfMemory.code else "refused"
        departures.expel(peer, event.message, reason, now_s, unfit=is_loading)
    elif settings.recover and not is_loading and event.code == StaleMessage.code:
        # It lacks something, such as an averaged gradient from before it joined, and all who had that are gone.
        departures.stage_lost(f"{name} cannot go on: {event.message}; the stage has no other replica")
    else:
        parts.state.conclude(Fail(event.code, f"{name} cannot go on: {event.message}", event.hint))


def _on_hello(parts: Parts, happened: Happened, hello: messages.Hello, now_s: float) -> None:
    """A peer of the job dialled again: its session had broken, or the scheduler was restarted."""
    peer, state = hello.peer, parts.state
    if peer not in state.pool:
        if not parts.reattach.admits(hello):
            state.outbox.release(peer, "the job went on without it")
            return
        where = (hello.address, hello.stage, hello.device, hello.pinned_stage >= 0, hello.site)
        parts.reattach.enlist(ReplicaRecord(peer, hello.incarnation, *where, happened.room))
    parts.reattach.heard(hello)
    if state.census is not None and not parts.reattach.holds_stage(hello):
        departures = parts.departures
        departures.expel(peer, f"it holds stage {hello.stage} of timeline {hello.timeline}", "refused", now_s)
        return
    if state.census is not None:
        state.census.report(hello, doubted=happened.doubted)
    elif state.mode is Mode.LOADING:
        if not parts.reattach.holds_stage(hello):
            parts.loading.send(state.pool[peer].replica)
    elif parts.reattach.reattach(hello, now_s):
        # It may not have heard that it was asked for its state, or its answer may be lost.
        state.conclude(parts.collector.saver_gone(peer, state.pool.stage_of(peer), now_s))
    else:
        parts.departures.expel(peer, f"it holds version {hello.version}", "refused", now_s)
        return
    parts.reattach.trust(peer)
