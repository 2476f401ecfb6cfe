"""Events that no healthy replica sends: they name a step, stage, microbatch, unit or attempt that does not exist.

Such an event is counted and sometimes logged, but changes nothing else. A replica that keeps sending them is expelled
if its stage has another one, since nothing else it says can be believed either. An event that is only late is no fault:
events of an earlier timeline are ignored, events of earlier steps and rounds are left to the parts that know them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import assert_never

from scheduler.brain.settings import BrainSettings
from scheduler.brain.state.brain_state import BrainState
from swarm.types import Microbatch, PeerId
from swarm.wire import messages
from swarm.wire.messages import Event

ATTEMPTS_MAX = (1 << 32) - 1  # of a hop: on the wire they have 32 bits
KNOWN_ATTEMPTS_MAX = ATTEMPTS_MAX - (1 << 20)  # of a Hello: new hops carry greater ones
JOINS_MAX = 1 << 32
NONSENSE_MAX = 8  # events of one replica, then it is expelled
DIGESTS = 4  # of a hop: x, y, g, dx
TEXT_CHARACTERS_MAX = 64  # of what is shown of a name


def is_of_the_past(event: Event, settings: BrainSettings) -> bool:
    """Whether the event is of an earlier timeline of the job."""
    match event:
        case messages.Accumulated() | messages.Forwarded() | messages.Undelivered() | messages.Checked():
            return 0 <= event.microbatch.timeline < settings.timeline
        case messages.Evaluated() | messages.EvaluationUndelivered():
            return 0 <= event.batch.timeline < settings.timeline
        case (
            messages.Averaged()
            | messages.RoundFailed()
            | messages.Rechecked()
            | messages.Recounted()
            | messages.Committed()
        ):
            return 0 <= event.timeline < settings.timeline
        case messages.Hello() | messages.Loaded() | messages.Saved() | messages.Hashed():
            return False  # whoever hears them asks for the timeline
        case messages.Heartbeat() | messages.Logged() | messages.Failed() | messages.Leaving():
            return False
        case _:
            assert_never(event)


def fault_of(peer: PeerId, event: Event, settings: BrainSettings, committed: int) -> str:
    """The first thing in the event that cannot exist, given the number of committed steps; empty if there is none."""
    if isinstance(event, messages.Hello) and event.peer != peer:
        return f"says that it is {event.peer[:TEXT_CHARACTERS_MAX]!r}"
    return next(filter(None, _faults(event, settings, committed)), "")


def strike(state: BrainState, peer: PeerId, fault: str) -> bool:
    """Count an impossible event of a replica or joiner, and log some of them; whether there were too many."""
    joiner = state.joiners.get(peer)
    whose = joiner if joiner is not None else state.pool[peer]
    whose.nonsense += 1
    if whose.nonsense.bit_count() == 1:  # the first, second, fourth, eighth ... of them
        times = "" if whose.nonsense == 1 else f" ({whose.nonsense} such events so far)"
        state.outbox.note("warning", f"stage server {peer} {fault}: ignored{times}")
    return whose.nonsense >= NONSENSE_MAX


def _faults(event: Event, settings: BrainSettings, committed: int) -> Iterator[str]:
    """The things in the event that do not exist; none for events of another job, and for events that name nothing."""
    newest = min(settings.steps - 1, committed + settings.staleness)  # a later step was never begun
    last = len(settings.split) - 1
    match event:
        case messages.Accumulated() | messages.Forwarded() | messages.Undelivered():
            yield from _microbatch(event.microbatch, settings, newest)
            to = last - 1 if isinstance(event, messages.Forwarded) else last  # the last stage forwards to none
            yield _outside("stage", event.stage, 0, to)
            yield _outside("attempt", event.attempt, 1, ATTEMPTS_MAX)
            if isinstance(event, messages.Accumulated):
                if settings.hashes_hops and len(event.digests) != DIGESTS:
                    yield "does not say what it took and sent"
                for seconds in (event.forward_s, event.backward_s, event.wait_s):
                    yield "" if 0.0 <= seconds < math.inf else f"says that a microbatch took {seconds} s"
        case messages.Checked():
            yield from _microbatch(event.microbatch, settings, newest)
            yield _outside("stage", event.stage, 0, last)
            yield "" if event.fault or len(event.digests) == DIGESTS else "does not say what it computed again"
        case messages.Recounted():
            yield _outside("timeline", event.timeline, settings.timeline, settings.timeline)
            yield _outside("step", event.step, 0, newest)
        case messages.Evaluated() | messages.EvaluationUndelivered():
            yield _outside("timeline", event.batch.timeline, 0, settings.timeline)
            yield _outside("version", event.batch.version, 0, settings.steps)
            yield _outside("evaluation microbatch", event.batch.index, 0, settings.evaluation_microbatches - 1)
            if isinstance(event, messages.EvaluationUndelivered):
                yield _outside("stage", event.stage, 0, last)
            yield _outside("attempt", event.attempt, 1, ATTEMPTS_MAX)
        case messages.Averaged() | messages.RoundFailed() | messages.Rechecked():
            yield _outside("timeline", event.timeline, settings.timeline, settings.timeline)
            yield _outside("step", event.step, 0, newest)
            yield "" if event.unit in settings.units else _unknown_unit(event.unit)
            yield _outside("epoch", event.round.epoch, 0, settings.epoch)
            yield "" if event.round.number > 0 else f"names round {event.round.number}"
            if isinstance(event, messages.Averaged):
                names = [norm.name for norm in event.norms]
                yield "" if len(set(names)) == len(names) else "reports the norm of a parameter twice"
                if any(norm.squared_norm < 0.0 for norm in event.norms):
                    yield "reports a negative squared norm"
                for rate in (event.up_bytes_per_s, event.down_bytes_per_s):
                    yield "" if 0.0 <= rate < math.inf else f"says that its links carry {rate} bytes per second"
                yield "" if 0.0 <= event.duration_s < math.inf else f"says that a round took {event.duration_s} s"
        case messages.Committed():
            yield _outside("timeline", event.timeline, settings.timeline, settings.timeline)
            yield _outside("step", event.step, 0, newest)
            yield _outside("version", event.version, 0, settings.steps)
            yield _outside("stage", event.stage, 0, last)
        case messages.Loaded() | messages.Saved() | messages.Hashed():
            if event.job != settings.job:
                return
            yield _outside("timeline", event.timeline, 0, settings.timeline)
            yield _outside("stage", event.stage, 0, last)
            yield _outside("version", event.version, 0, settings.steps)
            if isinstance(event, messages.Loaded):
                yield _outside("join", event.join, 0, JOINS_MAX)
                for size in event.units:
                    yield "" if size.unit in settings.units else _unknown_unit(size.unit)
                    yield "" if size.elements > 0 else f"says that unit {size.unit} has {size.elements} elements"
        case messages.Hello():
            if event.job == settings.job:
                yield from _hello(event, settings, newest)
        case messages.Heartbeat() | messages.Logged() | messages.Failed() | messages.Leaving():
            pass  # they name nothing
        case _:
            assert_never(event)


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
