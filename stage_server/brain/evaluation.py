"""Evaluation batches at one replica: forward only, with weights that are pinned by a version.

    Evaluate ──┐
               ├─▶ both here, weights held ──▶ Compute ──▶ Emit to the next hop, or on the last stage Report
    input ─────┘

A microbatch is repeated as a whole, with a higher attempt at every hop. So an entry belongs to one attempt: a newer one
replaces it, messages of an older one are ignored, and nothing is held once it was sent. The scheduler overwrites no
version that is being evaluated. Only a command makes an entry: an input counts if it comes from the hop before ours on
that command's route, and one that comes before its command (`Taken.early`) is kept elsewhere until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from stage_server.brain.early_inputs import Claim
from swarm.events import Evaluated
from swarm.messages import Evaluate
from swarm.types import EvaluationBatch, Hop, PeerId

VERSIONS_AHEAD_MAX = 2  # how many commits others may be ahead of this replica


@dataclass(frozen=True, slots=True)
class ComputeEvaluation:
    """Compute forward with the weights of its version, without a graph."""

    batch: EvaluationBatch
    attempt: int


@dataclass(frozen=True, slots=True)
class EmitEvaluation:
    """Send the result to the next hop."""

    batch: EvaluationBatch
    attempt: int
    to: Hop


@dataclass(frozen=True, slots=True)
class ReportEvaluation:
    """Tell the scheduler."""

    event: Evaluated


@dataclass(frozen=True, slots=True)
class ForgetEvaluation:
    """Drop input, tokens and targets of the batch, and its order if it was not begun."""

    batch: EvaluationBatch


EvaluationAction: TypeAlias = ComputeEvaluation | EmitEvaluation | ReportEvaluation | ForgetEvaluation


@dataclass(frozen=True, slots=True)
class Taken:
    """The verdict on an input. It counts if `accepted`. It must be refused if there is a `refusal`. If `early`, keep it
    until its command comes, and let it arrive again then. Otherwise it is a repetition."""

    accepted: bool
    refusal: str = ""
    actions: tuple[EvaluationAction, ...] = ()
    early: bool = False


@dataclass(slots=True)
class _Entry:
    attempt: int
    command: Evaluate
    has_input: bool = False
    is_ordered: bool = False
    is_over: bool = False  # computed, or another replica's


class EvaluationTable:
    """All evaluation microbatches at one replica of `stage`; methods give the actions to carry out, in order."""

    def __init__(
        self, stage: int, stages: int, timeline: int, version: int, staleness: int, *, peer: PeerId, incarnation: int
    ) -> None:
        self._stage = stage
        self._stages = stages
        self._timeline = timeline
        self._version = version
        self._staleness = staleness
        self._me = (peer, incarnation)
        self._entries: dict[EvaluationBatch, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def newest_attempt(self) -> int:
        return max((entry.attempt for entry in self._entries.values()), default=0)

    def route(self, command: Evaluate) -> tuple[EvaluationAction, ...]:
        """Take part, or learn that others do now; an older attempt and a version that is gone change nothing."""
        hop = command.hops[self._stage]
        if self._fault(command.batch):
            return ()
        known = self._entries.get(command.batch)
        if known is not None and hop.attempt <= known.attempt:
            return ()
        entry = self._entries[command.batch] = _Entry(hop.attempt, command)
        if (hop.peer, hop.incarnation) != self._me:
            entry.is_over = True
            return (ForgetEvaluation(command.batch),)
        entry.has_input |= self._stage == 0
        return self._advance(command.batch, entry)

    def may_hold(self, version: int) -> bool:
        """Whether this replica still holds the weights of `version`, or will."""
        return version >= self._version - self._staleness

    def wants(self, batch: EvaluationBatch) -> bool:
        """Whether this replica must compute the microbatch and has not."""
        entry = self._entries.get(batch)
        return entry is not None and not entry.is_over

    def arrived(self, batch: EvaluationBatch, claim: Claim) -> Taken:
        """An activation came; `claim` is the sender that its header names."""
        if self._stage == 0:
            return Taken(False, "the first stage takes no evaluation input from a peer")
        if batch.timeline == self._timeline and batch.version < self._version - self._staleness:
            return Taken(False)
        if fault := self._fault(batch):
            return Taken(False, fault)
        entry = self._entries.get(batch)
        if entry is None or claim.attempt > entry.attempt:
            return Taken(False, early=True)
        if claim.attempt < entry.attempt or entry.has_input or entry.is_over:
            return Taken(False)
        named = Claim.of(entry.command.hops[self._stage - 1])
        if claim != named:
            return Taken(False, f"the route of {batch} names {named}, not {claim}")
        entry.has_input = True
        return Taken(True, "", self._advance(batch, entry))

    def begin(self, work: ComputeEvaluation) -> bool:
        """Whether the order is still wanted, to be asked just before it is put on the device."""
        entry = self._entries.get(work.batch)
        return entry is not None and entry.attempt == work.attempt and not entry.is_over

    def computed(self, work: ComputeEvaluation, loss: float) -> tuple[EvaluationAction, ...]:
        """The result is there: send it on, or report the loss; the result of an older attempt is dropped."""
        entry = self._entries.get(work.batch)
        if entry is None or entry.attempt != work.attempt or entry.is_over:
            return ()
        entry.is_over = True
        if self._stage == self._stages - 1:
            report = ReportEvaluation(Evaluated(work.batch, work.attempt, loss))
            return (report, ForgetEvaluation(work.batch))
        emit = EmitEvaluation(work.batch, work.attempt, entry.command.hops[self._stage + 1])
        return (emit, ForgetEvaluation(work.batch))

    def commit(self, version: int) -> tuple[EvaluationAction, ...]:
        """The replica holds `version` now: older evaluations are dropped, early ones may begin."""
        self._version = max(self._version, version)
        gone = [one for one in self._entries if one.version < self._version - self._staleness]
        for batch in gone:
            del self._entries[batch]
        waiting = [action for one, entry in self._entries.items() for action in self._advance(one, entry)]
        return (*map(ForgetEvaluation, gone), *waiting)

    def _fault(self, batch: EvaluationBatch) -> str:
        """Why nothing of this version is taken; empty if it is."""
        ahead = batch.version - self._version
        if batch.timeline == self._timeline and -self._staleness <= ahead <= VERSIONS_AHEAD_MAX:
            return ""
        return (
            f"weights {batch.version} of timeline {batch.timeline} are not evaluated here: "
            f"timeline {self._timeline}, version {self._version}"
        )

    def _advance(self, batch: EvaluationBatch, entry: _Entry) -> tuple[EvaluationAction, ...]:
        if not entry.has_input or entry.is_ordered or entry.is_over:
            return ()
        if not self._version - self._staleness <= batch.version <= self._version:
            return ()
        entry.is_ordered = True
        return (ComputeEvaluation(batch, entry.attempt),)
