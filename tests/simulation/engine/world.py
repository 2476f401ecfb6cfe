"""A whole system in virtual time: real brain, flows, cells and stage; simulated processes, links and database faults.

Each scheduler and each stage server is a process of its own that can be frozen, killed and started again. Everything
that passes the ports goes into the history; faults.py does the harm, checkers.py judges afterwards.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import structlog

from scheduler.api.sessions import COMMANDS_WAITING_MAX
from scheduler.assembly import Scheduler, assemble
from scheduler.brain.fleet.membership import Membership
from scheduler.jobs.commands import Jobs
from scheduler.jobs.job import Announcer, Job
from scheduler.jobs.ports import SchedulerPorts
from scheduler.metrics import SchedulerMetrics
from scheduler.storage.checkpoints.catalog import CheckpointCatalog
from scheduler.storage.database import Database, _next_epoch
from scheduler.storage.job_record import JobTokens
from scheduler.storage.stores import Stores
from stage_server.brain.neighbours import EARLY_BYTES_MAX
from stage_server.brain.work_queue import ORDERS_MAX
from stage_server.metrics import StageServerMetrics
from stage_server.session.server import ServerPorts, ServerSettings, StageServer
from swarm.checkpoint.reader import fault_of, list_checkpoints
from swarm.checkpoint.storage import Files, LocalStorage, Storage
from swarm.errors import DatabaseUnavailable, SwarmError
from swarm.job.spec import JobSpec
from swarm.model.stage import Stage
from swarm.process.logs import get_logger
from swarm.types import PROTOCOL_VERSION, JobId, PeerId, PeerState
from swarm.wire.messages import Averaged, Boundary, Command, Commit, Event, Hello, TensorHeader
from tests.simulation.engine.counting import CountingStage, watched
from tests.simulation.engine.history import (
    Commanded,
    Delivered,
    Ended,
    EpochTaken,
    Fault,
    Gauge,
    Held,
    History,
    Kept,
    Logged,
    Reported,
    RowStored,
    Started,
)
from tests.simulation.engine.scenario import DatabaseOutage, Disk, Failpoint, Scenario, Shape
from tests.support.databases import fresh_engine
from tests.support.devices import SimDevice
from tests.support.sim import loop as sim
from tests.support.sim.fabric import Observer
from tests.support.sim.network import SimNetwork
from tests.support.sim.processes import Process
from tests.support.sim.weather import Weather

SCHEDULER = "scheduler"
WALL_START_UNIX_S = 1_700_000_000.0
SAMPLE_S = 0.2
PATIENCE_S_MAX = 1.0  # between two dials of a stage server: a scheduler that restarts is found soon
LOG_LINES_KEPT = 400


@dataclass(slots=True)
class Peer:
    """A stage server's process, dead or alive."""

    name: str
    incarnation: int
    process: Process
    device: SimDevice | None = None
    server: StageServer | None = None

    @property
    def address(self) -> str:
        return f"address-of-{self.name}"

    @property
    def is_up(self) -> bool:
        return not self.process.is_dead and not self.process.is_frozen


@dataclass(slots=True)
class SchedulerSide:
    """The scheduler's process, dead or alive."""

    process: Process
    epoch: int = 0
    jobs: Jobs | None = None  # once it has read the database
    membership: Membership | None = None
    parts: Scheduler | None = None

    @property
    def is_up(self) -> bool:
        return self.jobs is not None and not self.process.is_dead and not self.process.is_frozen


class World(Observer):
    """The system and its surroundings; made within a simulation."""

    def __init__(self, scenario: Scenario, shape: Shape, spec: JobSpec, tokens: JobTokens, root: Path) -> None:
        self.scenario = scenario
        self.shape = shape
        self.spec = spec
        self.tokens = tokens
        self.root = root
        self.history = History()
        self.is_calm = False
        self.job_id = ""
        links = scenario.links
        self.weather = Weather(
            sim.rng("weather"),
            delay_s=links.delay_s,
            loss=links.loss,
            duplicate_ratio=links.duplicate,
            copies_max=links.copies_max,
            late_s_max=links.late_s_max,
        )
        self.network = SimNetwork(sim.rng("network"), codec=links.encode, weather=self.weather, observer=self)
        self.engine = fresh_engine()
        self.peers: dict[str, Peer] = {}
        self.scheduler: SchedulerSide | None = None
        self.retired: set[str] = set()  # names that do not come back
        self.hurt: Counter[str] = Counter()  # by how many faults a peer is cut off long enough to count as lost
        self.restarts: dict[asyncio.Task[None], None] = {}
        self.edge_passed: dict[str, int] = {}
        self.log_lines: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._failpoints = [
            (fault, sim.rng(f"failpoint {fault.edge}"), [fault.at_most])
            for fault in scenario.faults
            if isinstance(fault, Failpoint)
        ]
        self.database = next((fault for fault in scenario.faults if isinstance(fault, DatabaseOutage)), None)
        self.dice = sim.rng("database")
        self.disk = next((fault for fault in scenario.faults if isinstance(fault, Disk)), None)
        self.disk_dice = sim.rng("disk")
        self._metrics: dict[str, StageServerMetrics] = {}
        self._maxima: dict[str, float] = {}
        self._held: dict[tuple[str, int], frozenset[tuple[int, int, str]]] = {}
        self._compute = sim.rng("compute")

    # Processes ---------------------------------------------------------------------------------------------------

    def start_peer(self, name: str) -> Peer:
        """Start a stage server, as a new incarnation if the name was used before."""
        known = self.peers.get(name)
        incarnation = known.incarnation + 1 if known is not None else 1
        process = Process(name, incarnation)
        peer = self.peers[name] = Peer(name, incarnation, process)
        self._held.pop((name, incarnation - 1), None)
        self.history.add(name, incarnation, Started())
        process.start(self._run_peer(peer)).add_done_callback(lambda task: self._ended(process, task))
        return peer

    async def _run_peer(self, peer: Peer) -> None:
        rng = Random(self._compute.random())
        low, high = self.shape.compute_s
        async with asyncio.TaskGroup() as tasks:
            peer.device = SimDevice(lambda: rng.uniform(low, high))
            tasks.create_task(peer.device.work_forever())
            if peer.name not in self._metrics:
                self._metrics[peer.name] = StageServerMetrics("0", PROTOCOL_VERSION)
            number = int("".join(filter(str.isdigit, peer.name)))
            site = f"site-{number % self.shape.sites}" if self.shape.sites else ""
            identity = Hello(
                *(PeerId(peer.name), peer.incarnation, PROTOCOL_VERSION, "0", peer.address, "", "cpu", 1, 1 << 30, -1),
                site=site,
            )

            async def find() -> str:
                return SCHEDULER

            def watch(what: object) -> None:
                if not peer.process.is_dead:
                    self.history.add(peer.name, peer.incarnation, what)

            ports = ServerPorts(
                peer.device,
                self.network.peer_links(peer.address),
                find,
                lambda address: self.network.scheduler_link(peer.address, address),
                tasks,
                self._metrics[peer.name],
                get_logger("stage-server"),
            )
            build = watched(Stage if self.shape.real else CountingStage, watch)
            peer.server = StageServer(identity, ports, ServerSettings(PATIENCE_S_MAX, build=build))
            self.network.add_receiver(peer.address, peer.server, donor=peer.server)
            await peer.server.serve()

    def start_scheduler(self) -> SchedulerSide:
        """Start the scheduler on the database as it is."""
        before = self.scheduler
        process = Process(SCHEDULER, before.process.incarnation + 1 if before is not None else 1)
        side = self.scheduler = SchedulerSide(process)
        self.history.add(SCHEDULER, process.incarnation, Started())
        process.start(self._run_scheduler(side)).add_done_callback(lambda task: self._ended(process, task))
        return side

    async def _run_scheduler(self, side: SchedulerSide) -> None:
        epoch = side.epoch = _next_epoch(self.engine)
        self.history.add(SCHEDULER, side.process.incarnation, EpochTaken(epoch))
        store = FaultyDatabase(Database(self.engine, epoch, None), self, side.process)
        plain = Stores.under(self.root, store)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            ports = SchedulerPorts(
                replace(plain, checkpoints=FaultyCatalog(self.root, self, side.process)),
                Announcer(),
                SchedulerMetrics("0", PROTOCOL_VERSION),
                Random(f"{epoch}/{self._compute.random()}"),
                lambda: WALL_START_UNIX_S + loop.time(),
                get_logger("scheduler"),
            )
            scheduler = assemble(ports, tasks)
            await scheduler.load()
            self.network.add_handler(SCHEDULER, scheduler.sessions)
            scheduler.start()
            side.parts, side.jobs, side.membership = scheduler, scheduler.jobs, scheduler.membership
            await asyncio.Event().wait()

    def _ended(self, process: Process, task: asyncio.Task[Any]) -> None:
        if process.is_dead or task.cancelled():
            return
        error = task.exception()
        process.kill()
        self.network.kill(SCHEDULER if process.name == SCHEDULER else self.peers[process.name].address)
        self.history.add(process.name, process.incarnation, Ended(f"{_leaves(error)}", unexpected=True))

    def kill(self, process: Process, cause: str, down_s: float | None = None) -> None:
        """kill -9, at exactly this point; started again `down_s` later (in the calm phase if None)."""
        if process.is_dead:
            return
        self.history.add(process.name, process.incarnation, Ended(f"killed: {cause}"))
        is_scheduler = process.name == SCHEDULER
        process.kill()  # cancels, so nothing of it runs before its connections break
        self.network.kill(SCHEDULER if is_scheduler else self.peers[process.name].address)
        if is_scheduler and self.scheduler is not None:
            self.scheduler.jobs = None
        if down_s is not None:
            self.later(down_s, lambda: self.revive(process.name))

    def revive(self, name: str) -> None:
        """Start the process again if it is dead."""
        if name == SCHEDULER:
            if self.scheduler is None or self.scheduler.process.is_dead:
                self.start_scheduler()
        elif name in self.peers and name not in self.retired and self.peers[name].process.is_dead:
            self.start_peer(name)

    def later(self, delay_s: float, act: Callable[[], object]) -> None:
        """Do something later, outside of all processes."""

        async def wait() -> None:
            await asyncio.sleep(delay_s)
            act()

        task = sim_task(wait())
        self.restarts[task] = None
        task.add_done_callback(lambda done: self.restarts.pop(done, None))

    # What passes ---------------------------------------------------------------------------------------------------

    def sending(self, owner: str, address: str, header: TensorHeader) -> None:
        peer = self.peer_at(owner)
        if isinstance(header, Boundary):
            self.passes("compute/send", peer.process)

    def delivered(self, owner: str, address: str, header: TensorHeader, error: SwarmError | None) -> None:
        to = self.peer_at(address)
        self.history.add(to.name, to.incarnation, Delivered(header, error.code if error is not None else ""))
        sender = self.peer_at(owner)
        if isinstance(header, Boundary) and sender.incarnation == header.incarnation:
            self.passes("send/ack", sender.process)

    def event_leaves(self, owner: str, event: Event) -> None:
        if isinstance(event, Averaged):
            self.passes("reduce/Averaged", self.peer_at(owner).process)

    def event_arrived(self, owner: str, event: Event) -> None:
        peer = self.peer_at(owner)
        self.history.add(peer.name, peer.incarnation, Reported(event))

    def command_arrived(self, owner: str, epoch: int, command: Command) -> None:
        peer = self.peer_at(owner)
        self.history.add(peer.name, peer.incarnation, Commanded(epoch, command))
        if isinstance(command, Commit):
            self.passes("Commit/apply", peer.process)

    def passes(self, edge: str, process: Process) -> None:
        """A process passes an edge; a failpoint there may kill it now."""
        self.edge_passed[edge] = self.edge_passed.get(edge, 0) + 1
        if self.is_calm or process.is_dead:
            return
        for fault, dice, left in self._failpoints:
            if fault.edge != edge or not left[0] or dice.random() >= fault.chance:
                continue
            if process.name != SCHEDULER and not self.can_lose(process.name):
                continue
            left[0] -= 1
            self.history.add("", 0, Fault(f"failpoint {edge}", f"{process.name}.{process.incarnation}"))
            self.kill(process, edge, dice.uniform(*fault.down_s))
            return

    def peer_at(self, address: str) -> Peer:
        return self.peers[address.removeprefix("address-of-")]

    # What is known -------------------------------------------------------------------------------------------------

    @property
    def job(self) -> Job | None:
        """The job as the running scheduler knows it."""
        side = self.scheduler
        return (
            side.jobs.registry.find(self.job_id) if side is not None and side.jobs is not None and self.job_id else None
        )

    def can_lose(self, name: str) -> bool:
        """Whether the peer serves no stage, or another replica of its stage is well, attached and serving."""
        replica = self._replica_of(name)
        if replica is None:
            return True
        side = self.scheduler
        if side is None or not side.is_up or side.membership is None:
            return False
        for other, peer in self.peers.items():
            theirs, known = self._replica_of(other), side.membership.get(PeerId(other))
            if other == name or theirs is None or known is None or not peer.is_up or self.hurt[other]:
                continue
            same = (theirs.job, theirs.me.stage) == (replica.job, replica.me.stage)
            if same and known.state is PeerState.SERVING and known.hello.incarnation == peer.incarnation:
                return True
        return False

    def stage_of(self, name: str) -> int | None:
        """The stage that the peer holds."""
        replica = self._replica_of(name)
        return None if replica is None else replica.me.stage

    def look_at_checkpoints(self) -> None:
        """Write down every checkpoint that a person would be shown, and what is wrong with it."""
        if self.job_id:
            storage = CheckpointCatalog(self.root, None).storage(self.spec, JobId(self.job_id))
            found, faults = list_checkpoints(storage, JobId(self.job_id))
            for checkpoint in found:
                self.history.add("", 0, Kept(checkpoint.step, checkpoint.weights_sha256, fault_of(checkpoint)))
            for fault in faults:
                self.history.add("", 0, Kept(0, "", str(fault)))

    def _replica_of(self, name: str) -> Any:
        peer = self.peers[name]
        return None if peer.server is None or peer.process.is_dead else peer.server._replica

    async def sample_forever(self) -> None:
        """Every SAMPLE_S, record how full everything is, and which outputs are held."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    def sample(self) -> None:
        """Record new maxima of everything bounded, and the outputs that replicas hold."""
        shape = self.shape
        open_cells = shape.microbatches * (2 + min(1, shape.overlap))
        for peer in self.peers.values():
            server, replica = peer.server, self._replica_of(peer.name)
            if server is None or replica is None:
                continue
            cells = sum(len(cells) for cells in replica.cells._cells.values())
            for name, value, limit in (
                ("cells", cells, open_cells),
                ("inputs", len(replica._inputs), 2 * open_cells),
                ("outputs", len(replica._outputs._held), 2 * open_cells),
                ("orders", len(replica._queue), min(ORDERS_MAX, open_cells)),
                ("graphs", len(replica._stage._graphs), open_cells),
                ("sums", len(replica._stage._sums), 2 + min(1, shape.overlap)),
                ("early slices", replica._rounds.mailbox.early.size_bytes, EARLY_BYTES_MAX),
                ("means", len(replica._rounds._means), 8 * (2 + min(1, shape.overlap))),
                ("events waiting", len(server._queue), 16 * open_cells),
                ("tasks", len(server._work._tasks), 16 * open_cells),
            ):
                self._gauge(name, value, limit)
            outputs = frozenset(
                (microbatch.step, microbatch.index, str(direction)) for microbatch, direction in replica._outputs._held
            )
            if outputs != self._held.get((peer.name, peer.incarnation)):
                self._held[peer.name, peer.incarnation] = outputs
                self.history.add(peer.name, peer.incarnation, Held(replica.cells.version, outputs))
        side = self.scheduler
        if side is not None and side.parts is not None and not side.process.is_dead:
            for _, session in side.parts.connections.all():
                self._gauge("commands waiting", session.commands.qsize(), COMMANDS_WAITING_MAX)
            job = self.job
            if job is not None and job.brain is not None:
                self._gauge("open steps", len(job.brain._state.ledger.open_steps()), 2 + min(1, shape.overlap))
                job.brain.validate()

    def _gauge(self, name: str, value: float, limit: float) -> None:
        if value > self._maxima.get(name, 0):
            self._maxima[name] = value
            self.history.add("", 0, Gauge(name, value, limit))

    def describe(self) -> str:
        """Where the system stands, for a person who wants to know why nothing moves."""
        lines = []
        for peer in self.peers.values():
            state = "dead" if peer.process.is_dead else "frozen" if peer.process.is_frozen else "up"
            lines.append(f"{peer.name}.{peer.incarnation} is {state}")
        job = self.job
        if job is None:
            return "\n".join([*lines, "no scheduler is up"])
        lines.append(f"job is {job.record.state.value}: {job.record.reason}")
        side = self.scheduler
        if side is not None and side.membership is not None:
            lines += [
                f"{known.hello.peer}.{known.hello.incarnation} is {known.state} (stage {known.stage}): {known.reason}"
                for known in side.membership.peers()
            ]
        if (brain := job.brain) is not None:
            lines.append(f"{brain.waiting_for()}; {brain.counts().committed_steps} steps committed")
            for step in brain._state.ledger.open_steps():
                for index in range(self.shape.microbatches):
                    lines += [f"  {step}.{index}: {line}" for line in brain.story(step, index)[-6:]]
        for peer in self.peers.values():
            replica = self._replica_of(peer.name)
            if replica is not None:
                lines.append(f"{peer.name} holds version {replica.cells.version}: {replica.cells.open_cells()}")
        return "\n".join(lines)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Keep what the product logs: the newest lines for a person, tracebacks for the checkers."""

        def keep(_logger: object, level: str, event: Any) -> Any:
            process = Process.current()
            who = f"{process.name}.{process.incarnation}" if process is not None else "world"
            facts = " ".join(f"{key}={value}" for key, value in event.items() if key not in ("event", "exc_info"))
            self.log_lines.append(
                f"{asyncio.get_running_loop().time():10.4f} s {who} {level}: {event.get('event')} {facts}"
            )
            if event.get("exc_info") and not (process is not None and process.is_dead):
                self.history.add(
                    process.name if process is not None else "",
                    process.incarnation if process is not None else 0,
                    Logged(f"{event.get('event')} {_leaves(event['exc_info'])}"),
                )
            raise structlog.DropEvent

        before = structlog.get_config()
        structlog.configure(processors=[keep], cache_logger_on_first_use=False)
        try:
            yield
        finally:
            structlog.configure(**before)

    async def close(self) -> None:
        """Stop everything."""
        for task in list(self.restarts):
            task.cancel()
        processes = [peer.process for peer in self.peers.values()]
        if self.scheduler is not None:
            processes.append(self.scheduler.process)
        for process in processes:
            process.kill()
        await self.network.close()
        await asyncio.wait([process.task for process in processes if process.task is not None], timeout=60.0)
        self.engine.dispose()


class FaultyDatabase:
    """The scheduler's database as one process sees it: refuses, loses answers, is slow; dies with the process.

    All calls of `Database` pass through here, also those that are added later.
    """

    def __init__(self, store: Database, world: World, process: Process) -> None:
        self._store = store
        self._world = world
        self._process = process
        self.epoch = store.epoch

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if not callable(real):
            return real
        writes = name.startswith(("put", "write", "set", "delete", "add"))

        async def call(*arguments: Any, **options: Any) -> Any:
            return await self._write(name, real, arguments, options) if writes else await real(*arguments, **options)

        return call

    async def _write(self, name: str, real: Any, arguments: Any, options: Any) -> Any:
        world, process = self._world, self._process
        if name == "put_commit":
            world.passes("Averaged/row", process)
        self._live()
        faults = None if world.is_calm else world.database
        if faults is not None:
            await asyncio.sleep(world.dice.uniform(*faults.seconds))
            if world.dice.random() < faults.refused:
                world.history.add("", 0, Fault("database refused", name))
                raise DatabaseUnavailable("database is locked")
        self._live()
        result = await real(*arguments, **options)
        unknown = faults is not None and world.dice.random() < faults.unknown
        if name == "put_commit":
            row = RowStored(arguments[0], self.epoch, arguments[1], told=not unknown)
            world.history.add(process.name, process.incarnation, row)
            world.passes("row/Commit", process)
        self._live()
        if unknown:
            world.history.add("", 0, Fault("database unknown", name))
            raise DatabaseUnavailable("the connection to the database broke; the outcome is unknown")
        return result

    def _live(self) -> None:
        if self._process.is_dead:
            raise asyncio.CancelledError


class FaultyCatalog(CheckpointCatalog):
    """Where the scheduler finds and writes checkpoints, on a disk that may fail; dies with the process."""

    def __init__(self, root: Path, world: World, process: Process) -> None:
        super().__init__(root, None)
        self._files = FaultyFiles(world, process)

    def storage(self, spec: JobSpec, job: JobId) -> Storage:
        plain = super().storage(spec, job)
        assert isinstance(plain, LocalStorage)
        return LocalStorage(plain.root, self._files)


class FaultyFiles(Files):
    """Operations on files that fail now and then, and always once the process is dead."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def make_folder(self, path: Path) -> None:
        self._may_fail("make folder")
        super().make_folder(path)

    def create(self, path: Path) -> BinaryIO:
        self._may_fail("create")
        return super().create(path)

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        try:
            self._may_fail("write")
        except OSError:
            if not self._process.is_dead:
                super().write(file, memoryview(content)[: len(content) // 2])  # torn
            raise
        super().write(file, content)

    def sync(self, file: BinaryIO) -> None:
        self._may_fail("sync")  # /dev/shm needs none

    def sync_folder(self, path: Path) -> None:
        self._may_fail("sync folder")

    def rename(self, source: Path, target: Path) -> None:
        self._may_fail("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._may_fail("unlink")
        super().unlink(path)

    def remove_folder(self, path: Path) -> None:
        self._may_fail("remove folder")
        super().remove_folder(path)

    def _may_fail(self, operation: str) -> None:
        world = self._world
        if self._process.is_dead:
            raise OSError(errno.EIO, "the process is dead")
        job = world.job
        done = job.progress.steps_done if job is not None else 0
        if world.disk is None or world.is_calm or not 0 < done < world.shape.steps:
            return
        if world.disk_dice.random() < world.disk.fails:
            full = world.disk_dice.random() < 0.5
            world.history.add("", 0, Fault("disk", f"{operation}: {'full' if full else 'input/output error'}"))
            raise OSError(errno.ENOSPC if full else errno.EIO, "injected")


def sim_task(work: Any) -> asyncio.Task[Any]:
    """A task that belongs to no process, whoever asks for it."""
    return asyncio.get_running_loop().create_task(work, context=Process.outside())


def _leaves(error: object) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_leaves(inner) for inner in error.exceptions)
    return repr(error)
