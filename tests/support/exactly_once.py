"""A job on the worst network that the protocol allows, with judges beside it.

The real JobBrain and real CellTables are joined by a network of which this holds:

* commands and events come in order per peer (one session), each may come again later;
* tensors and questions between peers come in any order, twice or never;
* the device is one thread with a queue; its results reach the replica later, so a Void or a Seal can meet a backward
  that runs; rows become durable whenever the store likes; rounds fail; outputs are evicted; replicas are suspected
  wrongly, come back, or are killed; sessions break, losing what is under way in both directions; links are accused;
  the scheduler is killed, with or without the row that it was writing; the next one goes by what the replicas report.

Tensors are texts that spell their own history. Two judges stand beside the code: `Judge` looks at what the devices
really added and what the commits make effective, `Twin` is a ledger too simple to be wrong.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from random import Random
from typing import assert_never

from scheduler.brain.inputs import (
    CheckpointKept,
    Happened,
    PeerBack,
    PeerGone,
    PeerSuspect,
    ReplicaRecord,
    Resumed,
    RowDurable,
    Start,
    Tick,
)
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import (
    Admitted,
    BeginCheckpoint,
    CommitRow,
    DropCheckpoint,
    EnterState,
    Fail,
    Finish,
    Independent,
    Left,
    Note,
    Output,
    PublishCheckpoint,
    Released,
    Send,
    Stopped,
    WriteCommit,
)
from scheduler.brain.routing.policies import POLICIES
from scheduler.brain.settings import BrainSettings
from scheduler.brain.state.brain_state import Mode
from stage_server.brain.cell import (
    Action,
    Ask,
    CellTable,
    Compute,
    DropOutput,
    Emit,
    Forget,
    ForgetSums,
    Gradients,
    Report,
    Sealed,
)
from stage_server.brain.work_queue import WorkQueue
from swarm.errors import PeerUnavailable, SetMismatch
from swarm.types import Direction, Hop, JobId, Microbatch, PeerId, Round, RoundFault, Routing, UnitName
from swarm.wire.messages import (
    AbortRound,
    Accumulated,
    Average,
    Averaged,
    Command,
    Commit,
    Committed,
    Event,
    Hello,
    Loaded,
    LoadStage,
    ParameterNorm,
    Release,
    RoundFailed,
    Route,
    Saved,
    SaveStage,
    Undelivered,
    UnitSize,
    Void,
)

JOB = JobId("job")
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
TIED = UnitName("tied")
FAULTS = (
    *("lose", "repeat frame", "repeat command", "repeat event", "suspect", "back"),
    *("evict", "link", "session", "undelivered"),
)


@dataclass(frozen=True)
class Shape:
    """One scenario: how many of everything, and which cells are not finite."""

    pools: tuple[int, ...]
    microbatches: int
    steps: int
    overlap: int = 0
    tied: bool = False
    not_finite: frozenset[tuple[int, int, int]] = frozenset()  # (step, stage, index)
    evicting: bool = True
    routing: Routing = "least_completion"
    sync_steps: int = 0
    owed_max: int = 2  # microbatches that may owe the gradients of their weights at a server

    @property
    def staleness(self) -> int:
        """Versions before the newest that a device holds."""
        return int(self.overlap > 0)

    def version(self, step: int, index: int) -> int:
        """The weights of a microbatch; written down here once more, apart from the code under test."""
        return step - 1 if step >= max(1, self.sync_steps) and index < self.overlap else step

    @property
    def stages(self) -> int:
        return len(self.pools)

    def units(self) -> dict[UnitName, tuple[int, ...]]:
        units = {UnitName(f"stage-{stage}"): (stage,) for stage in range(self.stages)}
        if self.tied:
            units[TIED] = tuple(sorted({0, self.stages - 1}))
        return units

    def y(self, stage: int, step: int, index: int) -> str:
        """What leaves a stage forward: the text that a faultless run would produce."""
        version = self.version(step, index)
        return f"tokens {step}.{index}" + "".join(f">{s}v{version}" for s in range(stage + 1))

    def dx(self, stage: int, step: int, index: int) -> str:
        """What leaves a stage backward."""
        return self.y(self.stages - 1, step, index) + "".join(f"<{s}" for s in range(self.stages - 1, stage - 1, -1))

    def loss(self, step: int, index: int) -> float:
        return 0.1 * (step + 1) + 0.37 * index


class Judge:
    """Reads the devices: what was really added where, and what the commits make effective."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.means: dict[tuple[UnitName, Round], dict[int, Counter[int]]] = {}  # of a complete round, per stage
        self.rows: list[CommitRow] = []

    def averaged(self, average: Average, parts: dict[PeerId, Counter[int]], stage_of: dict[PeerId, int]) -> None:
        sums: dict[int, Counter[int]] = {}
        for peer, part in parts.items():
            sums.setdefault(stage_of[peer], Counter()).update(part)
        once = Counter(range(self.shape.microbatches))
        for stage, total in sums.items():
            assert total == once, f"stage {stage} of step {average.step} averages {dict(total)}"
        assert set(sums) == set(self.shape.units()[average.unit])
        self.means[average.unit, average.round] = sums

    def written(self, row: CommitRow) -> None:
        assert row.step == len(self.rows), "rows in order, once each"
        self.rows.append(row)
        assert row.skip == any(step == row.step for step, _, _ in self.shape.not_finite)
        total = 0.0
        for index in range(self.shape.microbatches):
            total += self.shape.loss(row.step, index)
        assert row.loss == total / row.tokens
        if row.skip:
            assert not row.rounds
            return
        for unit in self.shape.units():
            assert (unit, row.rounds[unit]) in self.means, "only a complete round can be effective"


class Twin:
    """The ledger, too simple to be wrong: all that was heard, judged anew from the start each time."""

    def __init__(self) -> None:
        self.heard: list[tuple[PeerId, Accumulated | Void | None]] = []

    def holders(self, step: int) -> dict[tuple[int, int], set[PeerId]]:
        found: dict[tuple[int, int], set[PeerId]] = {}
        floor: dict[PeerId, int] = {}
        for peer, what in self.heard:
            match what:
                case None:  # gone
                    for holders in found.values():
                        holders.discard(peer)
                case Void() if what.step == step:
                    floor[peer] = what.attempt
                    for holders in found.values():
                        holders.discard(peer)
                case Accumulated() if what.microbatch.step == step and what.attempt > floor.get(peer, 0):
                    found.setdefault((what.stage, what.microbatch.index), set()).add(peer)
        return {key: holders for key, holders in found.items() if holders}


@dataclass
class Frame:
    """A tensor or (text None) a question on its way to `to`."""

    to: PeerId
    microbatch: Microbatch
    direction: Direction
    sender: Hop
    text: str | None
    to_hop: Hop | None = None


class Server:
    """The flow around one CellTable, as rules 1 to 6 of stage_server/brain/cell.py describe it."""

    def __init__(self, world: World, peer: PeerId, stage: int) -> None:
        self.world, self.peer, self.stage = world, peer, stage
        self.hop = Hop(peer, 1, 0, f"at {peer}")
        shape = world.shape
        self.cells = CellTable(stage, shape.stages, 0, 0, shape.staleness, peer=peer, incarnation=1)
        some_are_late = 0 < shape.overlap < shape.microbatches
        self.intake = WorkQueue(
            late_behind=some_are_late and stage < shape.stages - 1, patience=4 * max(1, shape.owed_max)
        )
        self.device: deque[Compute | Forget | ForgetSums | Average | Commit] = deque()  # the compute thread's queue
        self.results: deque[tuple[Compute, str, float] | tuple[Average, Counter[int]]] = deque()
        self.running, self.running_max = 0, 2 if some_are_late else 1  # computations on the device
        self.inputs: dict[tuple[Microbatch, Direction], str] = {}
        self.outputs: dict[tuple[Microbatch, Direction], str] = {}
        self.graphs: set[Microbatch] = set()
        self.owed: set[Microbatch] = set()  # gradients of weights that come later
        self.sums: dict[int, Counter[int]] = {}
        self.averages: dict[tuple[int, UnitName], Average] = {}
        self.waiting: list[Average] = []
        self.digest = f"start {stage}"
        self.weights = 0  # the version that the device holds
        self.commands: deque[Command] = deque()
        self.old_commands: list[Command] = []
        self.committed: deque[Committed] = deque(maxlen=2)
        self.loaded: Loaded | None = None
        self.attached = True
        self.events: deque[Event] = deque()
        self.old_events: list[Event] = []

    # Commands and tensors

    def command(self, command: Command) -> None:
        match command:
            case LoadStage():
                units = [u for u, stages in self.world.shape.units().items() if self.stage in stages]
                sizes = tuple(UnitSize(unit, 1000) for unit in units)
                self.loaded = Loaded(JOB, 0, self.stage, 0, self.digest, sizes)
                self.tell(self.loaded)
            case Route():
                self.carry_out(self.cells.route(command))
            case Void():
                self.carry_out(self.cells.void(command.step, command.attempt))
            case Average():
                key = (command.step, command.unit)
                if command.step >= self.cells.version and self.is_news(command):
                    self.averages[key] = command
                    self.waiting = [waiting for waiting in self.waiting if (waiting.step, waiting.unit) != key]
                    self.waiting.append(command)
                    if command.ahead:
                        self.carry_out(self.cells.seal_when(command.step, self.expected(command)))
                    else:
                        self.carry_out(self.cells.seal(command.step))
                elif not command.ahead and any(waiting.round == command.round for waiting in self.waiting):
                    self.carry_out(self.cells.seal(command.step))
            case AbortRound():
                held = self.averages.get((command.step, command.unit))
                if held is not None and held.round == command.round:
                    del self.averages[command.step, command.unit]
                    self.waiting = [waiting for waiting in self.waiting if waiting.round != command.round]
                    self.carry_out(self.cells.unseal(command.step))
            case Commit():
                if command.step == self.cells.version:
                    for unit_round in command.rounds:
                        assert (unit_round.unit, unit_round.round) in self.world.judge.means
                    self.device.append(command)
                    self.averages = {key: one for key, one in self.averages.items() if one.step != command.step}
                    self.carry_out(self.cells.commit(command.step, command.version))
            case SaveStage():
                self.tell(Saved(JOB, 0, command.version, self.stage, (), again=command.again))
            case Release():
                pass
            case _:
                raise AssertionError(command)

    def is_news(self, average: Average) -> bool:
        """A round that is older than one seen, or the same, is a repeat."""
        key = (average.step, average.unit)
        seen = [old for old in self.old_commands if isinstance(old, Average) and (old.step, old.unit) == key]
        return all(old.round < average.round for old in seen)

    def expected(self, average: Average) -> str:
        return next(member.digest for member in average.members if member.peer == self.peer)

    def frame(self, frame: Frame) -> None:
        if frame.text is None:
            self.carry_out(self.cells.need(frame.microbatch, frame.direction, frame.sender))
            return
        arrival = self.cells.arrived(frame.microbatch, frame.direction, frame.sender.attempt)
        if arrival.accepted:
            self.inputs[frame.microbatch, frame.direction] = frame.text
        self.carry_out(arrival.actions)

    def carry_out(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case Compute():
                    assert self.intake.put(action)
                case Emit(microbatch, direction, to, attempt):
                    text = self.outputs[microbatch, direction]
                    self.world.post(Frame(to.peer, microbatch, direction, self.as_hop(attempt), text, to))
                case Ask(microbatch, direction, to, attempt):
                    self.world.post(Frame(to.peer, microbatch, direction, self.as_hop(attempt), None, to))
                case Forget(microbatch):
                    self.intake.discard(microbatch)
                    for book in (self.inputs, self.outputs):
                        for side in Direction:
                            book.pop((microbatch, side), None)
                    self.device.append(action)
                case DropOutput(microbatch, direction):
                    self.outputs.pop((microbatch, direction), None)
                case ForgetSums():
                    self.device.append(action)
                case Sealed(step):
                    self.device.extend(average for average in self.waiting if average.step == step)
                    self.waiting = [average for average in self.waiting if average.step != step]
                case Report(event):
                    self.tell(event)
                case _:
                    assert_never(action)

    def as_hop(self, attempt: int) -> Hop:
        return Hop(self.peer, 1, attempt, self.hop.address)

    def tell(self, event: Event) -> None:
        if self.attached:
            self.events.append(event)

    def detach(self) -> None:
        """The session broke: what was under way is lost in both directions."""
        self.attached = False
        self.commands.clear()
        self.events.clear()
        self.old_events.clear()  # nothing of an old session is heard again

    def attach(self) -> None:
        """Dial again: rounds are given up, and Hello says what is held."""
        self.attached = True
        self.averages.clear()
        self.waiting.clear()
        self.carry_out(self.cells.unseal_all())
        hello = Hello(
            self.peer, 1, 1, "0", self.hop.address, "", "cpu", 1, 0, -1, JOB, 0, self.cells.version,
            self.cells.open_cells(), self.stage, self.cells.newest_attempt(),
        )  # fmt: skip
        for event in (hello, *((self.loaded,) if self.loaded else ()), *self.committed):
            self.tell(event)

    # The compute thread

    def take(self) -> None:
        work = self.intake.take()
        begun = None
        if work is not None:
            has_room = self.cells.owed() < self.world.shape.owed_max
            begun = self.cells.begin(work, split=has_room and self.world.splits.random() < 0.5)
        if begun is not None:
            self.running += 1
            self.device.append(begun)

    def compute(self) -> None:
        """The device does the next thing in its queue."""
        match job := self.device.popleft():
            case Compute():
                self.results.append(self.forward(job) if job.direction is FORWARD else self.backward(job))
            case Forget(microbatch):
                self.graphs.discard(microbatch)
                self.owed.discard(microbatch)
            case ForgetSums(step):
                self.sums.pop(step, None)
            case Average(step=step):
                self.results.append((job, Counter(self.sums.get(step, Counter()))))
            case Commit(step=step):
                self.sums.pop(step, None)
                self.owed = {microbatch for microbatch in self.owed if microbatch.step > step}
                self.weights = job.version
                self.digest = f"{self.digest}, {step} {job.skip}"
                self.committed.append(Committed(0, step, job.version, self.stage, self.digest))
                self.tell(self.committed[-1])

    def forward(self, work: Compute) -> tuple[Compute, str, float]:
        shape, microbatch = self.world.shape, work.microbatch
        assert work.version == shape.version(microbatch.step, microbatch.index)
        assert self.weights - shape.staleness <= work.version <= self.weights, "weights that the device does not hold"
        before = shape.y(self.stage - 1, microbatch.step, microbatch.index)
        if self.stage:
            # The input may have been forgotten since: then the result will be dropped as well.
            x = self.inputs.pop((microbatch, FORWARD), None)
            assert x in (before, None)
        self.graphs.add(microbatch)
        loss = shape.loss(microbatch.step, microbatch.index) if self.stage == shape.stages - 1 else 0.0
        return work, f"{before}>{self.stage}v{work.version}", loss

    def backward(self, work: Compute) -> tuple[Compute, str, float]:
        shape, microbatch = self.world.shape, work.microbatch
        step, index = microbatch.step, microbatch.index
        needed = self.owed if work.part is Gradients.WEIGHTS else self.graphs
        assert microbatch in needed, f"nothing is kept for {work} at {self.peer}"
        needed.discard(microbatch)
        if work.part is Gradients.INPUTS:
            assert microbatch not in self.owed, "its gradient would come twice"
            self.owed.add(microbatch)
        if work.part is not Gradients.WEIGHTS and self.stage < shape.stages - 1:
            g = self.inputs.pop((microbatch, BACKWARD), None)
            assert g in (shape.dx(self.stage + 1, step, index), None)
        if work.accumulate and (step, self.stage, index) not in shape.not_finite:
            self.sums.setdefault(step, Counter())[index] += 1
        return work, shape.dx(self.stage, step, index), 0.0

    def result(self) -> None:
        """A result of the device reaches the replica."""
        first, *rest = self.results.popleft()
        if isinstance(first, Average):
            self.part_read(first, rest[0])
            return
        self.running -= 1
        microbatch, side = first.microbatch, first.direction
        ends = (self.stage == self.world.shape.stages - 1) if side is FORWARD else (self.stage == 0)
        if not ends and first.part is not Gradients.WEIGHTS:
            self.outputs[microbatch, side] = rest[0]
        if side is FORWARD:
            self.carry_out(self.cells.computed_forward(first, rest[1], 0.25))
        else:
            finite = (microbatch.step, self.stage, microbatch.index) not in self.world.shape.not_finite
            finite = finite or first.part is Gradients.INPUTS
            self.carry_out(self.cells.computed_backward(first, finite, 0.5))

    def part_read(self, average: Average, part: Counter[int]) -> None:
        if self.averages.get((average.step, average.unit)) != average:
            return  # aborted since
        assert set(part) == self.cells.accumulated(average.step), "what the table says is what the device holds"
        assert set(part.values()) <= {1}
        if self.cells.set_digest(average.step) != self.expected(average):
            self.fail_round(average, f"{SetMismatch.code}: holds {sorted(part)}", RoundFault.SET)
            return
        self.world.part(average, self.peer, part)

    def fail_round(self, average: Average, reason: str, cause: RoundFault = RoundFault.MEMBER) -> None:
        self.tell(RoundFailed(0, average.step, average.unit, average.round, reason, "", cause))


# These are no decisions: words for people, what follows of a member from its name and set, what only islands say, how
# often a checkpoint was begun, and the stamp of a hop, which a route gets on its way out of the brain.
LEFT_OUT = {"reason", "hint", "Member.stage", "Member.microbatches", "LoadStage.held", "SaveStage.island"} | {
    *("Route.stamp", "Member.group", "SaveStage.again")
}


def spelled(value: object) -> str:
    """What a decision says, less what is LEFT_OUT."""
    if is_dataclass(value):
        kind = type(value).__name__
        names = [field.name for field in fields(value) if not {field.name, f"{kind}.{field.name}"} & LEFT_OUT]
        facts = [spelled(getattr(value, name)) for name in names]
        return f"{type(value).__name__}({', '.join(facts)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {spelled(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(spelled, value))}]"
    return str(value)


class World:
    """The brain, the servers, and all that is on its way between them."""

    def __init__(self, shape: Shape, rng: Random) -> None:
        self.shape, self.rng = shape, rng
        self.splits = copy(rng)  # which backwards give dx first; no draw of `rng` itself
        self.judge, self.twin = Judge(shape), Twin()
        self.now_s = 0.0
        self.servers: dict[PeerId, Server] = {}
        for stage, count in enumerate(shape.pools):
            for number in range(count):
                peer = PeerId(f"s{stage}-{number}")
                self.servers[peer] = Server(self, peer, stage)
        self.stage_of = {peer: server.stage for peer, server in self.servers.items()}
        self.frames: list[Frame] = []
        self.old_frames: list[Frame] = []
        self.rows: list[CommitRow] = []
        self.parts: dict[tuple[UnitName, Round], tuple[Average, dict[PeerId, Counter[int]]]] = {}
        self.link_failures: Counter[int] = Counter()
        self.finished = False
        self.notes: list[str] = []
        self.seen: Counter[str] = Counter()
        self.decided = hashlib.sha256()  # over all outputs of all brains, in order
        self.epoch = 0
        self.brain = self.new_brain()
        replicas = [ReplicaRecord(peer, 1, server.hop.address, server.stage) for peer, server in self.servers.items()]
        self.heed(self.brain.step(Start(tuple(replicas)), 0.0))
        for server in self.servers.values():
            self.run_until_quiet(server)
        self.validate()

    def new_brain(self) -> JobBrain:
        shape = self.shape
        self.epoch += 1
        return JobBrain(
            BrainSettings(
                job=JOB,
                epoch=self.epoch,
                timeline=0,
                steps=shape.steps,
                microbatches=shape.microbatches,
                split=(1,) * shape.stages,
                spec_json="{}",
                overlap=shape.overlap,
                sync_steps=shape.sync_steps,
                max_in_flight=None,
                units=shape.units(),
                grad_clip_norm=1.0,
                averaging_timeout_s=1.0,
                fail_on_nonfinite=False,
                learning_rate=lambda step: 0.5**step,
                tokens_of=lambda step: 7,
                routing=shape.routing,
                recover=True,
            ),
            self.rng,
        )

    def restart(self, rng: Random) -> None:
        """The scheduler is killed; whether the row that it was writing became durable, chance decides."""
        self.seen["restart"] += 1
        for row in self.rows:
            if rng.random() < 0.5:
                assert self.judge.rows.pop() is row
        self.rows.clear()
        for server in self.servers.values():
            server.detach()
        self.twin.heard.clear()
        self.brain = self.new_brain()
        rows = tuple(self.judge.rows[-2:])
        known = {server.peer: server.stage for server in self.servers.values()}
        self.heed(self.brain.step(Resumed(known, len(self.judge.rows), rows, (), 2.0), self.now_s))
        for server in rng.sample(list(self.servers.values()), len(self.servers)):
            server.attach()

    def run_until_quiet(self, server: Server) -> None:
        while server.commands or server.events:
            if server.commands:
                self.deliver_command(server)
            if server.events:
                self.deliver_event(server)

    def heed(self, outputs: list[Output]) -> None:
        for output in outputs:
            if not isinstance(output, Note | Released):  # words, and what Send(Release) has said
                self.decided.update(spelled(output).encode())
            match output:
                case Send(peer, command):
                    if peer in self.servers and self.servers[peer].attached:
                        self.servers[peer].commands.append(command)
                    if isinstance(command, Void):
                        self.twin.heard.append((peer, command))
                        self.seen["void"] += 1
                case WriteCommit(row):
                    self.judge.written(row)
                    self.rows.append(row)
                case BeginCheckpoint():
                    pass
                case PublishCheckpoint(version=version):
                    self.heed(self.brain.step(CheckpointKept(version), self.now_s))
                case Finish():
                    self.finished = True
                case Fail() | Stopped() | EnterState() | DropCheckpoint():
                    raise AssertionError(f"the job failed: {output}")
                case Admitted() | Independent() | Left():
                    raise AssertionError(f"nobody was to come or go: {output}")
                case Released():
                    pass
                case Note():
                    self.notes.append(output.message)
                case _:
                    assert_never(output)

    def post(self, frame: Frame) -> None:
        if frame.to in self.servers:
            self.frames.append(frame)

    def part(self, average: Average, peer: PeerId, part: Counter[int]) -> None:
        key = (average.unit, average.round)
        _, parts = self.parts.setdefault(key, (average, {}))
        parts[peer] = part
        if len(parts) == len(average.members):
            del self.parts[key]
            self.judge.averaged(average, parts, self.stage_of)
            for member in average.members:
                if member.peer in self.servers:
                    norms = (ParameterNorm(str(average.unit), 0.25),)
                    mean = f"mean {key}"
                    done = Averaged(0, average.step, average.unit, average.round, mean, norms, 0.1)
                    self.servers[member.peer].tell(done)

    # What can happen

    def deliver_command(self, server: Server) -> None:
        command = server.commands.popleft()
        server.command(command)
        server.old_commands.append(command)

    def deliver_event(self, server: Server) -> None:
        event = server.events.popleft()
        server.old_events.append(event)
        self.hear(server.peer, event)

    def hear(self, peer: PeerId, event: Event) -> None:
        self.now_s += 0.001
        if isinstance(event, Accumulated):
            self.twin.heard.append((peer, event))
        if isinstance(event, Hello) and self.brain.mode is Mode.GATHERING:
            for cell in event.cells:
                if cell.accumulated:
                    told = Accumulated(cell.microbatch, event.stage, cell.attempt, cell.finite, cell.loss, 0, 0, 0)
                    self.twin.heard.append((peer, told))
        self.heed(self.brain.step(Happened(peer, event), self.now_s))

    def kill(self, server: Server) -> None:
        self.seen["kill"] += 1
        del self.servers[server.peer]
        self.frames = [frame for frame in self.frames if frame.to != server.peer]
        self.twin.heard.append((server.peer, None))
        self.heed(self.brain.step(PeerGone(server.peer, "killed"), self.now_s))

    def act(self, rng: Random, faults: float) -> bool:
        """One random thing happens; False if nothing can but faults."""
        if rng.random() < faults:
            self.fault(rng)
        choices: list[tuple[str, Server]] = []
        for server in self.servers.values():
            choices += [("command", server)] * bool(server.commands)
            choices += [("event", server)] * bool(server.events)
            choices += [("compute", server)] * bool(server.device)
            choices += [("result", server)] * bool(server.results)
            choices += [("take", server)] * (len(server.intake) > 0 and server.running < server.running_max)
        total = len(choices) + min(len(self.frames), 4) + len(self.rows)
        away = [server for server in self.servers.values() if not server.attached]
        if not total and away and self.brain.mode is Mode.GATHERING:
            away[0].attach()  # in time: else its stage might be lost
            return True
        if not total and self.brain.due_s < math.inf:
            self.now_s = self.brain.due_s
            self.heed(self.brain.step(Tick(), self.now_s))
            return True
        if not total:
            return False
        pick = rng.randrange(total)
        if pick < len(choices):
            what, server = choices[pick]
            match what:
                case "command":
                    self.deliver_command(server)
                case "event":
                    self.deliver_event(server)
                case "compute":
                    server.compute()
                case "result":
                    server.result()
                case "take":
                    server.take()
        elif pick < len(choices) + len(self.rows):
            row = self.rows.pop(0)
            self.heed(self.brain.step(RowDurable(row.step), self.now_s))
        else:
            frame = self.frames.pop(rng.randrange(len(self.frames)))
            self.old_frames = [*self.old_frames[-50:], frame]
            self.servers[frame.to].frame(frame)
        return True

    def fault(self, rng: Random) -> None:
        server = rng.choice(list(self.servers.values()))
        match rng.choice(FAULTS):
            case "lose" if self.frames:
                self.frames.pop(rng.randrange(len(self.frames)))
            case "repeat frame" if self.old_frames:
                frame = rng.choice(self.old_frames)
                if frame.to in self.servers:
                    self.servers[frame.to].frame(frame)
            case "repeat command" if server.old_commands:
                command = rng.choice(server.old_commands)
                if not isinstance(command, LoadStage | SaveStage):
                    server.command(command)
            case "repeat event" if server.old_events:
                event = rng.choice(server.old_events)
                if not isinstance(event, Hello):  # a session has one, and it is the first
                    self.hear(server.peer, event)
            case "suspect":
                self.seen["suspect"] += 1
                self.heed(self.brain.step(PeerSuspect(server.peer, "looks silent"), self.now_s))
            case "back":
                self.heed(self.brain.step(PeerBack(server.peer), self.now_s))
            case "evict" if self.shape.evicting and server.outputs:
                key = rng.choice(sorted(server.outputs))
                del server.outputs[key]
                server.carry_out(server.cells.evicted(*key))
            case "session" if not self.finished:
                self.break_session(server)
            case "undelivered" if self.frames and not self.finished:
                frame = rng.choice(self.frames)  # it may arrive all the same
                step = 1 if frame.direction is FORWARD else -1
                stage = self.stage_of[frame.sender.peer] + (step if frame.text is not None else -step)
                if frame.sender.peer in self.servers and frame.to in self.servers:
                    hops = [hop for hop in (frame.to_hop,) if hop is not None]
                    for hop in hops:
                        event = Undelivered(frame.microbatch, stage, hop.peer, hop.attempt, "no answer")
                        self.servers[frame.sender.peer].tell(event)
            case "link" if server.averages:
                average = rng.choice(list(server.averages.values()))
                if self.link_failures[average.step] < 3:
                    self.link_failures[average.step] += 1
                    server.fail_round(average, f"{PeerUnavailable.code}: no answer")

    def break_session(self, server: Server) -> None:
        """It is noticed at once, or only when the peer dials again; which it does at once here, or later."""
        self.seen["session"] += 1
        if server.attached:
            server.detach()
            if self.rng.random() < 0.7:
                self.heed(self.brain.step(PeerSuspect(server.peer, "session broke", session_lost=True), self.now_s))
        else:
            server.attach()

    def calm(self) -> None:
        """Faults stop: the job must end, with every judge content."""
        for server in self.servers.values():
            if not server.attached:
                server.attach()
        for server in self.servers.values():
            self.heed(self.brain.step(PeerBack(server.peer), self.now_s))
        idle = 0
        for _ in range(30_000):
            if self.act(self.rng, 0.0):
                idle = 0
                continue
            if self.finished:
                break
            idle += 1
            assert idle < 5, f"nothing moves: {self.brain.waiting_for()}\n" + self.stories()
            for server in list(self.servers.values()):
                server.carry_out(server.cells.lacking())
        assert self.finished
        assert len(self.judge.rows) == self.shape.steps
        for server in self.servers.values():
            assert not server.sums, "sums are consumed"
            assert not server.outputs
            assert not server.graphs
            assert not server.inputs

    def stories(self) -> str:
        lines = []
        for step in self.brain._state.ledger.open_steps():
            for index in range(self.shape.microbatches):
                lines += [f"-- {step}.{index}", *self.brain.story(step, index)]
        return "\n".join(lines)

    def validate(self) -> None:
        self.brain.validate()
        for server in self.servers.values():
            server.cells.validate()
        ledger = self.brain._state.ledger
        for step in ledger.open_steps():
            book = ledger._steps[step]
            real = {
                (stage, index): set(entry.holders)
                for stage, entries in enumerate(book.entries)
                for index, entry in enumerate(entries)
                if entry.holders
            }
            if self.brain._state.progress.runs[step].can_be_redone:
                assert real == self.twin.holders(step)


def chaos(seed: int, *, partly: bool = False) -> World:
    """A whole job under faults, from one number; `partly`: only some microbatches of a step use older weights."""
    rng = Random(seed)
    stages = rng.choice([1, 2, 2, 3])
    pools = tuple(rng.choice([1, 2, 2, 3]) for _ in range(stages))
    microbatches, steps = rng.choice([2, 3, 5]), rng.choice([2, 3])
    late = microbatches * rng.choice([0, 0, 1])
    shape = Shape(
        pools=pools,
        microbatches=microbatches,
        steps=steps,
        overlap=1 + seed % (microbatches - 1) if partly else late,
        tied=rng.random() < 0.4,
        not_finite=frozenset({(1, stages - 1, 1)} if rng.random() < 0.2 else ()),
        routing=tuple(POLICIES)[seed % len(POLICIES)],
        sync_steps=seed % 3 if partly else 0,
        owed_max=seed % 5,
    )
    world = World(shape, rng)
    kill_chance = rng.choice([0.0, 0.002, 0.01])
    faults = rng.choice([0.02, 0.1, 0.3])
    for number in range(2000):
        if not world.act(rng, faults) and world.finished:
            break
        if number % 10 == 0:
            world.validate()
        if rng.random() < kill_chance / 2 and not world.finished:
            world.restart(rng)
        if rng.random() < kill_chance and not world.finished:
            stages_left = Counter(server.stage for server in world.servers.values())
            spare = [server for server in world.servers.values() if stages_left[server.stage] > 1]
            if spare:
                world.kill(rng.choice(spare))
    world.calm()
    world.validate()
    return world


@dataclass(frozen=True, slots=True)
class Run:
    """What is kept of a chaos."""

    seen: Counter[str]  # what happened, by kind
    replayed: int
    decided: str  # the digest of every output of every brain, less the words for people


@cache
def ran(seed: int, *, partly: bool) -> Run:
    """What became of `chaos(seed)`: played once for all tests that ask."""
    world = chaos(seed, partly=partly)
    return Run(world.seen, world.brain.counts().replayed, world.decided.hexdigest())
