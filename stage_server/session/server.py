"""The stage server: a session with the scheduler, tensors from neighbours, and at most one job at a time.

When the session breaks, the replica works on with its neighbours for `orphan_timeout_s`. The server keeps dialling and
says in Hello what it holds; the scheduler then brings it up to date or releases it. Decisions: docs/decisions/006, 053.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, assert_never

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from stage_server.brain.passes import PassSlot
from stage_server.device import Device, DeviceDrain
from stage_server.metrics import StageServerMetrics
from stage_server.ports import Assignment, BuildStage, HubPolicy, JobTasks, MemoryBudget, ReplicaId, ReplicaPorts
from stage_server.replica.replica import Replica, can_fork, fork_replica, to_load
from stage_server.session.calibration import calibrate
from stage_server.session.gate import HeldPasses, place_of
from stage_server.session.relays import KnownRelays
from stage_server.state.joiner import JoinClient
from stage_server.state.loading import build_stage
from swarm.errors import (
    IncompatibleVersion,
    NotAdmitted,
    OutOfMemory,
    Refused,
    Revoked,
    SchedulerUnreachable,
    StaleMessage,
    SwarmError,
)
from swarm.limits import LINKS_TOLD_EVERY
from swarm.model.stage import Stage
from swarm.process.logs import Logger
from swarm.rpc.links.peers import SHUNNED_S, Moved, PeerLinks
from swarm.rpc.session import Pipe, SchedulerLink
from swarm.types import NO_JOB, JobId, Pieces
from swarm.wire import messages
from swarm.wire.messages import (
    Command,
    CutOff,
    Event,
    Logged,
    StateReply,
    StateRequest,
    TakePass,
    TensorHeader,
    UseRelays,
    Welcome,
)

REDIAL_S = 0.2  # after a session that was welcomed and ended
REDIAL_WITH_JOB_S_MAX = 1.0  # others wait for us
ORPHAN_TIMEOUT_S = 600.0
# A scheduler's epoch counts its starts. One that is far greater would shut out the true scheduler for ever.
EPOCH_FIRST_MAX = 1 << 24
EPOCHS_AHEAD_MAX = 1 << 16
HELD_UP = "its device is still at work for a job that was released"  # why it leaves until it is free
REFUSAL = "refused by what this stage server is doing now"  # all that a caller hears
REFUSED_TOLD_S = 10.0  # between lines of the log about messages that were refused


@dataclass(frozen=True, slots=True)
class ServerPorts:
    """The ports of a stage server."""

    device: Device
    links: PeerLinks
    find_scheduler: Callable[[], Awaitable[str]]
    dial: Callable[[str], SchedulerLink]
    tasks: asyncio.TaskGroup
    metrics: StageServerMetrics
    log: Logger
    passes: HeldPasses | None = None  # none: started with --insecure
    relays: KnownRelays | None = None  # likewise


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """A stage server's time limits, the memory of its replicas, and how it builds stages."""

    connect_retry_s_max: float = 60.0
    orphan_timeout_s: float = ORPHAN_TIMEOUT_S
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    build: BuildStage = Stage
    hub: HubPolicy = field(default_factory=HubPolicy)


class StageServer:
    """One stage-server process; also the receiver of its neighbours' tensors. `identity` is its Hello without a job."""

    def __init__(
        self, identity: messages.Hello, ports: ServerPorts, settings: ServerSettings = ServerSettings()
    ) -> None:
        self._identity = identity
        self._ports = ports
        self._settings = settings
        self._tasks, self._log = ports.tasks, ports.log
        self._others = PeerDirectory(ports.links, ports.passes, ports.relays, ports.log)
        self._connect_retry = wait_random_exponential(multiplier=0.2, max=settings.connect_retry_s_max)
        self._queue = EventQueue()
        self._was_welcomed = False
        self._link: SchedulerLink | None = None
        self._load_stage: messages.LoadStage | None = None  # loading or loaded
        self._replica: Replica | None = None
        self._joiner: JoinClient | None = None
        self._work = JobTasks(ports.tasks)  # of the present job
        self._aftermath = DeviceDrain(ports.device)  # of those before
        self._reported = NO_JOB  # the job of the newest Hello
        self._leaving = ""  # why, once this stage server shall end
        self._free = asyncio.Event()  # of any job
        self._free.set()
        self._detached = asyncio.Event()  # from the scheduler
        self._loading: asyncio.Task[None] | None = None
        self._epoch = 0
        self._refused = 0  # messages of neighbours and strangers
        self._tell_refused_s = 0.0

    @property
    def _job(self) -> JobId:
        """The job whose stage is loading or loaded."""
        return NO_JOB if self._load_stage is None else self._load_stage.job

    @property
    def place(self) -> PassSlot | None:
        """The place that this stage server serves; None if it serves none."""
        return None if self._load_stage is None else place_of(self._load_stage)

    @property
    def is_attached(self) -> bool:
        return self._link is not None

    def links(self) -> tuple[messages.LinkSpeed, ...]:
        """How fast the links to its neighbours are; also asked on the thread that serves metrics."""
        replica = self._replica
        return () if replica is None else replica.links.speeds()

    def leave(self, reason: str) -> bool:
        """Ask the scheduler to give the stage to others; False if there is no session or no stage."""
        if self._link is None or self._load_stage is None:
            return False
        self._leaving = reason
        self.emit(messages.Leaving(reason))
        return True

    async def handed_over(self) -> None:
        """Return when no job needs this stage server."""
        await self._free.wait()

    async def hang_up(self, reason: str) -> None:
        """Tell the scheduler that this stage server leaves; returns when the session has ended."""
        if self._link is not None:
            if not self._leaving:
                self._leaving = reason
                self.emit(messages.Leaving(reason))
            self._queue.end()
            await self._detached.wait()

    async def serve(self) -> None:
        """Stay attached through all restarts of the scheduler; ends only by cancellation or IncompatibleVersion."""
        try:
            while True:
                await self._one_session()
                await self._stand_aside()
                await asyncio.sleep(REDIAL_S)
        finally:
            await self._drop("the stage server stops")

    async def _one_session(self) -> None:
        """Dial until a scheduler welcomes us, and serve it until the session ends."""
        orphaned = self._tasks.create_task(self._give_up_job())
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(SchedulerUnreachable), wait=self._pause_s, before_sleep=self._say_why
        )
        try:
            async for attempt in retrying:
                with attempt:
                    await self._session(orphaned)
        finally:
            orphaned.cancel()

    async def _stand_aside(self) -> None:
        """Stay away while the device is at work for jobs that were released."""
        held_up = self._leaving == HELD_UP  # also if the device has become free since
        if held_up or not self._aftermath.is_over:
            await self._drop("the device is not free")  # it has not begun with this job
            await self._aftermath.over()
        if held_up:
            self._leaving = ""

    def _pause_s(self, state: RetryCallState) -> float:
        pause_s = self._connect_retry(state)
        return pause_s if self._load_stage is None else min(pause_s, REDIAL_WITH_JOB_S_MAX)

    async def _give_up_job(self) -> None:
        await asyncio.sleep(self._settings.orphan_timeout_s)
        await self._drop(f"no scheduler for {self._settings.orphan_timeout_s:g} s")

    def _say_why(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        self._log.warning("scheduler not reached", reason=str(error), attempt=state.attempt_number)

    async def _session(self, orphaned: asyncio.Task[None]) -> None:
        """One session from dialling to its end; SchedulerUnreachable only if it never began.

        `orphaned` waits to drop the job; a scheduler that welcomes us ends the wait.
        """
        address = await self._find()
        link = self._ports.dial(address)
        welcomed = False
        heart: asyncio.Task[None] | None = None

        def at_once(epoch: int, command: messages.Command) -> bool:
            """Carry out what must not wait for the device, for others or for a donor."""
            if not (welcomed and epoch == self._epoch and isinstance(command, messages.CutOff)):
                return False
            self._others.hear(command)
            return True

        try:
            async with aclosing(urgent_first(link.attach(self._events()), at_once)) as commands:
                async for epoch, command in commands:
                    if epoch < self._epoch:
                        self._log.warning("command of an older scheduler refused", epoch=epoch, newest=self._epoch)
                        if welcomed:
                            continue
                        raise StaleMessage(
                            f"the scheduler at {address} was superseded by epoch {self._epoch}; "
                            "if it was restored from a backup, start this stage server again"
                        )
                    if epoch > (self._epoch or EPOCH_FIRST_MAX) + EPOCHS_AHEAD_MAX:
                        raise Refused(f"the scheduler at {address} calls itself the {epoch}th: that is none")
                    self._epoch = epoch
                    if isinstance(command, messages.Welcome):
                        if self._job != self._reported:
                            raise StaleMessage("the job was given up while the scheduler was dialled")
                        welcomed = self._was_welcomed = True
                        orphaned.cancel()
                        self._link = link
                        self._detached.clear()
                        self._others.welcomed(command)
                        heart = self._tasks.create_task(self._beat(command.heartbeat_s))
                        self._log.info("attached to scheduler", scheduler=address, peer=command.peer, epoch=epoch)
                    else:
                        await self._handle(command)
            if self._queue.ended:
                self._log.info("left the scheduler", scheduler=address, reason=self._leaving)
            else:
                self._log.warning("scheduler ended the session", scheduler=address)
        except SchedulerUnreachable as error:
            if not welcomed:
                raise
            self._log.warning("session lost", scheduler=address, reason=error.message)
        except IncompatibleVersion:
            raise
        except NotAdmitted as error:
            if isinstance(error, Revoked) or not self._was_welcomed:
                raise
            # The scheduler may have lost its book, or the time of day: what this replica holds may be needed yet.
            raise SchedulerUnreachable(f"the scheduler at {address} does not admit us: {error}") from error
        except SwarmError as error:
            # Such as StaleMessage: a newer process with this peer's id is attached. It may pass: dial again, later.
            raise SchedulerUnreachable(f"the scheduler at {address} ended the session: {error}") from error
        finally:
            self._link = None
            self._detached.set()
            if heart is not None:
                heart.cancel()
            await link.close()

    async def _find(self) -> str:
        """Find the scheduler's address. An error ends the process only at its start, since later it may pass."""
        try:
            return await self._ports.find_scheduler()
        except (SchedulerUnreachable, Revoked):
            raise
        except SwarmError as error:
            if not self._was_welcomed:
                raise
            raise SchedulerUnreachable(f"the scheduler cannot be dialled: {error}") from error

    async def _events(self) -> AsyncGenerator[messages.Event, None]:
        # No replica is held in a variable here: this generator outlives the job.
        yield self._hello()
        if self._leaving:
            yield messages.Leaving(self._leaving)
        outgoing = self._queue
        while (event := await outgoing.get()) is not None:
            yield event

    def _hello(self) -> messages.Hello:
        """Begin a queue of events for the new session; Hello reports what the last one did not send."""
        replica, load = self._replica, self._load_stage
        at_work = replica or self._joiner
        self._queue, self._reported = EventQueue(), self._job
        for event in () if at_work is None else at_work.attach():
            self._queue.put(event)
        if load is None:
            return self._identity
        held = replace(self._identity, job=load.job, timeline=load.timeline, stage=load.stage)
        if replica is None:
            return replace(held, version=load.version, join=load.join)
        cells = replica.cells
        return replace(held, version=cells.version, cells=cells.open_cells(), attempt=replica.newest_attempt())

    async def _beat(self, heartbeat_s: float) -> None:
        sequence = 0
        while not self._aftermath.is_long:
            self.emit(messages.Heartbeat(sequence, () if sequence % LINKS_TOLD_EVERY else self.links()))
            sequence += 1
            await asyncio.sleep(heartbeat_s)
        await self.hang_up(HELD_UP)

    def emit(self, event: messages.Event) -> None:
        self._queue.put(event)

    def forward_log(self, time_unix_s: float, level: str, text: str) -> None:
        """Let the scheduler have a log line of the present job."""
        if self._job:
            self.emit(messages.Logged(self._job, time_unix_s, level, text))

    async def _handle(self, command: messages.Command) -> None:
        match command:
            case messages.LoadStage():
                await self._take(command)
            case messages.Release():
                if self._job == command.job:
                    await self._drop(command.reason)
            case messages.TakePass() | messages.UseRelays() | messages.CutOff():
                self._others.hear(command)
            case messages.Calibrate():
                if self._load_stage is None:
                    self._work.start(self._calibrate(command))
            case messages.Follow():
                if self._joiner is not None:
                    self._joiner.follow(command)
            case messages.Admit():
                await self._admitted(command)
            case messages.Welcome():
                self._log.warning("command ignored", command=type(command).__name__)
            case _ if self._replica is None:
                self._log.warning("command without a job", command=type(command).__name__)
            case _:
                await self._replica.handle(command)

    async def _calibrate(self, command: messages.Calibrate) -> None:
        """Report how fast this stage server is; a job that comes meanwhile ends this."""
        me, settings = (self._identity.peer, self._identity.incarnation), self._settings
        device, offered = self._ports.device, settings.budget.offered
        self.emit(await calibrate(command, device, offered, settings.build, self._fetch, self._store, me))

    # The job -----------------------------------------------------------------------------------------------------

    async def _take(self, command: messages.LoadStage) -> None:
        """Serve a stage: another one than before, or (`held`) the same in another island."""
        if (before := self._replica) is not None and can_fork(before, command):
            await self._work.close()
            self._load_stage = command
            self._replica = await fork_replica(before, command, self._replica_ports(command))
            return
        await self._drop("another job")
        self._load_stage = command
        self._free.clear()
        self._begin(command)

    def _begin(self, command: messages.LoadStage) -> None:
        """Load the stage, or fetch its state from its replicas if the job is at work."""
        me = ReplicaId(command.job, self._identity.peer, self._identity.incarnation, command.stage)
        try:
            assignment = Assignment.of(to_load(command), me)
        except SwarmError as error:
            self._refuse(command, error)
            return
        ports = self._replica_ports(command)
        if command.join:
            self._joiner = JoinClient(assignment, ports)
        else:
            # A task of its own, so that a job can be released before it is loaded.
            self._loading = self._tasks.create_task(self._load(assignment, ports))

    async def _load(self, assignment: Assignment, ports: ReplicaPorts) -> None:
        command = assignment.command
        try:
            stage, loaded = await build_stage(assignment, ports)
        except SchedulerUnreachable as error:
            # Its source went away with the session. The next session begins without the job, which is then given again.
            self._log.warning("stage not loaded", job_id=command.job, reason=error.message)
            self._load_stage = None
            self._free.set()
        except SwarmError as error:
            if isinstance(error, OutOfMemory):
                self._ports.metrics.out_of_memory()
            self._log.error("stage not loaded", job_id=command.job, error_code=error.code, reason=error.message)
            self._refuse(command, error)
        else:
            self._replica = Replica(assignment, stage, loaded, ports)
            self.emit(loaded)
            return
        self._ports.device.release()  # not before: the error held what was built

    def _refuse(self, command: messages.LoadStage, error: SwarmError) -> None:
        """The job cannot be served here."""
        self.emit(messages.Failed(command.job, error.code, error.message, error.hint))
        self._load_stage = None
        self._free.set()

    async def _admitted(self, command: messages.Admit) -> None:
        """Go on as a replica, with the state that was fetched and reported."""
        joiner = self._joiner
        if joiner is None or joiner.assignment.command.join != command.join or joiner.loaded is None:
            self._log.warning("admission without a join", join=command.join)
            return
        assert joiner.stage is not None
        self._joiner = None
        await self._work.close()
        ports = self._replica_ports(joiner.assignment.command)
        self._replica = Replica(joiner.assignment, joiner.stage, joiner.loaded, ports)
        ports.log.info("joined", version=joiner.loaded.version)

    def _replica_ports(self, command: messages.LoadStage) -> ReplicaPorts:
        ports, settings = self._ports, self._settings
        self._work = JobTasks(ports.tasks)
        return ReplicaPorts(
            device=ports.device,
            links=ports.links,
            emit=self.emit,
            store=self._store,
            fetch=self._fetch,
            work=self._work,
            metrics=ports.metrics,
            log=self._log.bind(job_id=command.job, stage=command.stage),
            budget=settings.budget,
            build=settings.build,
            hub=settings.hub,
        )

    async def _store(self, header: messages.StoreHeader, payload: Pieces) -> str:
        if self._link is None:
            raise SchedulerUnreachable("no session with a scheduler")
        return await self._link.store(header, payload)

    async def _fetch(self, request: messages.FetchRequest) -> AsyncGenerator[bytes, None]:
        if self._link is None:
            raise SchedulerUnreachable("no session with a scheduler")
        async with aclosing(self._link.fetch(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _drop(self, reason: str) -> None:
        job, self._load_stage = self._job, None
        self._free.set()
        loading, self._loading = self._loading, None
        if loading is not None and not loading.done():
            # The device finishes what it builds right now; nobody takes the result.
            loading.cancel()
            await asyncio.wait({loading})
        del loading
        await self._work.close()
        self._joiner = self._replica = None
        if job:
            self._ports.device.release()
            self._aftermath.begin()
            self._log.info("stage released", job_id=job, reason=reason)

    # Tensors from neighbours --------------------------------------------------------------------------------------

    def admit(self, header: TensorHeader) -> Moved | None:
        with self._tight_lipped(header):
            return self._serving(header.job).admission.check(header)

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        with self._tight_lipped(header):
            await self._serving(header.job).receive(header, payload)

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes]:
        with self._tight_lipped(request):
            return await self._serving(request.job).donor.give(request)

    @contextmanager
    def _tight_lipped(self, message: TensorHeader | StateRequest) -> Iterator[None]:
        """Tell a refused caller only the kind of the error, as it may be a stranger; the log has the details."""
        try:
            yield
        except SwarmError as error:
            self._refused += 1
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._tell_refused_s:
                self._tell_refused_s = now_s + REFUSED_TOLD_S
                self._log.info(
                    "messages refused",
                    count=self._refused,
                    newest=type(message).__name__,
                    sender=message.sender[:64],
                    error_code=error.code,
                    reason=error.message,
                )
            raise type(error)(REFUSAL) from None

    def _serving(self, job: JobId) -> Replica:
        if self._replica is None:
            raise StaleMessage(f"this stage server does not serve job {job}")
        return self._replica


@dataclass(frozen=True, slots=True)
class PeerDirectory:
    """What the scheduler says of others: who may be believed, who relays, who was revoked; None if there are none."""

    links: PeerLinks
    passes: HeldPasses | None
    relays: KnownRelays | None
    log: Logger

    def welcomed(self, welcome: Welcome) -> None:
        """A session begins: learn what was said while there was none."""
        if self.passes is not None:
            self.passes.welcomed(welcome)
        for order in welcome.cut_off:
            if welcome.unix_s - order.unix_s < SHUNNED_S:
                self.links.cut_off(order.peer)
        if self.relays is not None:
            self.relays.know(welcome.relays)

    def hear(self, command: TakePass | UseRelays | CutOff) -> None:
        match command:
            case TakePass(token=token):
                if self.passes is not None:
                    self.passes.take(token)
                if self.relays is not None:
                    self.relays.passed()
            case UseRelays(relays=relays):
                if self.relays is not None:
                    self.relays.know(relays)
            case CutOff(peer=peer):
                self.log.warning("peer was revoked", peer=peer)
                self.links.cut_off(peer)
                if self.passes is not None:
                    self.passes.cut_off(command)
            case _:
                assert_never(command)


LINES_WAITING_MAX = 1000


class EventQueue:
    """Events on their way to the scheduler, in order, for one reader; log lines are left out when the link is slow.

    Other events answer commands, so the scheduler's own work bounds their number. Beyond LINES_WAITING_MAX new log
    lines are left out, and one line gives their number.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._lines = 0  # of the events
        self._left_out = 0
        self.ended = False
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        """Append an event; a log line only if there is room for it."""
        if isinstance(event, Logged):
            if self._lines >= LINES_WAITING_MAX:
                self._left_out += 1
                return
            self._lines += 1
            if self._left_out:
                text = f"{self._left_out} log lines were left out: the link to the scheduler is slow"
                self._events.append(replace(event, level="warning", message=text))
                self._lines += 1
                self._left_out = 0
        self._events.append(event)
        self._arrived.set()

    def end(self) -> None:
        """Nothing comes after the events that wait now."""
        self.ended = True
        self._arrived.set()

    async def get(self) -> Event | None:
        """The next event, once there is one; None after the end."""
        while not self._events:
            if self.ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._lines -= isinstance(event, Logged)
        return event


WAITING_MAX = 8192  # commands; then the session is read no further

_Commands: TypeAlias = AsyncGenerator[tuple[int, Command], None]


async def urgent_first(commands: _Commands, at_once: Callable[[int, Command], bool]) -> _Commands:
    """The commands in order, without the ones that `at_once` carries out as they come, by giving True.

    A commit waits for the device, and for a donor if the replica was no member of its rounds: seconds, or a minute.
    A revoked peer would stay connected for as long.
    """
    waiting: Pipe[tuple[int, Command]] = Pipe(WAITING_MAX)

    async def read() -> None:
        try:
            async with aclosing(commands):
                async for epoch, command in commands:
                    if not at_once(epoch, command):
                        await waiting.put((epoch, command))
            waiting.end()
        except Exception as error:
            waiting.fail(error)
        finally:
            waiting.fail(SchedulerUnreachable("the session was broken off"))  # without effect after an end

    reading = asyncio.create_task(read(), name="commands")
    try:
        async for command in waiting:
            yield command
    finally:
        reading.cancel()
        await asyncio.wait({reading})
