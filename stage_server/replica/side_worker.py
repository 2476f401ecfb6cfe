"""Computes the checks and evaluations of one replica, as `brain/side_work.py` decides, while no training waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from stage_server.brain.cell import CellTable
from stage_server.brain.commitments import digest_of
from stage_server.brain.neighbours import Claim, EarlyInputs
from stage_server.brain.side_work import SideWork, Task, Timing
from stage_server.ports import Assignment, ReplicaPorts
from stage_server.replica.deliveries import Deliveries
from stage_server.replica.packing import Packed, evaluation_boundary, pack, pack_encoded, question
from swarm.errors import RetryElsewhere, SwarmError
from swarm.model import codec
from swarm.model.runtime import received
from swarm.model.stage import Stage, Sums
from swarm.model.state import raw_bytes
from swarm.types import Direction, EvaluationBatch, Microbatch
from swarm.wire.messages import (
    Boundary,
    Check,
    Checked,
    Evaluate,
    Evaluated,
    EvaluationBoundary,
    Recount,
    Recounted,
    Route,
)

Early: TypeAlias = EarlyInputs[tuple[Microbatch, str], tuple[Boundary, memoryview]]


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids (first stage) and targets (last stage) of a microbatch, int64 [B, T]; None at other stages."""

    tokens: Tensor | None
    targets: Tensor | None

    @classmethod
    def of(cls, command: Route | Evaluate | Check, sequence_length: int) -> Ids:
        """The ids in a command, which has them as int32 in little-endian order."""

        def read(raw: bytes) -> Tensor | None:
            ids = np.frombuffer(raw, dtype="<i4").astype(np.int64)
            return torch.from_numpy(ids).view(-1, sequence_length) if raw else None

        return cls(read(command.tokens), read(command.targets))


@dataclass(frozen=True, slots=True)
class _Input:
    arrived: codec.Arrived | None
    digest: str  # for a check

    def tensor(self) -> Tensor | None:
        """The input on the device, from the compute thread."""
        return None if self.arrived is None else received(self.arrived.ahead())


_NONE = _Input(None, "")  # at an end of the pipeline


@dataclass(slots=True)
class _Recounting:
    """A sum that is computed once more, and the microbatches that are not in it."""

    command: Recount
    missing: set[int]
    sums: Sums = field(default_factory=dict)

    def wants(self, check: Check) -> bool:
        return check.number == self.command.number and check.microbatch.index in self.missing


class SideWorker:
    """The side work of one replica; `ready` wakes the compute loop, `worked` hears the seconds of the device."""

    def __init__(
        self,
        assignment: Assignment,
        stage: Stage,
        cells: CellTable,
        deliveries: Deliveries,
        ports: ReplicaPorts,
        ready: asyncio.Event,
        worked: Callable[[float], None],
    ) -> None:
        self._me, self._course = assignment.me, assignment.course
        self.table = SideWork[_Input](cells, self._me.peer, self._me.incarnation)
        self._stage = stage
        self._length, self._codec = assignment.spec.data.sequence_length, assignment.spec.unmeasured_compression
        self._deliveries = deliveries
        self._ports = ports
        self._ready, self._worked = ready, worked
        self._early = EarlyInputs[EvaluationBatch, tuple[EvaluationBoundary, memoryview]](lambda batch: batch)
        self._recounts: dict[int, _Recounting] = {}  # by step

    # Commands ----------------------------------------------------------------------------------------------------

    def check(self, command: Check, early: Early) -> None:
        """Take a check on, with the inputs that came before it."""
        if self.table.take(command):
            for direction, of in self.table.lacking(command).items():
                if (came := early.take((command.microbatch, direction), Claim.of(of))) is not None:
                    self.receive(*came)
            self._ready.set()

    def recount(self, command: Recount) -> None:
        """Add up what the Checks of the same number bring; a newer request takes the place of an older one."""
        self._recounts[command.step] = _Recounting(command, set(command.indexes))

    def evaluate(self, command: Evaluate) -> None:
        """Take part in an evaluation, with the input that came before its command."""
        batch = command.batch
        if self.table.take(command):
            self._ready.set()
        if self._me.stage == 0:
            return
        sender = Claim.of(command.hops[self._me.stage - 1])
        early = self._early.take(batch, sender)
        self._early.drop(lambda subject, claim: subject == batch and claim.attempt <= sender.attempt)
        if early is not None:
            try:
                self.receive_evaluation(*early)
            except SwarmError as error:
                self._ports.log.warning("early input dropped", batch=str(batch), reason=error.message)

    def forget(self, is_over: Callable[[Microbatch], bool]) -> None:
        """The cells make checks and loans of such microbatches void."""
        self.table.forget(is_over)
        for step, recounting in list(self._recounts.items()):
            command = recounting.command
            if is_over(Microbatch(command.timeline, step, min(command.indexes, default=0))):
                del self._recounts[step]

    def commit(self, step: int) -> None:
        """The cells have committed a step; its optimizer step is queued on the device already."""
        self.forget(lambda microbatch: microbatch.step <= step)
        self.table.commit(step)
        self._early.drop(lambda batch, _: not self.table.may_hold(batch.version))
        self._ready.set()  # work may have waited for these weights

    # Inputs ------------------------------------------------------------------------------------------------------

    def receive(self, header: Boundary, payload: memoryview) -> bool:
        """Take in a tensor that a check waits for; False if none does."""
        microbatch, direction = header.microbatch, header.direction
        is_wanted = self.table.wants(microbatch, direction, header.sender, header.incarnation)
        if is_wanted:
            self.table.arrived(microbatch, direction, self._input(header, payload, digest_of(payload)))
            self._ready.set()
        return is_wanted

    def receive_evaluation(self, header: EvaluationBoundary, payload: memoryview) -> None:
        """Take in an activation that was admitted; StaleMessage if it belongs to no evaluation here."""
        batch = header.batch
        claim = Claim(header.sender, header.incarnation, header.attempt)
        arrival = self.table.judge(batch, claim)
        if arrival is Timing.EARLY:
            known = self._deliveries.knows(header.sender, header.incarnation)
            if not self._early.put(batch, claim, (header, payload), payload.nbytes, is_known=known):
                raise RetryElsewhere(f"{len(self._early)} inputs of evaluations wait for their commands already")
        elif arrival is Timing.WANTED:
            self.table.arrived(batch, Direction.FORWARD, self._input(header, payload, ""))
            self._ready.set()

    def ask_again(self) -> None:
        """Ask for the inputs of checks that did not come by themselves."""
        for command, direction, of in self.table.overdue():
            letter = question(self._me, command.microbatch, direction, command.hops[command.stage].attempt)
            self._deliveries.send(
                of,
                ("check", command.microbatch, direction),
                lambda letter=letter: letter,  # type: ignore[misc]
                lambda command=command: bool(self.table.lacking(command)),  # type: ignore[misc]
            )

    def _input(self, header: Boundary | EvaluationBoundary, payload: memoryview, digest: str) -> _Input:
        device = self._ports.device.name
        return _Input(codec.arrived(payload, header.dtype, header.shape, header.codec, device), digest)

    # Computing ---------------------------------------------------------------------------------------------------

    async def compute_next(self) -> bool:
        """Carry out what is ready, and send or report the result; False if nothing is."""
        task = self.table.next()
        match None if task is None else task.command:
            case Check() as command:
                assert task is not None
                await self._check(command, *(task.inputs.get(side, _NONE) for side in Direction))
            case Evaluate() as command:
                assert task is not None
                await self._evaluate(task, command)
        return task is not None

    async def _evaluate(self, task: Task[_Input], command: Evaluate) -> None:
        batch, ids = command.batch, Ids.of(command, self._length)
        x = task.inputs.get(Direction.FORWARD, _NONE)

        def forward() -> tuple[Packed | None, float]:
            y, loss = self._stage.evaluate(batch.version, x=x.tensor(), tokens=ids.tokens, targets=ids.targets)
            return (None if y is None else pack(y, self._codec)), loss

        done = await self._ports.device.timed(forward)
        packed, loss = done.result
        self._worked(done.seconds)
        if not self.table.is_current(task):
            return
        if packed is None:
            self._ports.emit(Evaluated(batch, task.number, loss))
            return
        letter = evaluation_boundary(self._me, batch, task.number, packed)
        to = command.hops[self._me.stage + 1]
        self._deliveries.send(to, batch, lambda: letter, lambda: self.table.may_hold(batch.version))

    async def _check(self, command: Check, x: _Input, g: _Input) -> None:
        microbatch, ids = command.microbatch, Ids.of(command, self._length)
        portion, shape, name = self._course.at(microbatch.step).portion, self._stage.boundary_shape(), self._codec
        recounting = self._recounts.get(microbatch.step)
        if recounting is not None and not recounting.wants(command):
            recounting = None

        def again() -> tuple[Packed | None, Packed | None, float, bool]:
            y, loss, dx, finite = self._stage.recompute(
                microbatch,
                command.version,
                portion=portion,
                x=x.tensor(),
                g=g.tensor(),
                tokens=ids.tokens,
                targets=ids.targets,
                encode=lambda dx: codec.encode_there(dx, name),
                into=None if recounting is None else recounting.sums,
            )
            packed = None if y is None else pack(y, name)
            return packed, None if dx is None else pack_encoded(dx, shape, name), loss, finite

        stage, number = self._me.stage, command.number
        try:
            done = await self._ports.device.timed(again)
        except SwarmError as error:
            self._ports.emit(Checked(microbatch, stage, number, True, 0.0, (), error.message))
            return
        y, dx, loss, finite = done.result
        self._worked(done.seconds)
        digests = (x.digest, _digest(y), g.digest, _digest(dx))
        self._ports.emit(Checked(microbatch, stage, number, finite, loss, digests))
        if recounting is not None:
            recounting.missing.discard(microbatch.index)
            await self._add_up(recounting)

    async def _add_up(self, recounting: _Recounting) -> None:
        """Report the sum once all microbatches are in it."""
        command, sums = recounting.command, recounting.sums
        if recounting.missing:
            return
        span = slice(command.start, command.stop)
        part = await self._ports.device.run(lambda: self._stage.part_of(sums, command.unit)[span])
        digest = await self._ports.device.aside(lambda: digest_of(raw_bytes(part)))
        self._ports.emit(Recounted(command.timeline, command.step, command.number, digest))


def _digest(packed: Packed | None) -> str:
    return "" if packed is None else digest_of(packed.payload)
