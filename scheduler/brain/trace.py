"""The trace of a step: notes the inputs and decisions of a job's brain in the newest steps, and makes spans of them.

    route ─▶ forward ─▶ boundary ─▶ forward ... backward ─▶ boundary ─▶ backward ─▶ average ─▶ row ─▶ commit

All times are by the scheduler's clock, when it heard or decided something; the duration of a computation is the
replica's own measurement. So a forward ends when its report came, or earlier if the next stage had begun by then, and
its beginning follows from its duration. The boundary lies between the end of one stage's turn and the beginning of the
next: the tensor's way, and its wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from scheduler.brain.inputs import Happened, Input, RowDurable, RowsDurable
from scheduler.brain.outputs import Output, Send, WriteCommit, WriteRows
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Accumulated, Averaged, Commit, Committed, Forwarded, Route

STEPS_KEPT = 16
HOPS_MAX = 2048  # that are kept of a step: of a large one every second microbatch, or every fourth, ...
AVERAGES_MAX = 4096  # that are kept of a step; of more, the first
SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True)
class TracedSpan:
    """A stretch of time, by the job's clock.

    `stage` and `index` are -1 where they do not apply. Spans of one `track` do not overlap, but for those `beside` it.
    """

    name: str
    track: str
    begin_s: float
    end_s: float
    stage: int = -1
    index: int = -1
    attempt: int = 0
    beside: bool = False


@dataclass(slots=True)
class _TracedHop:
    """One replica's turn in a microbatch, as far as it is known."""

    peer: PeerId
    forwarded_s: float | None = None
    done_s: float | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def forward(self) -> tuple[float, float] | None:
        """The last stage does not report its forward: its backward follows at once."""
        if self.done_s is None:
            return None
        end_s = self.forwarded_s if self.forwarded_s is not None else self.done_s - self.backward_s
        return end_s - self.forward_s, end_s

    @property
    def backward(self) -> tuple[float, float] | None:
        return None if self.done_s is None else (self.done_s - self.backward_s, self.done_s)


@dataclass(slots=True)
class _Way:
    """The newest route of a microbatch."""

    routed_s: float
    attempt: int
    hops: list[_TracedHop]


@dataclass(slots=True)
class StepRecord:
    """The noted times of one step."""

    ways: dict[tuple[int, int], _Way] = field(default_factory=dict)  # by timeline and index
    averaged: dict[tuple[PeerId, UnitName, Round], tuple[float, float]] = field(default_factory=dict)  # begin, end
    decided_s: float | None = None
    durable_s: float | None = None
    told: dict[PeerId, float] = field(default_factory=dict)  # when the commit went to each replica
    # Its stage, and when it had applied the step and made the digest.
    committed: dict[PeerId, tuple[int, float]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return bool(self.told) and self.told.keys() <= self.committed.keys()


class Trace:
    """The newest steps of one job, or of all its islands."""

    def __init__(self) -> None:
        self.every = 1  # microbatches whose index it divides are kept
        self._steps: dict[int, StepRecord] = {}

    def watching(self, decide: Callable[[Input, float], list[Output]]) -> Callable[[Input, float], list[Output]]:
        """The same door of a brain, with all inputs and decisions noted."""

        def watched(happened: Input, now_s: float) -> list[Output]:
            if type(happened) is Happened:
                self._heard(happened, now_s)
            decided = decide(happened, now_s)
            if type(happened) in (RowDurable, RowsDurable):
                self._durable(now_s)
            if decided:
                self._decided(decided, now_s)
            return decided

        return watched

    def newest(self) -> int | None:
        """The newest step that all replicas have applied; None if there is none yet."""
        return max((step for step, record in self._steps.items() if record.is_complete), default=None)

    def steps(self) -> list[int]:
        """The steps with records, oldest first."""
        return sorted(self._steps)

    def spans(self, step: int) -> list[TracedSpan]:
        """The spans of a step in order of their begin; none if it is not known."""
        record = self._steps.get(step)
        found = [] if record is None else _one_after_the_other(_spans(record))
        return sorted(found, key=lambda span: (span.begin_s, span.track))

    # Noting ------------------------------------------------------------------------------------------------------

    def _heard(self, happened: Happened, now_s: float) -> None:
        match happened.event:
            case Accumulated() as event:
                if (hop := self._hop(event, happened.peer)) is not None:
                    hop.done_s, hop.forward_s, hop.backward_s = now_s, event.forward_s, event.backward_s
            case Forwarded() as event:
                if (hop := self._hop(event, happened.peer)) is not None:
                    hop.forwarded_s = now_s
            case Averaged() as event:
                record = self._steps.get(event.step)
                if record is not None and len(record.averaged) < AVERAGES_MAX:
                    key = happened.peer, event.unit, event.round
                    record.averaged.setdefault(key, (now_s - event.duration_s, now_s))
            case Committed() as event:
                if (record := self._steps.get(event.step)) is not None:
                    record.committed[happened.peer] = event.stage, now_s

    def _hop(self, event: Accumulated | Forwarded, peer: PeerId) -> _TracedHop | None:
        """The hop that an event reports on, if it is kept and still on the microbatch's route."""
        microbatch = event.microbatch
        record = self._steps.get(microbatch.step)
        way = None if record is None else record.ways.get((microbatch.timeline, microbatch.index))
        if way is None or not 0 <= event.stage < len(way.hops) or way.hops[event.stage].peer != peer:
            return None
        return way.hops[event.stage]

    def _decided(self, decided: Sequence[Output], now_s: float) -> None:
        for output in decided:
            if type(output) is Send:
                command = output.command
                if type(command) is Route:
                    if output.peer == command.hops[0].peer and not command.microbatch.index % self.every:
                        self._routed(command, now_s)
                elif type(command) is Commit and (record := self._steps.get(command.step)) is not None:
                    record.told.setdefault(output.peer, now_s)
            elif type(output) is WriteCommit:
                self._record(output.row.step).decided_s = now_s
            elif type(output) is WriteRows:
                for row in output.rows:
                    self._record(row.step).decided_s = now_s

    def _routed(self, route: Route, now_s: float) -> None:
        microbatch = route.microbatch
        record, key = self._record(microbatch.step), (microbatch.timeline, microbatch.index)
        ways = record.ways
        before = ways.get(key)
        hops = [_TracedHop(hop.peer) for hop in route.hops]
        if before is not None:  # what a replica has done already stays done
            hops = [old if old.peer == new.peer else new for old, new in zip(before.hops, hops, strict=True)]
        routed_s = now_s if before is None else before.routed_s
        ways[key] = _Way(routed_s, max(hop.attempt for hop in route.hops), hops)
        if len(ways) * len(hops) > HOPS_MAX:
            self.every *= 2
            record.ways = {key: way for key, way in ways.items() if not key[1] % self.every}

    def _durable(self, now_s: float) -> None:
        for record in self._steps.values():
            if record.decided_s is not None and record.durable_s is None:
                record.durable_s = now_s

    def _record(self, step: int) -> StepRecord:
        record = self._steps.get(step)
        if record is None:
            record = self._steps[step] = StepRecord()
            while len(self._steps) > STEPS_KEPT:
                del self._steps[min(self._steps)]
        return record


def _spans(record: StepRecord) -> Iterable[TracedSpan]:
    stage_of: dict[str, int] = {peer: stage for peer, (stage, _) in record.committed.items()}
    for (_, index), way in record.ways.items():
        stage_of |= {hop.peer: stage for stage, hop in enumerate(way.hops)}
        yield from _of_microbatch(index, way)
    for (peer, unit, _), (begin_s, end_s) in record.averaged.items():
        yield TracedSpan(f"average {unit}", peer, begin_s, end_s, stage_of.get(peer, -1), beside=True)
    if record.decided_s is not None and record.durable_s is not None:
        yield TracedSpan("row", SCHEDULER, record.decided_s, record.durable_s)
    for peer, (stage, end_s) in record.committed.items():
        yield TracedSpan("commit", peer, record.told.get(peer, end_s), end_s, stage, beside=True)


def _one_after_the_other(spans: Iterable[TracedSpan]) -> Iterable[TracedSpan]:
    """The same, where a report that was long on its way no longer pushes a computation into the next one."""
    ended_s: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.end_s):
        if span.beside or span.track == SCHEDULER:
            yield span
        else:
            begin_s = max(span.begin_s, ended_s.get(span.track, span.begin_s))
            ended_s[span.track] = span.end_s
            yield replace(span, begin_s=begin_s)


def _of_microbatch(index: int, way: _Way) -> Iterable[TracedSpan]:
    """The way down and back. A report may be late, never early: no span ends after the one that waits for it begins."""
    yield TracedSpan("route", SCHEDULER, way.routed_s, way.routed_s, index=index, attempt=way.attempt)
    turns = [("forward", stage, hop, hop.forward) for stage, hop in enumerate(way.hops)]
    turns += [("backward", stage, hop, hop.backward) for stage, hop in reversed(list(enumerate(way.hops)))]
    next_s, after = inf, ""
    for name, stage, hop, turn in reversed(turns):
        if turn is None:
            continue
        end_s = min(turn[1], next_s)
        begin_s = end_s - (turn[1] - turn[0])
        yield TracedSpan(name, hop.peer, begin_s, end_s, stage, index, way.attempt)
        if after not in ("", hop.peer) and next_s > end_s:
            beside = 1 if name == "forward" else -1
            yield TracedSpan(f"boundary {name}", after, end_s, next_s, stage + beside, index, beside=True)
        next_s, after = begin_s, hop.peer
