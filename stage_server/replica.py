"""One job's stage on this server: commands and tensors in, events and tensors out.

The rules are in `cell.py` (what is ready, what goes where) and `intake.py` (what comes first). This module carries out
what they say: it keeps the tensors, calls the device and hands finished tensors to the outbox.

    Route, tensors ─▶ CellTable ─▶ Compute ─▶ Intake ─▶ device ─▶ CellTable ─▶ Emit ─▶ neighbours
                                                                          └─▶ Report ─▶ scheduler
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from stage_server.averaging import Mailbox, Mean, Self, run_round
from stage_server.cell import (
    Action,
    Ask,
    CellTable,
    Compute,
    DropOutput,
    Emit,
    Forget,
    ForgetSums,
    Report,
    Sealed,
)
from stage_server.device import Device
from stage_server.evaluation import EmitEvaluation, EvaluationTable
from stage_server.evaluator import Evaluator, Ids
from stage_server.intake import Intake
from stage_server.loading import FetchCall, load_initial
from stage_server.outbox import SLICE_CODEC, Packed, deliver, pack
from stage_server.saving import StoreCall, capture, hand_over
from swarm import codec
from swarm.config import JobSpec
from swarm.errors import (
    CorruptFrame,
    OutOfMemory,
    PeerUnavailable,
    Refused,
    SetMismatch,
    StaleMessage,
    SwarmError,
)
from swarm.logs import Logger
from swarm.messages import (
    AbortRound,
    Average,
    Averaged,
    Commit,
    Committed,
    Evaluate,
    Event,
    Failed,
    Loaded,
    LoadStage,
    RoundFailed,
    Route,
    SaveStage,
    TensorHeader,
    UnitSize,
    Void,
)
from swarm.metrics import StageServerMetrics
from swarm.model.probe import probe_digest
from swarm.model.runtime import configure, is_slow_at_bfloat16, step_device
from swarm.model.stage import Stage
from swarm.model.state import InitialState
from swarm.rpc.peers import PeerLinks
from swarm.types import Direction, Hop, Microbatch, Round, UnitName

_KIND = {Direction.FORWARD: "activation", Direction.BACKWARD: "gradient"}
_DIRECTION = {kind: direction for direction, kind in _KIND.items()}

ReplicaCommand = Route | Void | Average | AbortRound | Commit | SaveStage | Evaluate
BuildStage = Callable[..., Stage]  # called as Stage is; simulations have one whose model is a few numbers


@dataclass(slots=True)
class _Batch:
    """What a cell was given beside its boundary tensors: token ids (stage 0), targets (last stage), int64 [B, T]."""

    tokens: Tensor | None
    targets: Tensor | None


class Replica:
    """A loaded stage at work; made by `load`, ended by `close`."""

    def __init__(
        self,
        command: LoadStage,
        spec: JobSpec,
        stage: Stage,
        me: Self,
        device: Device,
        links: PeerLinks,
        emit: Callable[[Event], None],
        store: StoreCall,
        tasks: asyncio.TaskGroup,
        metrics: StageServerMetrics,
        log: Logger,
    ) -> None:
        self.job = command.job
        self.timeline = command.timeline
        self.me = me
        self._spec = spec
        self._stage = stage
        self._device = device
        self._links = links
        self._emit = emit
        self._store = store
        self._tasks = tasks
        self._metrics = metrics
        self._log = log
        self._bits = spec.training.fixed_point_bits if spec.training.reproducible else None
        self._codec = spec.pipeline.compression
        self._stages = len(command.split)

        self.cells = CellTable(
            stage=command.stage,
            stages=self._stages,
            timeline=command.timeline,
            version=command.version,
            staleness=spec.pipeline.staleness,
            peer=me.peer,
            incarnation=me.incarnation,
        )
        self._intake = Intake()
        self._ready = asyncio.Event()
        table = EvaluationTable(
            command.stage,
            self._stages,
            command.timeline,
            command.version,
            spec.pipeline.staleness,
            peer=me.peer,
            incarnation=me.incarnation,
        )
        self._evaluator = Evaluator(
            table, stage, self._codec, device, emit, self._send_evaluation, self._ready, metrics
        )
        self._mailbox = Mailbox()
        self._queued_s: dict[int, float] = {}
        self._batches: dict[Microbatch, _Batch] = {}
        self._inputs: dict[tuple[Microbatch, Direction], Tensor] = {}
        self._outputs: dict[tuple[Microbatch, Direction], Packed] = {}
        self._sealing: dict[int, list[Average]] = {}
        self._rounds: dict[tuple[int, UnitName], asyncio.Task[None]] = {}
        self._means: dict[tuple[int, UnitName, Round], Mean] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._start(self._compute_forever())

    @classmethod
    async def load(
        cls,
        command: LoadStage,
        spec: JobSpec,
        me: Self,
        device: Device,
        links: PeerLinks,
        emit: Callable[[Event], None],
        store: StoreCall,
        fetch: FetchCall,
        tasks: asyncio.TaskGroup,
        metrics: StageServerMetrics,
        log: Logger,
        build: BuildStage = Stage,
    ) -> Replica:
        """Build the stage on the device and report it; raises OutOfMemory if it does not fit, InvalidModel."""
        await device.run(lambda: configure(device.name, threads=None, reproducible=spec.training.reproducible))
        initial = await load_initial(command, spec, device, fetch, log)
        stage = await device.run(lambda: build(spec, command.stage, device.name, initial, step_on=command.step_on))
        steps_at = step_device(device.name, command.step_on)
        digest, probe = await device.run(lambda: (stage.digest(), probe_digest(spec.training, steps_at)))
        replica = cls(command, spec, stage, me, device, links, emit, store, tasks, metrics, log)
        units = tuple(UnitSize(name, layout.elements) for name, layout in stage.units.items())
        emit(Loaded(command.job, command.timeline, command.stage, stage.version, digest, units, probe))
        if spec.model.dtype == "bfloat16" and is_slow_at_bfloat16(device.name):
            hint = 'set model.dtype = "float32"'
            log.warning(f"{me.peer}: its CPU has no bfloat16 instructions, float32 is 2.5-3 times as fast: {hint}")
        log.info("stage loaded", stage=command.stage, layers=command.split[command.stage], device=str(device.name))
        return replica

    async def close(self) -> None:
        """Stop all work and let go of the stage."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    # Commands ----------------------------------------------------------------------------------------------------

    async def handle(self, command: ReplicaCommand) -> None:
        """Carry out one command; commands are handled in the order in which they came."""
        match command:
            case Route():
                self._route(command)
            case Void():
                self._carry_out(self.cells.void(command.step, command.attempt))
            case Average():
                self._average(command)
            case AbortRound():
                self._abort(command)
            case Commit():
                await self._commit(command)
            case SaveStage():
                # Queued now: after the commit that made the version, before any other.
                self._start(self._save(command, capture(command, self._stage, self._device)))
            case Evaluate():
                shape = (-1, self._spec.data.sequence_length)
                self._evaluator.route(command, Ids(_ids(command.tokens, shape), _ids(command.targets, shape)))
            case _:
                assert_never(command)

    def _route(self, route: Route) -> None:
        hop = route.hops[self.me.stage]
        if (hop.peer, hop.incarnation) == (self.me.peer, self.me.incarnation):
            shape = (-1, self._spec.data.sequence_length)
            self._batches.setdefault(route.microbatch, _Batch(_ids(route.tokens, shape), _ids(route.targets, shape)))
        self._carry_out(self.cells.route(route))

    def _average(self, command: Average) -> None:
        self._sealing.setdefault(command.step, []).append(command)
        self._carry_out(self.cells.seal(command.step))

    def _begin_round(self, command: Average) -> None:
        expected = next((member.digest for member in command.members if member.peer == self.me.peer), "")
        held = self.cells.set_digest(command.step)
        if held != expected:
            self._round_failed(command, SetMismatch(f"expected set {expected}, this replica holds {held}"), "")
            return
        self._rounds[command.step, command.unit] = self._start(self._take_part(command))

    async def _take_part(self, command: Average) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            mean = await run_round(command, self.me, self._stage, self._bits, self._device, self._links, self._mailbox)
        except* TimeoutError:
            self._round_failed(command, DeadlineOfRound(f"no answer within {command.timeout_s} s"), "")
        except* OutOfMemory as group:
            self.fail(_first(group))
        except* SwarmError as group:
            self._round_failed(command, _first(group), "")
        else:
            duration_s = loop.time() - started_s
            self._means[command.step, command.unit, command.round] = mean
            self._metrics.round_finished(self.me.stage, "averaged", duration_s)
            self._emit(
                Averaged(self.timeline, command.step, command.unit, command.round, mean.digest, mean.norms, duration_s)
            )

    def _round_failed(self, command: Average, error: SwarmError, accused: str) -> None:
        self._metrics.round_finished(self.me.stage, "failed", 0.0)
        self._log.warning("round failed", step=command.step, unit=command.unit, reason=str(error))
        reason = f"{error.code}: {error}"
        self._emit(RoundFailed(self.timeline, command.step, command.unit, command.round, reason, accused))

    def _abort(self, command: AbortRound) -> None:
        waiting = self._sealing.get(command.step, [])
        waiting[:] = [average for average in waiting if average.unit != command.unit]
        task = self._rounds.pop((command.step, command.unit), None)
        if task is not None:
            task.cancel()
        self._carry_out(self.cells.unseal(command.step))

    async def _commit(self, command: Commit) -> None:
        means = {made.unit: self._means[command.step, made.unit, made.round] for made in command.rounds}
        gradients = {unit: mean.gradient for unit, mean in means.items() if unit in self._stage.units}
        # Queued before any computation that the cells hand out from here on: those find the new weights.
        applying = self._device.timed(
            lambda: self._stage.apply(
                command.step,
                gradients,
                learning_rate=command.learning_rate,
                scale=command.scale,
                skip=command.skip,
            )
        )
        self._mailbox.close(command.step)
        for key in [key for key in self._means if key[0] <= command.step]:
            del self._means[key]
        for round_key in [key for key in self._rounds if key[0] <= command.step]:
            del self._rounds[round_key]
        self._sealing.pop(command.step, None)
        self._carry_out(self.cells.commit(command.step, command.version))
        self._evaluator.commit(command.version)
        try:
            applied = await applying
        except SwarmError as error:
            self.fail(error)
            return
        self._metrics.device_busy(applied.seconds)
        self._emit(Committed(self.timeline, command.step, command.version, self.me.stage, applied.result))

    async def _save(self, command: SaveStage, captured: Awaitable[InitialState]) -> None:
        self._emit(await hand_over(command, captured, self._spec, self.me, self._device, self._store, self._log))

    # Tensors -----------------------------------------------------------------------------------------------------

    def admit(self, header: TensorHeader) -> None:
        """Refuse, before a byte of it is kept, a tensor that does not belong here."""
        if header.job != self.job or header.timeline != self.timeline:
            raise StaleMessage(f"this replica serves job {self.job}, timeline {self.timeline}")
        expected_bytes = 0
        expected_bytes = 0
        match header.kind:
            case "part" | "mean":
                layout = self._stage.units.get(header.unit)
                if layout is None:
                    raise Refused(f"stage {self.me.stage} has no unit {header.unit!r}")
                if header.codec != SLICE_CODEC:
                    raise CorruptFrame(f"slices travel as {SLICE_CODEC}, not {header.codec!r}")
                if len(header.shape) != 1 or header.start + header.shape[0] > layout.elements:
                    raise Refused(f"slice {header.start}+{header.shape} leaves unit {header.unit}")
                expected_bytes = codec.slice_bytes(header.dtype, header.shape[0])
                self._mailbox.admit(header)
            case "activation" | "gradient" | "evaluation":
                if header.stage != self.me.stage:
                    raise Refused(f"a tensor for stage {header.stage} came to stage {self.me.stage}")
                if header.shape != self._stage.boundary_shape():
                    raise CorruptFrame(f"boundary tensors are {self._stage.boundary_shape()}, not {header.shape}")
                if header.codec != self._codec:
                    raise CorruptFrame(f"this job sends boundary tensors as {self._codec}, not {header.codec}")
                expected_bytes = codec.encoded_bytes(header.dtype, header.shape, header.codec)
            case "need":
                if header.wanted not in _DIRECTION or header.total_bytes:
                    raise CorruptFrame(f"a need names activation or gradient and has no bytes, not {header.wanted!r}")
            case _:
                raise CorruptFrame(f"unknown kind of tensor: {header.kind!r}")
        if header.total_bytes != expected_bytes:
            raise CorruptFrame(f"{header.dtype} {header.shape} has {expected_bytes} bytes, not {header.total_bytes}")

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        """Take in a tensor that was admitted; a duplicate is ignored."""
        microbatch = Microbatch(header.timeline, header.step, header.microbatch)
        match header.kind:
            case "part" | "mean":
                self._mailbox.put(header, payload)
            case "evaluation":
                self._evaluator.receive(header, payload)
            case "need":
                asker = Hop(header.sender, header.incarnation, header.attempt, "")
                self._carry_out(self.cells.need(microbatch, _DIRECTION[header.wanted], asker))
            case kind:
                direction = _DIRECTION[kind]
                arrival = self.cells.arrived(microbatch, direction, header.attempt)
                if not arrival.accepted and not arrival.duplicate:
                    raise StaleMessage(arrival.reason)
                if arrival.accepted:
                    tensor = codec.decode(payload, header.dtype, header.shape, header.codec)
                    self._inputs[microbatch, direction] = tensor
                self._carry_out(arrival.actions)

    # Actions -----------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case Compute():
                    self._put(action)
                case Emit():
                    self._start(self._send(action))
                case Ask(microbatch=microbatch, direction=direction, to=to, attempt=attempt):
                    header = self._header("need", microbatch, self.me.stage, attempt, wanted=_KIND[direction])
                    self._start(self._deliver(to, header, Packed(b"", "", (), "none")))
                case Forget(microbatch=microbatch):
                    self._forget(microbatch)
                case DropOutput(microbatch=microbatch, direction=direction):
                    self._outputs.pop((microbatch, direction), None)
                case ForgetSums(step=step):
                    self._device.run(lambda step=step: self._stage.void(step))  # type: ignore[misc]
                case Sealed(step=step):
                    for average in self._sealing.pop(step, []):
                        self._begin_round(average)
                case Report(event=event):
                    self._emit(event)
                case _:
                    assert_never(action)
        self._metrics.queue_depth(
            self.me.stage,
            forward=self._intake.waiting(Direction.FORWARD),
            backward=self._intake.waiting(Direction.BACKWARD),
        )

    def _put(self, work: Compute) -> None:
        if not self._intake.put(work):
            self.fail(
                Refused(
                    f"stage {self.me.stage} has {len(self._intake)} computations waiting and takes no more",
                    hint="lower pipeline.max_in_flight",
                )
            )
            return
        self._queued_s[work.ticket] = asyncio.get_running_loop().time()
        self._ready.set()

    def _forget(self, microbatch: Microbatch) -> None:
        self._intake.discard(microbatch)
        self._batches.pop(microbatch, None)
        for direction in Direction:
            self._inputs.pop((microbatch, direction), None)
            self._outputs.pop((microbatch, direction), None)
        self._device.run(lambda: self._stage.drop(microbatch))

    async def _compute_forever(self) -> None:
        while True:
            await self._ready.wait()
            work = self._intake.take()
            if work is None:  # evaluation fills the moments without training work; see scheduler/evaluation.py
                evaluation = self._evaluator.take()
                if evaluation is None:
                    self._ready.clear()
                    continue
                try:
                    await self._evaluator.compute(evaluation)
                except SwarmError as error:
                    self.fail(error)
                continue
            waited_s = asyncio.get_running_loop().time() - self._queued_s.pop(work.ticket)
            work_now = self.cells.begin(work)
            if work_now is None:
                continue
            self._metrics.waited(self.me.stage, work.direction.value, waited_s)
            try:
                match work_now.direction:
                    case Direction.FORWARD:
                        await self._forward(work_now, waited_s)
                    case Direction.BACKWARD:
                        await self._backward(work_now, waited_s)
                    case _:
                        assert_never(work_now.direction)
            except SwarmError as error:
                self.fail(error)

    async def _forward(self, work: Compute, waited_s: float) -> None:
        microbatch, batch = work.microbatch, self._batches[work.microbatch]
        x = self._inputs.pop((microbatch, Direction.FORWARD), None)

        def forward() -> tuple[Packed | None, float]:
            y, loss = self._stage.forward(microbatch, work.version, x=x, tokens=batch.tokens, targets=batch.targets)
            return (None if y is None else pack(y, self._codec)), loss

        done = await self._device.timed(forward)
        y, loss = done.result
        self._hold(microbatch, Direction.FORWARD, y)
        self._metrics.computed(self.me.stage, "forward", done.seconds)
        self._carry_out(self.cells.computed_forward(work, loss, done.seconds, waited_s))

    async def _backward(self, work: Compute, waited_s: float) -> None:
        microbatch = work.microbatch
        g = self._inputs.pop((microbatch, Direction.BACKWARD), None)

        def backward() -> tuple[Packed | None, bool]:
            dx, finite = self._stage.backward(microbatch, g, accumulate=work.accumulate)
            return (None if dx is None else pack(dx, self._codec)), finite

        done = await self._device.timed(backward)
        dx, finite = done.result
        self._hold(microbatch, Direction.BACKWARD, dx)
        self._metrics.computed(self.me.stage, "backward", done.seconds)
        self._carry_out(self.cells.computed_backward(work, finite, done.seconds, waited_s))

    def _hold(self, microbatch: Microbatch, direction: Direction, output: Packed | None) -> None:
        if output is not None and microbatch in self._batches:  # else forgotten while it was computed
            self._outputs[microbatch, direction] = output

    async def _send(self, emit: Emit) -> None:
        packed = self._outputs.get((emit.microbatch, emit.direction))
        if packed is None:  # committed or voided since
            return
        stage = self.me.stage + (1 if emit.direction is Direction.FORWARD else -1)
        header = self._header(_KIND[emit.direction], emit.microbatch, stage, emit.attempt)
        await self._deliver(emit.to, header, packed)

    def _send_evaluation(self, emit: EmitEvaluation, packed: Packed) -> None:
        header = self._header("evaluation", emit.microbatch, self.me.stage + 1, emit.attempt)
        self._start(self._deliver(emit.to, header, packed))

    async def _deliver(self, to: Hop, header: TensorHeader, packed: Packed) -> None:
        try:
            await deliver(self._links, to.address, header, packed)
        except StaleMessage as error:
            self._log.debug("neighbour has moved on", peer=to.peer, reason=str(error))
        except PeerUnavailable as error:
            self.fail(
                PeerUnavailable(
                    f"stage {self.me.stage} cannot reach {to.peer} at {to.address}: {error.message}",
                    hint="check that stage servers can reach each other's --announce address",
                )
            )
        except SwarmError as error:
            self.fail(error)

    def _header(self, kind: str, microbatch: Microbatch, stage: int, attempt: int, *, wanted: str = "") -> TensorHeader:
        return TensorHeader(
            job=self.job,
            kind=kind,
            timeline=microbatch.timeline,
            step=microbatch.step,
            microbatch=microbatch.index,
            stage=stage,
            attempt=attempt,
            sender=self.me.peer,
            incarnation=self.me.incarnation,
            dtype="",
            shape=(),
            codec="none",
            total_bytes=0,
            wanted=wanted,
        )

    def fail(self, error: SwarmError) -> None:
        """Tell the scheduler that this replica cannot go on with the job."""
        if isinstance(error, OutOfMemory):
            self._metrics.out_of_memory()
        self._log.error("cannot go on", error_code=error.code, reason=error.message)
        self._emit(Failed(self.job, error.code, error.message, error.hint))

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task


class DeadlineOfRound(SwarmError):
    """A member did not deliver its slices within the round's deadline."""

    code = "E1302"


def _first(group: BaseExceptionGroup[SwarmError]) -> SwarmError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SwarmError)
    return error


def _ids(raw: bytes, shape: tuple[int, int]) -> Tensor | None:
    """Token ids of a Route as int64 [B, T]; None if this stage gets none."""
    if not raw:
        return None
    return torch.from_numpy(np.frombuffer(raw, dtype="<i4").astype(np.int64)).view(shape)
