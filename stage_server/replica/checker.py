"""Computes microbatches again for comparison, as `brain/checks.py` decides, and reports the results by hash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from stage_server.brain.checks import CheckTable
from stage_server.brain.commitments import digest_of
from stage_server.brain.early_inputs import Claim, EarlyInputs
from stage_server.ports import Assignment, ReplicaPorts
from stage_server.replica.deliveries import Deliveries
from stage_server.replica.evaluator import Ids
from stage_server.replica.packing import Packed, pack, pack_encoded, question
from swarm.errors import SwarmError
from swarm.events import Checked, Recounted
from swarm.messages import Check, Recount
from swarm.model import codec
from swarm.model.runtime import SentAhead, received
from swarm.model.stage import Stage, Sums
from swarm.model.state import raw_bytes
from swarm.peer_messages import Boundary
from swarm.types import Direction, Microbatch


@dataclass(frozen=True, slots=True)
class _Input:
    tensor: SentAhead | None
    digest: str


@dataclass(slots=True)
class _Recounting:
    """A sum that is computed once more, and the microbatches that are not in it."""

    command: Recount
    missing: set[int]
    sums: Sums = field(default_factory=dict)

    def wants(self, check: Check) -> bool:
        return check.number == self.command.number and check.microbatch.index in self.missing


_NONE = _Input(None, "")  # at an end of the pipeline
Early: TypeAlias = EarlyInputs[tuple[Microbatch, str], tuple[Boundary, memoryview]]


class Checker:
    """The checking side of one replica; `ready` wakes the compute loop."""

    def __init__(
        self, assignment: Assignment, stage: Stage, deliveries: Deliveries, ports: ReplicaPorts, ready: asyncio.Event
    ) -> None:
        self.table = CheckTable(assignment.me.stage)
        self._me, self._course = assignment.me, assignment.course
        self._stage = stage
        self._codec = assignment.spec.unmeasured_compression
        self._deliveries = deliveries
        self._ports = ports
        self._ready = ready
        self._ids: dict[Microbatch, Ids] = {}
        self._inputs: dict[tuple[Microbatch, Direction], _Input] = {}
        self._recounts: dict[int, _Recounting] = {}  # by step

    def recount(self, command: Recount) -> None:
        """Add up what the Checks of the same number bring; a newer request takes the place of an older one."""
        self._recounts[command.step] = _Recounting(command, set(command.indexes))

    def take(self, command: Check, ids: Ids, early: Early) -> None:
        """Take a check on, with the inputs that came before it."""
        microbatch = command.microbatch
        if not self.table.take(command):
            return
        self._ids[microbatch] = ids
        for direction in Direction:
            self._inputs.pop((microbatch, direction), None)
        for wanted in self.table.lacking(microbatch):
            if (came := early.take((microbatch, wanted.direction), Claim.of(wanted.of))) is not None:
                self.receive(*came)
        self._ready.set()

    def receive(self, header: Boundary, payload: memoryview) -> bool:
        """Take in a tensor that a check waits for; False if none does."""
        microbatch, direction = header.microbatch, header.direction
        if not self.table.wants(microbatch, direction, header.sender, header.incarnation):
            return False
        device = self._ports.device.name
        arrived = codec.arrived(payload, header.dtype, header.shape, header.codec, device)
        self._inputs[microbatch, direction] = _Input(arrived.ahead(), digest_of(payload))
        self.table.arrived(microbatch, direction)
        self._ready.set()
        return True

    def ask_again(self) -> None:
        """Ask for the inputs that did not come by themselves."""
        for wanted in self.table.overdue():
            command, direction = wanted.command, wanted.direction
            letter = question(self._me, command.microbatch, direction, command.hops[command.stage].attempt)
            self._deliveries.send(
                wanted.of,
                ("check", command.microbatch, direction),
                lambda letter=letter: letter,  # type: ignore[misc]
                lambda command=command: self.table.is_open(command),  # type: ignore[misc]
            )

    def forget(self, is_over: Callable[[Microbatch], bool]) -> None:
        """The cells or the commit make checks and loans of such microbatches void."""
        self._clear(self.table.forget(is_over))
        for step, one in list(self._recounts.items()):
            if is_over(Microbatch(one.command.timeline, step, min(one.command.indexes, default=0))):
                del self._recounts[step]

    def drop(self, microbatch: Microbatch) -> None:
        """A route names this replica: later inputs are for the cell."""
        self._clear(self.table.drop(lambda one: one == microbatch))

    def ready(self, holds: Callable[[int], bool]) -> Check | None:
        return self.table.ready(holds)

    async def compute(self, command: Check) -> None:
        """Carry out a check that `ready` has just given, and report."""
        microbatch = command.microbatch
        ids = self._ids.pop(microbatch)
        x, g = (self._inputs.pop((microbatch, side), _NONE) for side in Direction)
        portion, shape, name = self._course.at(microbatch.step).portion, self._stage.boundary_shape(), self._codec
        recounting = self._recounts.get(microbatch.step)
        if recounting is not None and not recounting.wants(command):
            recounting = None

        def again() -> tuple[Packed | None, Packed | None, float, bool]:
            y, loss, dx, finite = self._stage.recompute(
                microbatch,
                command.version,
                portion=portion,
                x=_tensor(x),
                g=_tensor(g),
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
        self._ports.metrics.device_busy(done.seconds)
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

    def _clear(self, dropped: list[Microbatch]) -> None:
        for microbatch in dropped:
            self._ids.pop(microbatch, None)
            for direction in Direction:
                self._inputs.pop((microbatch, direction), None)


def _tensor(given: _Input) -> Tensor | None:
    return None if given.tensor is None else received(given.tensor)


def _digest(packed: Packed | None) -> str:
    return "" if packed is None else digest_of(packed.payload)
