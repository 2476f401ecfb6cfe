"""The stage server between its three doors: the session with the scheduler, tensors from neighbours, the device.

It serves at most one job at a time. When the session breaks, the replica stays and works on with its neighbours, for
`orphan_timeout_s`; the server dials again, for ever, and says in Hello what it holds. The scheduler then brings it up
to date, or releases it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import assert_never

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from stage_server.device import Device
from stage_server.identity import Identity, ReplicaId
from stage_server.metrics import StageServerMetrics
from stage_server.replica.replica import HOLD_BYTES, BuildStage, Replica
from stage_server.session.event_queue import EventQueue
from stage_server.state.joiner import JoinClient
from swarm.errors import IncompatibleVersion, OutOfMemory, SchedulerUnreachable, StaleMessage, SwarmError
from swarm.job.spec import spec_from_json
from swarm.messages import (
    PROTOCOL_VERSION,
    AbortRound,
    Admit,
    Average,
    Chaos,
    ChaosBegun,
    Command,
    Commit,
    Evaluate,
    Event,
    Failed,
    FetchRequest,
    Follow,
    Heartbeat,
    Hello,
    Leaving,
    LoadStage,
    Logged,
    Release,
    Route,
    SaveStage,
    StateReply,
    StateRequest,
    StoreHeader,
    TensorHeader,
    Void,
    Welcome,
)
from swarm.model.runtime import release_memory
from swarm.model.stage import Stage
from swarm.process.logs import Logger
from swarm.rpc.peers import PeerLinks
from swarm.rpc.session import SchedulerLink
from swarm.types import JobId

REDIAL_S = 0.2  # after a session that was welcomed and ended
REDIAL_WITH_JOB_S_MAX = 1.0  # others wait for us
ORPHAN_TIMEOUT_S = 600.0
NO_JOB = JobId("")


class StageServer:
    """One stage-server process; also the receiver of its neighbours' tensors."""

    def __init__(
        self,
        identity: Identity,
        device: Device,
        links: PeerLinks,
        find_scheduler: Callable[[], Awaitable[str]],
        dial: Callable[[str], SchedulerLink],
        tasks: asyncio.TaskGroup,
        metrics: StageServerMetrics,
        log: Logger,
        *,
        connect_retry_s_max: float = 60.0,
        build: BuildStage = Stage,
        orphan_timeout_s: float = ORPHAN_TIMEOUT_S,
        hold_bytes: int = HOLD_BYTES,
        obey_chaos: Callable[[Chaos], None] | None = None,
    ) -> None:
        self._obey_chaos = obey_chaos
        self._identity = identity
        self._device = device
        self._links = links
        self._find_scheduler = find_scheduler
        self._dial = dial
        self._tasks = tasks
        self._metrics = metrics
        self._log = log
        self._connect_retry = wait_random_exponential(multiplier=0.2, max=connect_retry_s_max)
        self._build = build
        self._orphan_timeout_s = orphan_timeout_s
        self._hold_bytes = hold_bytes
        self._outgoing = EventQueue()
        self._link: SchedulerLink | None = None
        self._replica: Replica | None = None
        self._joiner: JoinClient | None = None
        self._load_stage: LoadStage | None = None  # loading or loaded
        self._reported = NO_JOB  # the job that the newest Hello told of
        self._leaving = ""  # why, once this stage server shall end
        self._free = asyncio.Event()  # of any job
        self._free.set()
        self._loading: asyncio.Task[None] | None = None
        self._epoch = 0

    @property
    def _job(self) -> JobId:
        """The job whose stage is loading or loaded."""
        return NO_JOB if self._load_stage is None else self._load_stage.job

    @property
    def is_attached(self) -> bool:
        """Whether a scheduler knows this stage server now."""
        return self._link is not None

    def leave(self, reason: str) -> bool:
        """Ask the scheduler to take the stage over from here; False if there is nobody to ask, or no stage."""
        if self._link is None or self._load_stage is None:
            return False
        self._leaving = reason
        self.emit(Leaving(reason))
        return True

    async def handed_over(self) -> None:
        """Return when no job needs this stage server."""
        await self._free.wait()

    async def serve(self) -> None:
        """Stay attached to a scheduler, whatever happens to it; returns only by cancellation or IncompatibleVersion."""
        try:
            while True:
                await self._one_session()
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

    def _pause_s(self, state: RetryCallState) -> float:
        pause_s = self._connect_retry(state)
        return pause_s if self._load_stage is None else min(pause_s, REDIAL_WITH_JOB_S_MAX)

    async def _give_up_job(self) -> None:
        await asyncio.sleep(self._orphan_timeout_s)
        await self._drop(f"no scheduler for {self._orphan_timeout_s:g} s")

    def _say_why(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        self._log.warning("scheduler not reached", reason=str(error), attempt=state.attempt_number)

    async def _session(self, orphaned: asyncio.Task[None]) -> None:
        """One session from dialling to its end; SchedulerUnreachable only if it never began.

        `orphaned` waits to drop the job; a scheduler that welcomes us ends the wait.
        """
        address = await self._find_scheduler()
        link = self._dial(address)
        welcomed = False
        heart: asyncio.Task[None] | None = None
        try:
            async with aclosing(link.attach(self._events())) as commands:
                async for epoch, command in commands:
                    if epoch < self._epoch:
                        self._log.warning("command of an older scheduler refused", epoch=epoch, newest=self._epoch)
                        if welcomed:
                            continue
                        raise StaleMessage(f"the scheduler at {address} was superseded by epoch {self._epoch}")
                    self._epoch = epoch
                    if isinstance(command, Welcome):
                        if self._job != self._reported:
                            raise StaleMessage("the job was given up while the scheduler was dialled")
                        welcomed = True
                        orphaned.cancel()
                        self._link = link
                        heart = self._tasks.create_task(self._beat(command.heartbeat_s))
                        self._log.info("attached to scheduler", scheduler=address, peer=command.peer, epoch=epoch)
                    else:
                        await self._handle(command)
            self._log.warning("scheduler ended the session", scheduler=address)
        except SchedulerUnreachable as error:
            if not welcomed:
                raise
            self._log.warning("session lost", scheduler=address, reason=error.message)
        except IncompatibleVersion:
            raise
        except SwarmError as error:
            # Such as StaleMessage: a newer process with this peer's id is attached. It may pass: dial again, later.
            raise SchedulerUnreachable(f"the scheduler at {address} ended the session: {error}") from error
        finally:
            self._link = None
            if heart is not None:
                heart.cancel()
            await link.close()

    async def _events(self) -> AsyncGenerator[Event, None]:
        identity, replica = self._identity, self._replica
        at_work = replica or self._joiner
        load = self._load_stage
        # What was not sent in the last session is in what Hello reports, made in the same breath.
        self._outgoing, self._reported = EventQueue(), self._job
        for event in () if at_work is None else at_work.attach():
            self._outgoing.put(event)
        yield Hello(
            peer=identity.peer,
            incarnation=identity.incarnation,
            protocol=PROTOCOL_VERSION,
            product=identity.product,
            address=identity.address,
            http_address=identity.http_address,
            device=identity.device,
            threads=identity.threads,
            memory_bytes=identity.memory_bytes,
            pinned_stage=identity.pinned_stage,
            job=self._job,
            timeline=load.timeline if load else 0,
            version=replica.cells.version if replica else load.version if load else 0,
            cells=replica.cells.open_cells() if replica else (),
            stage=load.stage if load else 0,
            attempt=replica.newest_attempt() if replica else 0,
            join=load.join if load and not replica else 0,
        )
        if self._leaving:
            yield Leaving(self._leaving)
        outgoing = self._outgoing
        while True:
            yield await outgoing.get()

    async def _beat(self, heartbeat_s: float) -> None:
        sequence = 0
        while True:
            self.emit(Heartbeat(sequence))
            sequence += 1
            await asyncio.sleep(heartbeat_s)

    def emit(self, event: Event) -> None:
        """Send an event to the scheduler, in order."""
        self._outgoing.put(event)

    def forward_log(self, time_unix_s: float, level: str, text: str) -> None:
        """Let the scheduler have a log line of the present job."""
        if self._job:
            self.emit(Logged(self._job, time_unix_s, level, text))

    async def _handle(self, command: Command) -> None:
        match command:
            case LoadStage():
                await self._drop("another job")
                self._load_stage = command
                self._free.clear()
                if command.join:
                    self._join(command)
                    return
                # A task of its own: who releases the job meanwhile need not wait until it is loaded.
                self._loading = self._tasks.create_task(self._load(command))
            case Release():
                if self._job == command.job:
                    await self._drop(command.reason)
            case Chaos():
                self._on_chaos(command)
            case Route() | Void() | Average() | AbortRound() | Commit() | SaveStage() | Evaluate():
                if self._replica is None:
                    self._log.warning("command without a job", command=type(command).__name__)
                else:
                    await self._replica.handle(command)
            case Follow():
                if self._joiner is not None:
                    self._joiner.follow(command)
            case Admit():
                await self._admitted(command)
            case Welcome():
                self._log.warning("command ignored", command=type(command).__name__)
            case _:
                assert_never(command)

    def _on_chaos(self, order: Chaos) -> None:
        if self._obey_chaos is None:
            self.emit(ChaosBegun(order.harm, "this stage server was not started with --allow-chaos"))
        else:
            self.emit(ChaosBegun(order.harm))
            self._obey_chaos(order)

    def _join(self, command: LoadStage) -> None:
        """Begin to fetch the stage's state from its replicas."""
        try:
            spec = spec_from_json(command.spec_json)
        except SwarmError as error:
            self.emit(Failed(command.job, error.code, error.message, error.hint))
            self._load_stage = None
            self._free.set()
            return
        log = self._log.bind(job_id=command.job, stage=command.stage)
        me, links = self._me(command), self._links
        self._joiner = JoinClient(command, spec, me, self._device, links, self.emit, self._tasks, log, self._build)

    async def _admitted(self, command: Admit) -> None:
        """What was fetched and reported counts: go on as a replica."""
        joiner = self._joiner
        if joiner is None or joiner.command.join != command.join or joiner.loaded is None:
            self._log.warning("admission without a join", join=command.join)
            return
        self._joiner = None
        await joiner.close()
        load = joiner.command
        self._replica = Replica.joined(
            joiner,
            spec_from_json(load.spec_json),
            self._me(load),
            self._device,
            self._links,
            self.emit,
            self._store,
            self._tasks,
            self._metrics,
            self._log.bind(job_id=load.job, stage=load.stage),
            self._hold_bytes,
        )

    def _me(self, command: LoadStage) -> ReplicaId:
        return ReplicaId(command.job, self._identity.peer, self._identity.incarnation, command.stage)

    async def _load(self, command: LoadStage) -> None:
        me = self._me(command)
        try:
            spec = spec_from_json(command.spec_json)
            self._replica = await Replica.load(
                command,
                spec,
                me,
                self._device,
                self._links,
                self.emit,
                self._store,
                self._fetch,
                self._tasks,
                self._metrics,
                self._log.bind(job_id=command.job, stage=command.stage),
                self._build,
                self._hold_bytes,
            )
        except SchedulerUnreachable as error:
            # What it loads from went away with the session; the next one begins without the job, and it comes again.
            self._log.warning("stage not loaded", job_id=command.job, reason=error.message)
            self._load_stage = None
            self._free.set()
        except SwarmError as error:
            if isinstance(error, OutOfMemory):
                self._metrics.out_of_memory()
            self._log.error("stage not loaded", job_id=command.job, error_code=error.code, reason=error.message)
            self.emit(Failed(command.job, error.code, error.message, error.hint))
            self._load_stage = None
            self._free.set()

    async def _store(self, header: StoreHeader, payload: bytes) -> str:
        if self._link is None:
            raise SchedulerUnreachable("no session with a scheduler")
        return await self._link.store(header, payload)

    async def _fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
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
            # What the device builds right now comes to its end there, but nobody takes it.
            loading.cancel()
            await asyncio.wait({loading})
        joiner, self._joiner = self._joiner, None
        if joiner is not None:
            await joiner.close()
        replica, self._replica = self._replica, None
        if replica is not None:
            await replica.close()
        if replica is not None or joiner is not None:
            self._device.run(partial(release_memory, self._device.name))  # others may share the device
        if job:
            self._log.info("stage released", job_id=job, reason=reason)

    # Tensors from neighbours --------------------------------------------------------------------------------------

    def admit(self, header: TensorHeader) -> None:
        """Refuse a tensor that is not for the present job."""
        self._serving(header).admit(header)

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        """Take in an admitted tensor."""
        await self._serving(header).receive(header, payload)

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes]:
        """A part of the state, for a peer that joins."""
        if self._replica is None:
            raise StaleMessage(f"this stage server does not serve job {request.job}")
        return await self._replica.give(request)

    def _serving(self, header: TensorHeader) -> Replica:
        if self._replica is None:
            raise StaleMessage(f"this stage server does not serve job {header.job}")
        return self._replica
