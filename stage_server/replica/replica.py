"""One job's stage on this server: commands and tensors in, events and tensors out.

The rules are in `cell.py` (what is ready, what goes where) and `work_queue.py` (what comes first). This module carries
them out: it keeps the tensors, calls the device, and packs and sends the results.

    Route, tensors ─▶ CellTable ─▶ Compute ─▶ WorkQueue ─▶ device ─▶ CellTable ─▶ Emit ─▶ neighbours
                                                                             └─▶ Report ─▶ scheduler

Decisions: docs/decisions/039, 091.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import TypeAlias, assert_never

from torch import Tensor

from stage_server.brain import cell
from stage_server.brain.commitments import Commitments
from stage_server.brain.held_outputs import HeldOutputs
from stage_server.brain.link_codecs import LinkCodecs
from stage_server.brain.neighbours import Claim, ClaimStatus, EarlyInputs, Neighbours
from stage_server.brain.splitting import Splitting
from stage_server.brain.work_queue import WorkQueue
from stage_server.device import Timed, with_room
from stage_server.ports import Assignment, ReplicaPorts
from stage_server.replica.admission import HeaderChecks
from stage_server.replica.averaging.all_reduce import Mean, Reduction
from stage_server.replica.averaging.error_feedback import ErrorFeedback
from stage_server.replica.averaging.mailbox import Mailbox
from stage_server.replica.averaging.rounds import RoundRunner, expected_set
from stage_server.replica.deliveries import Deliveries
from stage_server.replica.packing import Letter, Packed, boundary, encode, pack, pack_encoded, question
from stage_server.replica.side_worker import Ids, SideWorker
from stage_server.state.donor import CommitRecord, Donor
from stage_server.state.joiner import missed_record
from stage_server.state.saving import Saving
from swarm.errors import (
    OutOfMemory,
    Refused,
    RetryElsewhere,
    SchedulerUnreachable,
    StaleMessage,
    SwarmError,
)
from swarm.job.spec import LOWERED
from swarm.model import codec
from swarm.model.islands.exchange import merge_of
from swarm.model.runtime import SentAhead, received
from swarm.model.stage import Stage
from swarm.types import Direction, Hop, Microbatch, UnitName
from swarm.wire import messages
from swarm.wire.messages import Boundary, Commit, EvaluationBoundary, LoadStage, Need, Slice, TensorHeader

# How often to ask for what was lost between two neighbours; what has been lacking for less may be on its way.
REPAIR_S = 2.0
AHEAD_S = 0.002  # the way from the device to the event loop and back takes about half of it

Computing: TypeAlias = messages.Route | messages.Void | messages.Evaluate | messages.Check | messages.Recount
Stepping: TypeAlias = (
    messages.Average
    | messages.Exchange
    | messages.AbortRound
    | messages.Commit
    | messages.SaveStage
    | messages.HashStage
    | messages.Recheck
)

Made: TypeAlias = tuple[Packed | None, float, str]
"""What a computation makes: its output, its loss or whether it was finite, and the digest of the output."""


class Replica:
    """A loaded stage at work, until the tasks in `ports.work` are ended. `stage` holds the version of `loaded`."""

    def __init__(self, assignment: Assignment, stage: Stage, loaded: messages.Loaded, ports: ReplicaPorts) -> None:
        command, spec, me = assignment.command, assignment.spec, assignment.me
        self.job = me.job
        self.timeline = command.timeline
        self.me = me
        self.stage, self.loaded = stage, loaded
        self._assignment, self._spec = assignment, spec
        self._stage = stage
        self._ports = ports
        self._device, self._metrics = ports.device, ports.metrics
        self.links = LinkCodecs(spec.pipeline.compression, bfloat16_is_exact=spec.model.dtype == LOWERED)
        self.cells = cell.CellTable(
            stage=me.stage,
            stages=assignment.stages,
            timeline=command.timeline,
            version=loaded.version,
            staleness=spec.pipeline.staleness,
            peer=me.peer,
            incarnation=me.incarnation,
        )
        some_are_late = 0 < spec.overlap < spec.training.microbatches
        owed_max = ports.budget.owed_room(assignment)
        self._queue = WorkQueue(
            late_behind=some_are_late and me.stage < assignment.stages - 1,
            patience=4 * max(1, owed_max),  # forwards and backwards of twice as many as may owe
        )
        self._ready = asyncio.Event()
        self._ahead_s = AHEAD_S if some_are_late else 0.0
        self._begun, self._done_s = 0, 0.0  # orders on the device, and when it is expected to be done with them
        self._took_s: dict[tuple[Direction, cell.Gradients], float] = {}  # the last order of each kind
        self._splitting = splitting = Splitting(owed_max)

        def worked(seconds: float) -> None:
            """The device worked for something else than a microbatch. A method would keep the replica alive."""
            ports.metrics.device_busy(seconds)
            splitting.worked(seconds)

        self._worked = worked
        self._queued_s: dict[Microbatch, float] = {}
        self._batches: dict[Microbatch, Ids] = {}
        self._inputs: dict[tuple[Microbatch, Direction], SentAhead] = {}
        self._neighbours = Neighbours(me.stage)
        self.early = EarlyInputs[tuple[Microbatch, str], tuple[Boundary, memoryview]](lambda subject: subject)
        self._outputs: HeldOutputs[Packed] = HeldOutputs(ports.budget.hold_bytes)
        self._deliveries = Deliveries(ports, self.links)
        self._reports = Reports(loaded, ports)
        self._side = SideWorker(assignment, stage, self.cells, self._deliveries, ports, self._ready, self._worked)
        self._commitments = Commitments(is_on=spec.trust.hashes_hops)
        mailbox = Mailbox(me.peer, loaded.version, 1 + spec.pipeline.staleness + assignment.course.steps_ahead)
        leftovers = ErrorFeedback(spec.averaging.compression)
        reduction = Reduction(assignment.sum_bits, clips=spec.averaging.aggregate == "centered_clip")
        self._rounds = RoundRunner(me, stage, reduction, ports, self._reports.fail, mailbox, leftovers)
        self.admission = HeaderChecks(assignment, stage, mailbox, self._neighbours, self._side.table)
        self.donor = Donor(assignment, stage, ports.device, ports.budget.log_bytes(assignment))
        self._saving = Saving(assignment, stage, ports)
        ports.work.start(self._compute_forever())
        ports.work.start(self._repair_forever())

    # Sessions ----------------------------------------------------------------------------------------------------

    def attach(self) -> tuple[messages.Event, ...]:
        """A new session begins: give up work begun for the old one; gives the events that the scheduler may have
        missed.

        Right after this, make the `Hello`, as it tells what the cells hold.
        """
        self._saving.stop()  # the files may have gone to a scheduler that was killed
        self._rounds.abort_all()
        self._side.forget(lambda _: True)
        self._carry_out(self.cells.unseal_all())
        return self._reports.again()

    def newest_attempt(self) -> int:
        """The greatest known attempt of anything open."""
        return max(self.cells.newest_attempt(), self._side.table.newest_attempt())

    # Commands ----------------------------------------------------------------------------------------------------

    async def handle(self, command: Computing | Stepping) -> None:
        """Carry out one command; the caller keeps them in order. SchedulerUnreachable ends the session."""
        match command:
            case messages.Route():
                self._route(command)
            case messages.Void():
                self._side.forget(lambda microbatch: microbatch.step == command.step)
                self._carry_out(self.cells.void(command.step, command.attempt))
            case messages.Average():
                self._average(command)
            case messages.Exchange():
                if self._assignment.course.proposes(self.cells.version, command.step):
                    self._rounds.exchange(command)
            case messages.AbortRound():
                self._abort(command)
            case messages.Recheck():
                self._rounds.recheck(command)
            case messages.Commit():
                await self._commit(command)
            case messages.SaveStage() | messages.HashStage():
                self._saving.take(command)
            case messages.Evaluate():
                self._deliveries.learn(command.hops)
                self._side.evaluate(command)
            case messages.Check():
                self._check(command)
            case messages.Recount():
                self._side.recount(command)
            case _:
                assert_never(command)

    def _route(self, route: messages.Route) -> None:
        hop = route.hops[self.me.stage]
        if (hop.peer, hop.incarnation) == (self.me.peer, self.me.incarnation):
            self._batches.setdefault(route.microbatch, Ids.of(route, self._spec.data.sequence_length))
            self._side.table.drop(route.microbatch)
        self._deliveries.learn(route.hops)
        questions = self._neighbours.learn(route)
        self._take_early(route)
        self._carry_out(self.cells.route(route))
        for output, asker in questions:
            self._carry_out(self.cells.need(route.microbatch, output, asker))

    def _take_early(self, route: messages.Route) -> None:
        """Count the early inputs from the neighbours that this route names; forget the others."""
        microbatch, newest = route.microbatch, max(hop.attempt for hop in route.hops)
        for direction, claim in self._neighbours.named(microbatch).items():
            early = self.early.take((microbatch, direction), claim)
            if early is not None:
                try:
                    self._take_in(*early)
                except SwarmError as error:
                    self._ports.log.warning("early input dropped", microbatch=str(microbatch), reason=error.message)
        self.early.drop(lambda subject, claim: subject[0] == microbatch and claim.attempt <= newest)

    def _check(self, command: messages.Check) -> None:
        """Compute a microbatch again, or lend the checker what our hop made."""
        self._deliveries.learn(command.hops)
        if (output := self._side.table.lend(command)) is not None:
            self._carry_out(self.cells.need(command.microbatch, output, command.hops[command.stage]))
        else:
            self._side.check(command, self.early)

    def _average(self, command: messages.Average) -> None:
        if command.step < self.cells.version:
            return
        if len(command.members) > 1:
            self.donor.share()
        is_new = self._rounds.take(command)
        if command.ahead and is_new:
            self._carry_out(self.cells.seal_when(command.step, expected_set(command, self.me.peer)))
        elif not command.ahead and self._rounds.full(command):
            self._carry_out(self.cells.seal(command.step))

    def _abort(self, command: messages.AbortRound) -> None:
        if self._rounds.abort(command):
            self._carry_out(self.cells.unseal(command.step))

    async def _commit(self, command: messages.Commit) -> None:
        if command.step != self.cells.version:
            # Older: a repeat. Newer: one before it was lost with a session, and both come again.
            self._ports.log.debug("commit out of order", step=command.step, version=self.cells.version)
            return
        means = self._rounds.means(command)
        try:
            gradients = await averages(command, means, self._assignment, self._stage, self._ports)
        except SwarmError as error:
            if command.rebases:  # its island may still be cut off: a new session brings the commit and its donors again
                raise SchedulerUnreachable(f"dialled anew for what a late island lacks: {error.message}") from error
            self._reports.fail(error)
            return
        await self._reports.told()
        # Queued before any computation that the cells hand out from here on: those find the new weights.
        applying = self._device.timed(lambda: commit(self._assignment, self._stage, self.donor, command, gradients))
        self._rounds.close(command)
        for old in [microbatch for microbatch in self._batches if microbatch.step <= command.step]:
            del self._batches[old]
        self._neighbours.forget(command.step)
        self.early.drop(lambda subject, _: subject[0].step <= command.step)
        self._carry_out(self.cells.commit(command.step, command.version))
        self._side.commit(command.step)
        try:
            applied = await applying
        except SwarmError as error:
            self._reports.fail(error)
            return
        self._worked(applied.seconds)
        self._splitting.committed(asyncio.get_running_loop().time())
        self.donor.committed(*applied.result)
        self._reports.tell(command, self._stage)

    # Tensors -----------------------------------------------------------------------------------------------------

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        """Take in a tensor that was admitted; a duplicate is ignored."""
        match header:
            case Boundary():
                self._take_in(header, payload)
            case EvaluationBoundary():
                self._side.receive_evaluation(header, payload)
            case Slice():
                self._rounds.mailbox.put(header, payload)
            case Need(microbatch=microbatch, direction=direction):
                asker = Hop(header.sender, header.incarnation, header.attempt, "")
                lent = self._side.table.may_ask(microbatch, direction, asker.peer, asker.incarnation)
                if lent or self._neighbours.asks(microbatch, direction, asker) is ClaimStatus.NAMED:
                    self._carry_out(self.cells.need(microbatch, direction, asker))
            case _:
                assert_never(header)

    def _take_in(self, header: Boundary, payload: memoryview) -> None:
        if self._side.receive(header, payload):
            return
        microbatch, direction = header.microbatch, header.direction
        claim = Claim(header.sender, header.incarnation, header.attempt)
        standing = self._neighbours.judge(microbatch, direction, claim)
        if standing is ClaimStatus.EARLY and self.cells.is_open(microbatch):
            known = self._deliveries.knows(header.sender, header.incarnation)
            if not self.early.put((microbatch, direction), claim, (header, payload), payload.nbytes, is_known=known):
                raise RetryElsewhere(f"{len(self.early)} inputs wait for their routes already")
            return
        if standing is ClaimStatus.FALSE:
            raise StaleMessage(f"{claim} is not the neighbour of {microbatch} on that side")
        arrival = self.cells.arrived(microbatch, direction, header.attempt)
        if not arrival.accepted and not arrival.duplicate:
            raise StaleMessage(arrival.reason)
        if arrival.accepted:
            self._commitments.took(microbatch, direction, self._commitments.digest(payload))
            arrived = codec.arrived(payload, header.dtype, header.shape, header.codec, self._device.name)
            self._inputs[microbatch, direction] = arrived.ahead()
        self._carry_out(arrival.actions)

    # Actions -----------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: tuple[cell.Action, ...]) -> None:
        forgotten: list[Microbatch] = []
        for action in actions:
            match action:
                case cell.Compute():
                    self._put(action)
                case cell.Emit():
                    self._send(action)
                case cell.Ask():
                    self._ask(action)
                case cell.Forget(microbatch=microbatch):
                    self._forget(microbatch)
                    forgotten.append(microbatch)
                case cell.DropOutput(microbatch=microbatch, direction=direction):
                    self._outputs.drop((microbatch, direction))
                    if microbatch not in self.cells:
                        self._commitments.forget(microbatch)
                case cell.ForgetSums(step=step):
                    self._device.run(lambda step=step: self._stage.void(step))  # type: ignore[misc]
                case cell.Sealed(step=step):
                    self._rounds.sealed(step, self.cells.set_digest(step))
                case cell.Report(event=event):
                    self._ports.emit(self._commitments.signed(event))
                case _:
                    assert_never(action)
        if forgotten:
            self._device.run(lambda: self._stage.drop(*forgotten))
        self._metrics.queue_depth(
            self.me.stage,
            forward=self._queue.waiting(Direction.FORWARD),
            backward=self._queue.waiting(Direction.BACKWARD),
        )

    def _put(self, work: cell.Compute) -> None:
        if not self._queue.put(work):
            self._reports.fail(
                Refused(
                    f"stage {self.me.stage} has {len(self._queue)} computations waiting and takes no more",
                    hint="lower pipeline.max_in_flight",
                )
            )
            return
        self._queued_s[work.microbatch] = asyncio.get_running_loop().time()
        self._ready.set()

    def _forget(self, microbatch: Microbatch) -> None:
        self._queue.discard(microbatch)
        self._queued_s.pop(microbatch, None)
        self._commitments.forget(microbatch)
        if not self.cells.is_mine(microbatch):  # else it is done again, and no Route will bring tokens and targets
            self._batches.pop(microbatch, None)
        for direction in Direction:
            self._inputs.pop((microbatch, direction), None)
            self._outputs.drop((microbatch, direction))

    async def _compute_forever(self) -> None:
        """Hand orders to the device; where some are late, the next just before it is done with one: it never waits."""
        now_s = asyncio.get_running_loop().time
        while True:
            await self._ready.wait()
            is_ahead = self._begun == 1 and self._ahead_s and now_s() >= self._done_s - self._ahead_s
            work = self._queue.take() if is_ahead or not self._begun else None
            if work is not None:
                self._begin(work)
            elif self._begun or not await self._compute_other():
                self._ready.clear()

    def _begin(self, work: cell.Compute) -> None:
        queued_s = self._queued_s.pop(work.microbatch)
        work_now = self.cells.begin(work, split=self._splitting.next(work, self.cells.owed()))
        if work_now is None:
            return
        try:
            made = self._forward(work_now) if work.direction is Direction.FORWARD else self._backward(work_now)
        except SwarmError as error:
            self._reports.fail(error)
            return
        loop = asyncio.get_running_loop()
        expected_s = self._took_s.get((work_now.direction, work_now.part), math.inf)
        self._done_s = max(loop.time(), self._done_s if self._begun else 0.0) + expected_s
        self._begun += 1
        if self._ahead_s and expected_s < math.inf:
            loop.call_at(self._done_s - self._ahead_s, self._ready.set)
        self._ports.work.start(self._end(work_now, queued_s, made))

    async def _end(self, work: cell.Compute, queued_s: float, made: Awaitable[Timed[Made]]) -> None:
        try:
            self._made(work, queued_s, await made)
        except SwarmError as error:
            self._reports.fail(error)
        finally:
            self._begun -= 1
            self._ready.set()

    def _made(self, work: cell.Compute, queued_s: float, done: Timed[Made]) -> None:
        microbatch, side, (output, value, digest) = work.microbatch, work.direction, done.result
        waited_s = max(0.0, asyncio.get_running_loop().time() - queued_s - done.seconds)  # here and on the device
        label = "weights" if work.part is cell.Gradients.WEIGHTS else side.value
        if work.part is not cell.Gradients.WEIGHTS:
            self._commitments.made(microbatch, side, digest)
            if output is not None and output.overflows:
                self._commitments.overflowed(microbatch, side)
            self._hold(microbatch, side, output)
            self.links.computed(side, done.seconds)
        self._splitting.computed(work, done.seconds)
        self._took_s[side, work.part] = done.seconds
        self._metrics.waited(self.me.stage, label, waited_s)
        self._metrics.computed(self.me.stage, label, done.seconds)
        if side is Direction.FORWARD:
            self._carry_out(self.cells.computed_forward(work, value, done.seconds, waited_s))
        else:
            self._carry_out(self.cells.computed_backward(work, bool(value), done.seconds, waited_s))

    async def _compute_other(self) -> bool:
        """A check or an evaluation (scheduler/brain/routing/evaluation.py); False if none is ready."""
        try:
            return await self._side.compute_next()
        except SwarmError as error:
            self._reports.fail(error)
            return True

    def _forward(self, work: cell.Compute) -> Awaitable[Timed[Made]]:
        microbatch, batch = work.microbatch, self._batches[work.microbatch]
        portion = self._assignment.course.at(microbatch.step).portion
        sent = self._inputs.pop((microbatch, Direction.FORWARD), None)
        codec_name = self._codec_for(microbatch, Direction.FORWARD)

        def forward() -> Made:
            x = None if sent is None else received(sent)
            y, loss = self._stage.forward(
                microbatch, work.version, portion=portion, x=x, tokens=batch.tokens, targets=batch.targets
            )
            packed = None if y is None else pack(y, codec_name)
            return packed, loss, self._commitments.digest(None if packed is None else packed.payload)

        return self._device.timed(lambda: with_room(forward, self._device.name))

    def _backward(self, work: cell.Compute) -> Awaitable[Timed[Made]]:
        microbatch = work.microbatch
        if work.part is cell.Gradients.WEIGHTS:
            return self._device.timed(lambda: (None, self._stage.weigh(microbatch), ""))
        keep = work.part is cell.Gradients.INPUTS
        sent = self._inputs.pop((microbatch, Direction.BACKWARD), None)
        codec_name = self._codec_for(microbatch, Direction.BACKWARD)

        def backward() -> Made:
            g = None if sent is None else received(sent)
            encoded, finite = self._stage.backward(
                microbatch, g, accumulate=work.accumulate, keep=keep, encode=lambda dx: encode(dx, codec_name)
            )
            packed = None if encoded is None else pack_encoded(encoded, self._stage.boundary_shape(), codec_name)
            return packed, finite, self._commitments.digest(None if packed is None else packed.payload)

        return self._device.timed(backward)

    def _codec_for(self, microbatch: Microbatch, side: Direction) -> str:
        to, elements = self.cells.receiver(microbatch, side), math.prod(self._stage.boundary_shape())
        return self._deliveries.codec_to(to, side, elements)

    def _hold(self, microbatch: Microbatch, direction: Direction, output: Packed | None) -> None:
        if output is None:
            return
        for old, side in self._outputs.put((microbatch, direction), output):
            self._metrics.output_evicted(self.me.stage)
            self._carry_out(self.cells.evicted(old, side))

    async def _repair_forever(self) -> None:
        """Ask neighbours again for inputs that were lost on the way: those missing twice in a row."""
        before: set[tuple[Microbatch, Direction]] = set()
        while True:
            await asyncio.sleep(REPAIR_S)
            self._side.ask_again()
            asks = self.cells.lacking()
            self._carry_out(tuple(ask for ask in asks if (ask.microbatch, ask.direction) in before))
            before = {(ask.microbatch, ask.direction) for ask in asks}

    def _send(self, emit: cell.Emit) -> None:
        microbatch, side = emit.microbatch, emit.direction

        def letter() -> Letter | None:
            held = self._outputs.get((microbatch, side))
            return None if held is None else boundary(self.me, microbatch, side, emit.attempt, held)

        self._deliveries.send(
            emit.to, (microbatch, side), letter, lambda: self.cells.concerns(microbatch, side, emit.to)
        )

    def _ask(self, ask: cell.Ask) -> None:
        # x is asked of the stage before, g of the one behind.
        side = Direction.BACKWARD if ask.direction is Direction.FORWARD else Direction.FORWARD
        letter = question(self.me, ask.microbatch, ask.direction, ask.attempt)
        self._deliveries.send(
            ask.to,
            ("question", ask.microbatch, ask.direction),
            lambda: letter,
            lambda: self.cells.concerns(ask.microbatch, side, ask.to),
        )


async def averages(
    command: Commit, means: Mapping[UnitName, Mean] | None, assignment: Assignment, stage: Stage, ports: ReplicaPorts
) -> dict[UnitName, Tensor]:
    """The averaged gradients that a commit makes effective: the `means` held here, or from the log of a member.

    StaleMessage if no member has them.
    """
    if means is not None:
        return {unit: mean.gradient for unit, mean in means.items() if unit in stage.units}
    try:
        record = await missed_record(command.step, assignment, command.donors, stage, ports.links)
    except SwarmError as error:
        raise StaleMessage(f"step {command.step} was averaged without this replica: {error.message}") from error
    places = stage.places_at(command.step)
    return await ports.device.aside(lambda: places.means_of(record.gradients))


def commit(
    assignment: Assignment, stage: Stage, donor: Donor, command: Commit, means: Mapping[UnitName, Tensor]
) -> CommitRecord:
    """`apply`; gives what the donor is to remember of it."""
    apply(assignment, stage, command, means)
    return donor.record(command, means)


def apply(assignment: Assignment, stage: Stage, command: Commit, means: Mapping[UnitName, Tensor]) -> None:
    """Commit the step with the averages of its units, none if it is skipped."""
    if assignment.course.is_outer(command.step):
        means_made = None if command.skip else means
        merge = merge_of(stage, assignment.spec, command.step, means_made, rebases=command.rebases)
        stage.merge(command.step, merge)
        return
    rate, scale = command.learning_rate, command.scale
    stage.apply(command.step, means, learning_rate=rate, scale=scale, skip=command.skip)


class Reports:
    """A replica's newest reports of itself to the scheduler, repeated in each new session."""

    def __init__(self, loaded: messages.Loaded, ports: ReplicaPorts) -> None:
        self._loaded = loaded
        self._ports = ports
        self._committed: deque[messages.Committed] = deque(
            maxlen=2
        )  # a commit is written when that of two steps ago is agreed
        self._failed: messages.Failed | None = None
        self._telling: asyncio.Task[None] | None = None

    def tell(self, command: Commit, stage: Stage) -> None:
        """Report a commit with the digest of the state, which is made beside the microbatches that use it first."""
        self._telling = self._ports.work.start(self._tell(command, stage))

    async def told(self) -> None:
        """Until the newest digest is made, the state must stay as it is."""
        if self._telling is not None:
            await asyncio.wait([self._telling])

    async def _tell(self, command: Commit, stage: Stage) -> None:
        try:
            digest = await self._ports.device.aside(stage.digest)
        except SwarmError as error:
            self.fail(error)
            return
        self._committed.append(messages.Committed(command.timeline, command.step, command.version, stage.stage, digest))
        self._ports.emit(self._committed[-1])

    def fail(self, error: SwarmError) -> None:
        if isinstance(error, OutOfMemory):
            self._ports.metrics.out_of_memory()
        self._ports.log.error("cannot go on", error_code=error.code, reason=error.message)
        self._failed = messages.Failed(self._loaded.job, error.code, error.message, error.hint)
        self._ports.emit(self._failed)

    def again(self) -> tuple[messages.Event, ...]:
        failed = () if self._failed is None else (self._failed,)
        return (self._loaded, *self._committed, *failed)


def can_fork(replica: Replica | None, command: LoadStage) -> bool:
    """Whether the replica holds what the island that `command` names begins with."""
    if replica is None or not command.held:
        return False
    held = (replica.job, replica.me.stage, replica.cells.stages, replica.cells.version)
    return held == (command.job, command.stage, len(command.split), command.held)


def to_load(command: LoadStage) -> LoadStage:
    """The command of a replica that cannot fork; StaleMessage if it may not load the stage instead."""
    if command.held:
        raise StaleMessage(f"version {command.held} of stage {command.stage} is not held here")
    return command


async def fork_replica(before: Replica, command: LoadStage, ports: ReplicaPorts) -> Replica:
    """The replica on the timeline of another island, with the outer weights; it has reported itself.

    An island begins as a copy of the one to which the replica belonged, with the optimizer's state of that one. What
    the replica has trained and not merged stays behind, as it counts in the other island. Its work must have ended.
    """
    digest = await ports.device.run(before.stage.begin_anew)  # behind whatever was queued
    loaded = replace(before.loaded, timeline=command.timeline, version=command.held, digest=digest, join=0)
    after = Replica(Assignment.of(command, before.me), before.stage, loaded, ports)
    ports.emit(loaded)
    ports.log.info("goes over to another island", timeline=command.timeline, version=command.held)
    return after
