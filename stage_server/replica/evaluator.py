"""Evaluation microbatches on this stage server: carries out what `brain/evaluation.py` decides.

Orders wait here, sorted by version and batch, until no training computation waits for the device.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass
from typing import assert_never

from torch import Tensor

from stage_server.brain import evaluation
from stage_server.brain.early_inputs import Claim, EarlyInputs
from stage_server.ports import Assignment, ReplicaPorts
from stage_server.replica.deliveries import Deliveries
from stage_server.replica.packing import Packed, evaluation_boundary, pack
from swarm.errors import RetryElsewhere, StaleMessage, SwarmError
from swarm.messages import Evaluate
from swarm.model import codec
from swarm.model.runtime import received
from swarm.model.stage import Stage
from swarm.peer_messages import EvaluationBoundary
from swarm.types import EvaluationBatch


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids (first stage) and targets (last stage) of a batch, int64 [B, T]."""

    tokens: Tensor | None
    targets: Tensor | None


class Evaluator:
    """The evaluation side of one replica; `ready` wakes the compute loop."""

    def __init__(
        self,
        assignment: Assignment,
        version: int,
        stage: Stage,
        deliveries: Deliveries,
        ports: ReplicaPorts,
        ready: asyncio.Event,
    ) -> None:
        command, spec, me = assignment.command, assignment.spec, assignment.me
        self._table = evaluation.EvaluationTable(
            me.stage,
            assignment.stages,
            command.timeline,
            version,
            spec.pipeline.staleness,
            peer=me.peer,
            incarnation=me.incarnation,
        )
        self._me = me
        self._stage = stage
        self._codec = spec.unmeasured_compression
        self._deliveries = deliveries
        self._ports = ports
        self._ready = ready
        self._ids: dict[EvaluationBatch, Ids] = {}
        self._inputs: dict[EvaluationBatch, codec.Arrived] = {}
        self._early = EarlyInputs[EvaluationBatch, tuple[EvaluationBoundary, memoryview]](lambda batch: batch)
        self._orders: list[
            tuple[EvaluationBatch, int, evaluation.ComputeEvaluation]
        ] = []  # a heap; may hold withdrawn ones

    def newest_attempt(self) -> int:
        return self._table.newest_attempt()

    def route(self, command: Evaluate, ids: Ids) -> None:
        batch = command.batch
        actions = self._table.route(command)
        if self._table.wants(batch):
            self._ids.setdefault(batch, ids)
        self._carry_out(actions)
        if self._me.stage > 0:
            sender = Claim.of(command.hops[self._me.stage - 1])
            early = self._early.take(batch, sender)
            self._early.drop(lambda subject, claim: subject == batch and claim.attempt <= sender.attempt)
            if early is not None:
                try:
                    self.receive(*early)
                except SwarmError as error:
                    self._ports.log.warning("early input dropped", batch=str(batch), reason=error.message)

    def receive(self, header: EvaluationBoundary, payload: memoryview) -> None:
        """Take in an activation that was admitted; StaleMessage if it belongs to no evaluation here."""
        batch = header.batch
        claim = Claim(header.sender, header.incarnation, header.attempt)
        taken = self._table.arrived(batch, claim)
        if taken.refusal:
            raise StaleMessage(taken.refusal)
        if taken.early:
            known = self._deliveries.knows(header.sender, header.incarnation)
            if not self._early.put(batch, claim, (header, payload), payload.nbytes, is_known=known):
                raise RetryElsewhere(f"{len(self._early)} inputs of evaluations wait for their commands already")
        if taken.accepted:
            device = self._ports.device.name
            self._inputs[batch] = codec.arrived(payload, header.dtype, header.shape, header.codec, device)
        self._carry_out(taken.actions)

    def commit(self, version: int) -> None:
        """The replica holds `version`; its optimizer step is queued on the device already."""
        self._carry_out(self._table.commit(version))
        self._early.drop(lambda batch, _: not self._table.may_hold(batch.version))

    def take(self) -> evaluation.ComputeEvaluation | None:
        """The next order that is still wanted; None if there is none."""
        while self._orders:
            _, _, work = heapq.heappop(self._orders)
            if self._table.begin(work):
                return work
        return None

    async def compute(self, work: evaluation.ComputeEvaluation) -> None:
        """Carry out an order that `take` has just given."""
        batch = work.batch
        arrived, ids = self._inputs.pop(batch, None), self._ids.get(batch, Ids(None, None))

        def forward() -> tuple[Packed | None, float]:
            x = None if arrived is None else received(arrived.ahead())
            y, loss = self._stage.evaluate(batch.version, x=x, tokens=ids.tokens, targets=ids.targets)
            return (None if y is None else pack(y, self._codec)), loss

        done = await self._ports.device.timed(forward)
        packed, loss = done.result
        self._ports.metrics.device_busy(done.seconds)
        self._carry_out(self._table.computed(work, loss), packed)

    def _carry_out(self, actions: tuple[evaluation.EvaluationAction, ...], result: Packed | None = None) -> None:
        for action in actions:
            match action:
                case evaluation.ComputeEvaluation():
                    heapq.heappush(self._orders, (action.batch, action.attempt, action))
                    self._ready.set()
                case evaluation.EmitEvaluation():
                    assert result is not None, "all stages but the last have a result to send"
                    self._send(action, result)
                case evaluation.ReportEvaluation(event=event):
                    self._ports.emit(event)
                case evaluation.ForgetEvaluation(batch=batch):
                    self._inputs.pop(batch, None)
                    self._ids.pop(batch, None)
                case _:
                    assert_never(action)

    def _send(self, emit: evaluation.EmitEvaluation, packed: Packed) -> None:
        letter = evaluation_boundary(self._me, emit.batch, emit.attempt, packed)
        self._deliveries.send(emit.to, emit.batch, lambda: letter, lambda: self._table.may_hold(emit.batch.version))
