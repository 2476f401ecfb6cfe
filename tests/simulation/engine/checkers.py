"""The invariants, judged from the history alone: nothing here asks the system what it thinks happened.

Each checker takes the history and the facts of the job (computed without the system) and says in words what is wrong.
tests/simulation/test_checkers.py doctors histories to prove that each checker can object.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import TypeAlias

import numpy as np
import xxhash

from swarm.types import Direction
from swarm.wire.messages import Average, Averaged, Commit, Committed, LoadStage, Release, Route, Void
from tests.simulation.engine.counting import LENGTH, NUMBERS
from tests.simulation.engine.history import (
    Applied,
    Backwarded,
    Built,
    Commanded,
    Ended,
    EpochTaken,
    Fetched,
    Forwarded,
    Gauge,
    Held,
    History,
    JobIs,
    Kept,
    Logged,
    Record,
    Reported,
    RowStored,
    Started,
    SumsDropped,
    Weighed,
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the job without asking the system."""

    stages: int
    microbatches: int
    steps: int
    tokens: tuple[int, ...]  # per step
    digests: tuple[tuple[str, ...], ...]  # of one process: after step t, per stage
    weights: tuple[str, ...]  # sha256 of all weights after step t
    samples: int  # of the counting data; 0: a real model
    tied: bool
    real: bool


Checker: TypeAlias = Callable[[History, Facts], Iterator[str]]
Replica: TypeAlias = tuple[str, int]


def exactly_once(history: History, facts: Facts) -> Iterator[str]:
    """I1: at every stage the averaged gradient of a committed step counts every microbatch of that step once."""
    if facts.real:
        return  # a real gradient does not count; I4 judges it
    for record, applied in history.of(Applied):
        if applied.skip:
            continue
        for unit, content in applied.means.items():
            mean = np.frombuffer(content, "<f4")
            once = np.float32(1.0 / facts.tokens[applied.step])
            if unit == "tied":
                found = {"uses of the tied weight": mean / once / 2}
            else:
                counts, when = mean[NUMBERS : NUMBERS + facts.microbatches], mean[NUMBERS + facts.microbatches :]
                found = {"microbatches": counts / once, "their steps": when / once / (applied.step + 1)}
            for what, values in found.items():
                if len(values) != facts.microbatches or not np.allclose(values, 1.0, rtol=1e-5):
                    yield f"I1 {_who(record)} step {applied.step} {unit}: {what} counted {np.round(values, 3).tolist()}"
    applied_at: dict[int, set[int]] = defaultdict(set)
    for _, applied in history.of(Applied):
        applied_at[applied.step].add(applied.stage)
    # The row of step t + 2 is written when all have agreed on t: until then a run may end before they apply it.
    for step in [step for step in _rows(history) if step + 2 in _rows(history)]:
        missing = set(range(facts.stages)) - applied_at[step]
        if missing:
            yield f"I1 step {step} was committed two steps ago and never applied at stages {sorted(missing)}"


def one_divisor(history: History, facts: Facts) -> Iterator[str]:
    """I2: the divisor is the token count of the step, in rounds, rows and gradients."""
    for record, commanded in history.of(Commanded):
        command = commanded.command
        if isinstance(command, Average) and command.tokens != facts.tokens[command.step]:
            yield f"I2 {_who(record)} averages step {command.step} over {command.tokens} tokens"
    for _, stored in history.of(RowStored):
        if stored.row.tokens != facts.tokens[stored.row.step]:
            yield f"I2 the row of step {stored.row.step} says {stored.row.tokens} tokens"
    if facts.real:
        return
    for record, applied in history.of(Applied):
        for unit, content in applied.means.items():
            mean = np.frombuffer(content, "<f4")
            values = mean if unit == "tied" else mean[NUMBERS : NUMBERS + facts.microbatches]
            least = np.float32((2.0 if unit == "tied" else 1.0) / facts.tokens[applied.step])
            if any(value != least for value in values if abs(value - least) < least / 2):
                yield f"I2 {_who(record)} step {applied.step} {unit} is not divided by {facts.tokens[applied.step]}"


def parity(history: History, _: Facts) -> Iterator[str]:
    """I3: replicas of a stage hold the same bytes after every commit, and report what they hold."""
    held: dict[tuple[int, int], tuple[str, Record]] = {}
    own: dict[tuple[Replica, int], str] = {}
    for record, what in _both(history, Applied, Committed):
        if isinstance(what, Applied):
            own[(record.process, record.incarnation), what.version] = what.digest
        elif own.get(((record.process, record.incarnation), what.version), what.digest) != what.digest:
            yield f"I3 {_who(record)} reports another digest of version {what.version} than it holds"
        key = (what.stage, what.version)
        digest, first = held.setdefault(key, (what.digest, record))
        if digest != what.digest:
            yield f"I3 version {key[1]} of stage {key[0]} differs: {_who(first)} {digest}, {_who(record)} {what.digest}"


def equality(history: History, facts: Facts) -> Iterator[str]:
    """I4: after every step every replica holds the same bytes as the one-process reference."""
    for record, applied in history.of(Applied):
        expected = facts.digests[applied.step][applied.stage]
        if applied.digest != expected:
            yield f"I4 {_who(record)} after step {applied.step} holds {applied.digest}, one process {expected}"
    for record, begun in _both(history, Built, Fetched):
        assert isinstance(begun, Built | Fetched)
        if begun.version and begun.digest != facts.digests[begun.version - 1][begun.stage]:
            yield f"I4 {_who(record)} begins at version {begun.version} with other bytes than one process"


def data_cursor(history: History, facts: Facts) -> Iterator[str]:
    """I5: (t, m) is always the same sample, that of the plan; committed steps have consumed each of theirs."""
    if not facts.samples:
        return
    seen: dict[int, set[int]] = defaultdict(set)
    for record, forwarded in history.of(Forwarded):
        if forwarded.stage == 0:
            microbatch = forwarded.microbatch
            sample = (microbatch.step * facts.microbatches + microbatch.index) % facts.samples
            if forwarded.source != str([sample] * LENGTH):
                yield f"I5 {_who(record)} computed {microbatch} from {forwarded.source}, its sample is {sample}"
            seen[microbatch.step].add(microbatch.index)
    for step in _rows(history):
        if seen[step] != set(range(facts.microbatches)):
            yield f"I5 step {step} is committed, but only {sorted(seen[step])} of it were computed"


def checkpoints(history: History, facts: Facts) -> Iterator[str]:
    """I6: every checkpoint is whole and belongs to its step, and a job that succeeded has left its last one."""
    kept = [one for _, one in history.of(Kept)]
    for saved in kept:
        if saved.fault:
            yield f"I6 the checkpoint of step {saved.step} does not verify: {saved.fault}"
        elif saved.weights_sha256 != facts.weights[saved.step - 1]:
            yield f"I6 the checkpoint of step {saved.step} has other weights than one process"
    succeeded = any(turned.state == "succeeded" for _, turned in history.of(JobIs))
    if succeeded and facts.steps not in [checkpoint.step for checkpoint in kept]:
        yield "I6 the job succeeded without a checkpoint of its last step"


def replays(history: History, _: Facts) -> Iterator[str]:
    """I4, per tensor: computing a microbatch again at a stage gives the same output bytes for the same input bytes."""
    known: dict[tuple[object, ...], tuple[str, str, Record]] = {}
    for record, what in _both(history, Forwarded, Backwarded):
        key = (type(what).__name__, what.stage, what.microbatch)
        source, output, first = known.setdefault(key, (what.source, what.output, record))
        if (source, output) != (what.source, what.output):
            yield f"I4 {key} is {source} -> {output} at {_who(first)}, {what.source} -> {what.output} at {_who(record)}"


def fencing(history: History, _: Facts) -> Iterator[str]:
    """I7: messages of an older scheduler, incarnation, timeline or round have no effect."""
    newest = 0
    for record in history.records:
        match record.what:
            case EpochTaken(epoch=epoch):
                if epoch <= newest:
                    yield f"I7 epoch {epoch} was taken after {newest}"
                newest = epoch
            case RowStored(epoch=epoch, row=row) if epoch != newest:
                yield f"I7 the row of step {row.step} was stored by epoch {epoch} after {newest} had taken over"
    yield from _fenced_commits(history)
    yield from _fenced_frames(history)


def _fenced_commits(history: History) -> Iterator[str]:
    """Every optimizer step follows a Commit of the newest epoch that its replica had heard of."""
    heard: dict[Replica, int] = {}
    allowed: dict[tuple[Replica, int], dict[str, object]] = {}
    digests: dict[tuple[int, str, object], set[str]] = defaultdict(set)
    rows = {(stored.row.timeline, stored.row.step): stored.row for _, stored in history.of(RowStored)}
    timeline: dict[Replica, int] = {}
    for record in history.records:
        replica = (record.process, record.incarnation)
        match record.what:
            case Commanded(epoch=epoch, command=command):
                if isinstance(command, LoadStage):
                    timeline[replica] = command.timeline
                if epoch >= heard.get(replica, 0) and isinstance(command, Commit):
                    allowed[replica, command.step] = {made.unit: made.round for made in command.rounds}
                heard[replica] = max(heard.get(replica, 0), epoch)
            case Reported(event=Averaged() as averaged):
                digests[averaged.timeline, averaged.unit, averaged.round].add(averaged.digest)
            case Applied() as applied:
                if (replica, applied.step) not in allowed:
                    if applied.version and replica in heard:
                        yield f"I7 {_who(record)} applied step {applied.step} without a Commit of the newest scheduler"
                    continue
                row = rows.get((timeline.get(replica, 0), applied.step))
                for unit, content in applied.means.items():
                    chosen = row.rounds.get(unit) if row is not None else None
                    if allowed[replica, applied.step].get(unit) not in (None, chosen):
                        yield f"I7 {_who(record)} committed step {applied.step} by another round of {unit} than the row"
                    made = digests.get((timeline.get(replica, 0), unit, chosen))
                    if made is not None and made != {xxhash.xxh3_128_hexdigest(content)}:
                        yield f"I7 {_who(record)} applied other bytes in step {applied.step} than {unit}'s round gave"


def _fenced_frames(history: History) -> Iterator[str]:
    """A boundary tensor of an incarnation that has ended may be accepted once, and never changes a sum twice."""
    current: dict[str, int] = {}
    for record in history.records:
        match record.what:
            case Started():
                current[record.process] = record.incarnation
            case Reported() if record.incarnation != current.get(record.process):
                yield f"I7 an event of {_who(record)} was taken from a process that was replaced"


def bounds(history: History, _: Facts) -> Iterator[str]:
    """I8: nothing grows beyond its limit."""
    for record, gauge in history.of(Gauge):
        if gauge.value > gauge.limit:
            yield f"I8 {gauge.name} reached {gauge.value:g} at {record.at_s:.2f} s, its limit is {gauge.limit:g}"


def added_once(history: History, _: Facts) -> Iterator[str]:
    """I9: however often a tensor arrives, a replica adds each microbatch once, unless a Void came in between."""
    added: dict[tuple[Replica, int], set[int]] = defaultdict(set)
    for record in history.records:
        replica = (record.process, record.incarnation)
        match record.what:
            case Built() | Commanded(command=LoadStage()):
                for key in [key for key in added if key[0] == replica]:
                    del added[key]
            case SumsDropped(step=step):
                added[replica, step] = set()
            case Backwarded(added=True, microbatch=microbatch) | Weighed(added=True, microbatch=microbatch):
                if microbatch.index in added[replica, microbatch.step]:
                    yield f"I9 {_who(record)} added {microbatch} twice"
                added[replica, microbatch.step].add(microbatch.index)


def steps_in_order(history: History, _: Facts) -> Iterator[str]:
    """I10: rows are written in order, each once, and every replica applies the steps in order."""
    expected: dict[tuple[str, int], int] = {}
    for _, stored in history.of(RowStored):
        key, step = (stored.job, stored.row.timeline), stored.row.step
        if not stored.told and step == expected.get(key, step) - 1:
            continue  # written again after an unknown outcome
        if step == expected.get(key, -2) - 1:
            continue
        earlier = [after for (job, timeline), after in expected.items() if job == key[0] and timeline < key[1]]
        if key not in expected and step > max(earlier, default=step):
            yield f"I10 timeline {key[1]} begins at step {step}, only {max(earlier)} were committed"
        if step != expected.setdefault(key, step):
            yield f"I10 the row of step {step} follows that of step {expected[key] - 1}"
        expected[key] = step + 1
    versions: dict[Replica, int] = {}
    for record, what in _both(history, Built | Fetched, Applied):
        replica = (record.process, record.incarnation)
        if isinstance(what, Applied) and what.version != versions.get(replica, what.version - 1) + 1:
            yield f"I10 {_who(record)} went from version {versions[replica]} to {what.version}"
        versions[replica] = what.version


def held_until_commit(history: History, _: Facts) -> Iterator[str]:
    """I12: a held output is held until the commit of its step, a Void, or another route."""
    held: dict[Replica, frozenset[tuple[int, int, str]]] = defaultdict(frozenset)
    committed: dict[Replica, int] = defaultdict(lambda: -1)  # newest step whose Commit came
    let_go: dict[Replica, set[tuple[int, int, str]]] = defaultdict(set)  # of later steps
    routed: dict[Replica, set[tuple[int, int]]] = defaultdict(set)  # what a replica may be at work on now: it
    # carries a Void or a Route out only when that is done, and what it did last is then held for a moment
    for record in history.records:
        replica = (record.process, record.incarnation)
        match record.what:
            case Held(outputs=outputs):
                gone = held[replica] - outputs
                missing = [output for output in gone - let_go[replica] if output[0] > committed[replica]]
                if missing:
                    yield f"I12 {_who(record)} no longer holds {sorted(missing)}"
                held[replica] = outputs
                let_go[replica] -= gone
            case Commanded(command=Commit(step=step)):
                committed[replica] = max(committed[replica], step)
            case Commanded(command=Void(step=step)):
                let_go[replica] |= {
                    (*key, side.value) for key in routed[replica] if key[0] == step for side in Direction
                }
            case Commanded(command=Route() as route):
                key = (route.microbatch.step, route.microbatch.index)
                if any(hop.peer == record.process for hop in route.hops):
                    routed[replica].add(key)
                else:
                    let_go[replica] |= {(*key, side.value) for side in Direction}
            case Commanded(command=LoadStage() | Release()) | Ended():
                let_go[replica] |= held[replica]
                routed.pop(replica, None)
                committed.pop(replica, None)


def no_surprise(history: History, _: Facts) -> Iterator[str]:
    """No process ends by itself, nothing logs a traceback."""
    for record, ended in history.of(Ended):
        if ended.unexpected:
            yield f"{_who(record)} ended by itself: {ended.cause}"
    for record, logged in history.of(Logged):
        yield f"{_who(record)} logged a traceback: {logged.text}"


CHECKERS: tuple[Checker, ...] = (
    exactly_once,
    one_divisor,
    parity,
    equality,
    data_cursor,
    checkpoints,
    replays,
    fencing,
    bounds,
    added_once,
    steps_in_order,
    held_until_commit,
    no_surprise,
)

OBJECTIONS_MAX = 5  # per checker: one fault shows in many places


def judge(history: History, facts: Facts) -> list[str]:
    """Everything that any checker objects to."""
    return [
        objection
        for checker in CHECKERS
        for _, objection in zip(range(OBJECTIONS_MAX), checker(history, facts), strict=False)
    ]


def _rows(history: History) -> list[int]:
    return sorted({stored.row.step for _, stored in history.of(RowStored)})


def _both(history: History, one: type | UnionType, other: type) -> Iterator[tuple[Record, object]]:
    for record in history.records:
        what = record.what.event if isinstance(record.what, Reported) else record.what
        if isinstance(what, one | other):
            yield record, what


def _who(record: Record) -> str:
    return f"{record.at_s:.3f} s {record.process}.{record.incarnation}"
