"""Events of replicas: each is handed to the parts of its job's brain, unless no healthy replica sends it.

An event that names a step, stage, microbatch, unit or attempt that does not exist is counted and sometimes logged, but
changes nothing else. A replica that keeps sending such events is expelled if its stage has another one, since nothing
else it says can be believed either. An event that is only late is no fault: events of an earlier timeline are ignored,
events of earlier steps and rounds are left to the parts that know them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, assert_never, get_args

from scheduler.brain.commit.digests import Expel
from scheduler.brain.inputs import Happened, ReplicaRecord
from scheduler.brain.outputs import Fail, WriteEvaluation
from scheduler.brain.parts import Parts
from scheduler.brain.settings import BrainSettings
from scheduler.brain.state.brain_state import BrainState, Mode
from scheduler.brain.state.step import Phase
from swarm.errors import OutOfMemory, StaleMessage
from swarm.types import Microbatch, PeerId
from swarm.wire import messages
from swarm.wire.messages import Event

ATTEMPTS_MAX = (1 << 32) - 1  # of a hop: on the wire they have 32 bits
KNOWN_ATTEMPTS_MAX = ATTEMPTS_MAX - (1 << 20)  # of a Hello: new hops carry greater ones
JOINS_MAX = 1 << 32
NONSENSE_MAX = 8  # events of one replica, then it is expelled
DIGESTS = 4  # of a hop: x, y, g, dx
TEXT_CHARACTERS_MAX = 64  # of what is shown of a name
_NAMES: dict[Any, list[str]] = {kind: [field.name for field in fields(kind)] for kind in get_args(Event)}
_AMOUNTS = {  # fields that hold a positive, finite number, in words
    **dict.fromkeys(("forward_s", "backward_s", "wait_s"), "a microbatch took {} s"),
    **dict.fromkeys(("up_bytes_per_s", "down_bytes_per_s"), "its links carry {} bytes per second"),
    "duration_s": "a round took {} s",
}


def apply_event(parts: Parts, happened: Happened, now_s: float) -> bool:
    """Pass an event to the parts that it concerns, and end the job if one says so. False: nothing follows from it."""
    peer, event = happened.peer, happened.event
    state, settings = parts.state, parts.state.settings
    is_known = peer in state.joiners or peer in state.pool
    if not is_known and not isinstance(event, messages.Hello):
        return False
    if _is_of_the_past(event, settings):
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
        case messages.Heartbeat() | messages.Logged() | messages.Calibrated():
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
    is_enough = _strike(state, peer, fault)
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
    commits = parts.state.progress.runs[event.step].commits.values()
    first = news and all(report.stage != event.stage for report in commits)
    found = parts.commits.enter(peer, event)
    if not found and first:
        parts.admission.tell(event.stage)
    parts.departures.remedy(found, now_s)


def _on_failed(parts: Parts, peer: PeerId, event: messages.Failed, now_s: float) -> None:
    """A replica gives up. The other replicas of its stage go on without it, if there are enough."""
    if event.job != parts.state.settings.job:
        return
    pool, settings, departures = parts.state.pool, parts.state.settings, parts.departures
    name, stage = pool.name(peer), pool.stage_of(peer)
    others = len(pool.by_stage[stage]) - 1
    if (census := parts.state.census) is not None:  # a replica that is not back yet counts, too
        others = sum(at == stage for other, at in census.known.items() if other != peer)
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
    if state.census is not None and not parts.reattach.may_gather(hello):
        holds = f"it holds version {hello.version} of stage {hello.stage} of timeline {hello.timeline}"
        parts.departures.expel(peer, holds, "refused", now_s)
        return
    if state.census is not None:
        state.census.report(hello, now_s, doubted=happened.doubted)
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


# What cannot be ----------------------------------------------------------------------------------------------------


def fault_of(peer: PeerId, event: Event, settings: BrainSettings, committed: int) -> str:
    """The first thing in the event that cannot exist, given the number of committed steps; empty if there is none."""
    if isinstance(event, messages.Hello) and event.peer != peer:
        return f"says that it is {event.peer[:TEXT_CHARACTERS_MAX]!r}"
    return next(filter(None, _faults(event, settings, committed)), "")


def _is_of_the_past(event: Event, settings: BrainSettings) -> bool:
    """Whether the event is of an earlier timeline of the job."""
    if isinstance(event, messages.Hello | messages.Loaded | messages.Saved | messages.Hashed):
        return False  # the parts that hear them ask for the timeline
    named = getattr(event, "microbatch", None) or getattr(event, "batch", event)
    return 0 <= getattr(named, "timeline", settings.timeline) < settings.timeline


def _strike(state: BrainState, peer: PeerId, fault: str) -> bool:
    """Count an impossible event of a replica or joiner, and log some of them; whether there were too many."""
    joiner = state.joiners.get(peer)
    whose = joiner if joiner is not None else state.pool[peer]
    whose.nonsense += 1
    if whose.nonsense.bit_count() == 1:  # the first, second, fourth, eighth ... of them
        times = "" if whose.nonsense == 1 else f" ({whose.nonsense} such events so far)"
        state.outbox.note("warning", f"stage server {peer} {fault}: ignored{times}")
    return whose.nonsense >= NONSENSE_MAX


def _faults(event: Event, settings: BrainSettings, committed: int) -> Iterator[str]:
    """The things in the event that do not exist, by the names of its fields; none for events of another job."""
    if getattr(event, "job", settings.job) != settings.job:
        return
    newest = min(settings.steps - 1, committed + settings.staleness)  # a later step was never begun
    if isinstance(event, messages.Hello):
        yield from _hello(event, settings, newest)
        return
    last = len(settings.split) - 1
    ranges = {
        "timeline": (0, settings.timeline),
        "step": (0, newest),
        "stage": (0, last - isinstance(event, messages.Forwarded)),  # the last stage forwards to none
        "version": (0, settings.steps),
        "attempt": (1, ATTEMPTS_MAX),
        "join": (0, JOINS_MAX),
    }
    for name in _NAMES[type(event)]:
        value = getattr(event, name)
        if name in ranges:
            yield _outside(name, value, *ranges[name])
        elif name in _AMOUNTS:
            yield "" if 0.0 <= value < math.inf else f"says that {_AMOUNTS[name].format(value)}"
        elif name == "microbatch":
            yield from _microbatch(value, settings, newest)
        elif name == "batch":
            yield _outside("timeline", value.timeline, 0, settings.timeline)
            yield _outside("version", value.version, 0, settings.steps)
            yield _outside("evaluation microbatch", value.index, 0, settings.evaluation_microbatches - 1)
        elif name == "digests" and len(value) != DIGESTS:
            if isinstance(event, messages.Checked):
                yield "" if event.fault else "does not say what it computed again"
            elif settings.hashes_hops:
                yield "does not say what it took and sent"
        elif name == "unit":
            yield "" if value in settings.units else _unknown_unit(value)
        elif name == "units":
            for size in value:
                yield "" if size.unit in settings.units else _unknown_unit(size.unit)
                yield "" if size.elements > 0 else f"says that unit {size.unit} has {size.elements} elements"
        elif name == "round":
            yield _outside("epoch", value.epoch, 0, settings.epoch)
            yield "" if value.number > 0 else f"names round {value.number}"
        elif name == "norms":
            yield "" if len({norm.name for norm in value}) == len(value) else "reports the norm of a parameter twice"
            yield "reports a negative squared norm" if any(norm.squared_norm < 0.0 for norm in value) else ""


def _hello(hello: messages.Hello, settings: BrainSettings, newest: int) -> Iterator[str]:
    yield _outside("timeline", hello.timeline, 0, settings.timeline)
    yield _outside("attempt", hello.attempt, 0, KNOWN_ATTEMPTS_MAX)
    yield _outside("join", hello.join, 0, JOINS_MAX)
    if hello.timeline != settings.timeline:
        return
    yield _outside("stage", hello.stage, 0, len(settings.split) - 1)
    yield _outside("version", hello.version, 0, settings.steps)
    cells = settings.microbatches * (settings.staleness + 2)
    yield "" if len(hello.cells) <= cells else f"reports {len(hello.cells)} cells, there are {cells} at the most"
    for cell in hello.cells:
        yield _outside("timeline", cell.microbatch.timeline, settings.timeline, settings.timeline)
        yield from _microbatch(cell.microbatch, settings, newest)
        yield _outside("attempt", cell.attempt, 1, KNOWN_ATTEMPTS_MAX)


def _microbatch(microbatch: Microbatch, settings: BrainSettings, newest: int) -> Iterator[str]:
    yield _outside("timeline", microbatch.timeline, 0, settings.timeline)
    yield _outside("step", microbatch.step, 0, newest)
    yield _outside("microbatch", microbatch.index, 0, settings.microbatches - 1)


def _outside(name: str, value: int, low: int, high: int) -> str:
    return "" if low <= value <= high else f"names {name} {value}, which does not exist"


def _unknown_unit(unit: str) -> str:
    return f"names a unit that does not exist: {unit[:TEXT_CHARACTERS_MAX]!r}"
