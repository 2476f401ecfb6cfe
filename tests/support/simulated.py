"""The whole system in one process: real brain, flows and torch; simulated time, network and sessions."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import sqlalchemy as sa

from scheduler.api.members.passes import Issuer
from scheduler.api.sessions import Sessions
from scheduler.assembly import Scheduler, assemble
from scheduler.brain.fleet.membership import Membership
from scheduler.jobs.commands import Jobs
from scheduler.jobs.job import Announcer, Job
from scheduler.jobs.ports import SchedulerPorts
from scheduler.metrics import SchedulerMetrics
from scheduler.storage.database import Database, _next_epoch
from scheduler.storage.job_record import JobTokens
from scheduler.storage.stores import Stores
from stage_server.brain.passes import PassSlot
from stage_server.metrics import StageServerMetrics
from stage_server.ports import BuildStage, HubPolicy, MemoryBudget
from stage_server.session.gate import PassGate
from stage_server.session.server import ServerPorts, ServerSettings, StageServer
from swarm.data.batches import Batches, TokenData
from swarm.data.corpus import tokenise
from swarm.data.shards import TokenManifest
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import Revoked
from swarm.job.spec import JobSpec
from swarm.model.stage import Stage
from swarm.pki.identity import Wallet
from swarm.pki.passes import PassKey
from swarm.process.logs import get_logger
from swarm.types import PROTOCOL_VERSION, JobState, Memory, PeerId
from swarm.wire.messages import Command, Event, FetchRequest, Hello, StoreHeader
from tests.support.databases import fresh_engine
from tests.support.devices import InlineDevice
from tests.support.sim import loop as sim
from tests.support.sim.fabric import Counts
from tests.support.sim.network import SimNetwork

SCHEDULER = "scheduler"
WALL_START_UNIX_S = 1_700_000_000.0


def small_spec(source: Path, **changes: object) -> JobSpec:
    """A tiny Llama job on the text in `source`; changes are "section__key" values."""
    values: dict[str, dict[str, object]] = {
        "model": {
            "config": {
                "num_hidden_layers": 3,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            "dtype": "float32",
        },
        "data": {"source": str(source), "sequence_length": 16},
        "training": {
            "steps": 4,
            "global_batch_sequences": 12,
            "microbatch_sequences": 2,
            "warmup_steps": 1,
            "learning_rate": 1e-2,
            "reproducible": True,
            "fixed_point_bits": 24,
        },
        "pipeline": {"compression": "none"},
        "averaging": {},
        "checkpoint": {},
        "limits": {},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if section == "config":
            values["model"]["config"][name] = value  # type: ignore[index]
        else:
            values.setdefault(section, {})[name] = value
    return JobSpec.model_validate({"name": "rig", **values})


def stale(versions: int) -> dict[str, object]:
    """The changes by which all microbatches use weights so many versions old, from the first step on."""
    return {"pipeline__overlap": "all" if versions else 0, "pipeline__sync_steps": 0}


def write_text(folder: Path) -> Path:
    """Text with structure, so that training has something to learn."""
    path = folder / "text.txt"
    path.write_text("".join(f"line {n}: the square of {n} is {n * n}.\n" for n in range(400)))
    return path


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokenised data in a scheduler's data folder."""

    root: Path
    manifest: TokenManifest

    @classmethod
    def make(cls, root: Path, spec: JobSpec) -> Tokens:
        made = cls(root, tokenise(spec, root / "tokens"))
        (root / "shards").mkdir(exist_ok=True)
        for shard in made.manifest.shards:
            shutil.copy(shard.path, root / "shards" / f"{shard.sha256}.bin")
        return made

    def batches(self, spec: JobSpec) -> Batches:
        paths = [shard.path for shard in self.manifest.shards]
        data = TokenData.open(paths, self.manifest.token_dtype)
        return Batches.of_job(spec, data, self.manifest.end_of_text)

    def of_job(self) -> JobTokens:
        return JobTokens(
            tuple(shard.sha256 for shard in self.manifest.shards),
            self.manifest.token_dtype,
            self.manifest.vocabulary_size,
            self.manifest.unigram_entropy,
            self.manifest.end_of_text,
        )


@dataclass(slots=True)
class Members:
    """Who may take part: the key of passes, the gate of each stage server, and whom the guard lets in no more."""

    key: PassKey = field(default_factory=PassKey.new)
    gates: dict[PeerId, PassGate] = field(default_factory=dict)
    wallets: dict[PeerId, Wallet] = field(default_factory=dict)
    revoked: set[PeerId] = field(default_factory=set)
    left_s: dict[PeerId, float] = field(default_factory=dict)  # when a process ended because it was revoked

    def gate(self, peer: PeerId, place: Callable[[], PassSlot | None]) -> PassGate:
        wallet = self.wallets[peer] = Wallet()
        gate = self.gates[peer] = PassGate(wallet, place)
        return gate


@dataclass(frozen=True, slots=True)
class Guarded:
    """Sessions behind a guard, which lets in no one who was revoked."""

    sessions: Sessions
    members: Members

    async def attach(self, events: AsyncIterator[Event]) -> AsyncGenerator[tuple[int, Command], None]:
        hello = await anext(events)
        assert isinstance(hello, Hello)
        if hello.peer in self.members.revoked:
            raise Revoked(f"stage server {hello.peer} was revoked")

        async def all_events() -> AsyncGenerator[Event, None]:
            yield hello
            async for event in events:
                yield event

        async for command in self.sessions.attach(all_events()):
            yield command

    async def held(self, header: StoreHeader) -> int:
        return await self.sessions.held(header)

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        return await self.sessions.store(header, chunks)

    def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        return self.sessions.fetch(request)


@dataclass(slots=True)
class Rig:
    """A running system; made by `start`, within a TaskGroup of the caller."""

    network: SimNetwork
    tokens: Tokens
    tasks: asyncio.TaskGroup
    rng: Random
    hold_bytes: int
    engine: sa.Engine = field(default_factory=fresh_engine)  # its database, whichever scheduler runs
    parts: Scheduler = field(init=False)
    jobs: Jobs = field(init=False)
    membership: Membership = field(init=False)
    sessions: Sessions = field(init=False)
    store: Database = field(init=False)
    metrics: SchedulerMetrics = field(init=False)
    ports: SchedulerPorts = field(init=False)
    scheduler: asyncio.Task[None] = field(init=False)
    servers: dict[PeerId, asyncio.Task[None]] = field(default_factory=dict)
    server_metrics: list[StageServerMetrics] = field(default_factory=list)
    build: BuildStage = Stage
    hub: HubPolicy = field(default_factory=lambda: HubPolicy(("*",)))
    record: bool = False  # what happens to the brains of jobs
    members: Members | None = None  # none: with --insecure
    slowness: dict[PeerId, float] = field(default_factory=dict)  # how many times as long a peer computes

    @classmethod
    async def start(
        cls,
        tokens: Tokens,
        peers: int,
        tasks: asyncio.TaskGroup,
        rng: Random,
        *,
        duplicate_ratio: float = 0.2,
        hold_bytes: int = 1 << 30,
        record: bool = False,
        device_type: type[InlineDevice] = InlineDevice,
        members: Members | None = None,
    ) -> Rig:
        """A system of a scheduler and idle peers."""
        rig = cls(SimNetwork(rng, duplicate_ratio=duplicate_ratio), tokens, tasks, rng, hold_bytes)
        rig.record, rig.members = record, members
        await rig.start_scheduler()
        for number in range(peers):
            rig.add_peer(PeerId(f"peer-{number}"), tasks, Random(rng.random()), device_type=device_type)
        return rig

    async def start_scheduler(self) -> None:
        """Start a scheduler on the database, at the address that stage servers dial."""
        started = asyncio.Event()
        self.scheduler = self.tasks.create_task(self._run_scheduler(started))
        await started.wait()

    async def _run_scheduler(self, started: asyncio.Event) -> None:
        log, loop = get_logger("rig"), asyncio.get_running_loop()
        self.store = Database(self.engine, _next_epoch(self.engine), None)
        self.metrics = SchedulerMetrics("0", PROTOCOL_VERSION)
        async with asyncio.TaskGroup() as tasks:
            self.ports = ports = SchedulerPorts(
                Stores.under(self.tokens.root, self.store, record=self.record),
                Announcer(),
                self.metrics,
                Random(self.rng.random()),
                lambda: WALL_START_UNIX_S + loop.time(),
                log,
            )
            issuer = None if self.members is None else Issuer(self.members.key, "")
            self.parts = scheduler = assemble(ports, tasks, issuer=issuer)
            self.jobs, self.membership, self.sessions = scheduler.jobs, scheduler.membership, scheduler.sessions
            await scheduler.load()
            handler = scheduler.sessions if self.members is None else Guarded(scheduler.sessions, self.members)
            self.network.add_handler(SCHEDULER, handler)
            scheduler.start()
            started.set()

    async def kill_scheduler(self) -> None:
        """The scheduler is gone, as with kill -9: nothing more is written, no connection is closed in order."""
        self.parts.stop()
        self.network.kill(SCHEDULER)
        self.scheduler.cancel()
        await asyncio.wait({self.scheduler})

    def add_peer(
        self,
        peer: PeerId,
        tasks: asyncio.TaskGroup,
        rng: Random,
        *,
        incarnation: int = 1,
        stage: int = -1,
        device_name: str = "cpu",
        memory_bytes: int = 1 << 30,
        host_bytes: int = 0,
        site: str = "",
        device_type: type[InlineDevice] = InlineDevice,
    ) -> None:
        """Start a stage server whose computations take a random while; what it says of itself need not be true."""
        device = device_type(lambda: rng.uniform(0.001, 0.03) * self.slowness.get(peer, 1.0))
        identity = Hello(
            peer, incarnation, PROTOCOL_VERSION, "0", f"address-of-{peer}", "", device_name, 1, memory_bytes, stage,
            host_bytes=host_bytes, site=site,
        )  # fmt: skip

        async def find() -> str:
            return SCHEDULER

        def build(*given: Any, **named: Any) -> Stage:
            return device.halving(made(*given, **named))

        made = self.build
        gate = None if self.members is None else self.members.gate(peer, lambda: server.place)
        self.server_metrics.append(StageServerMetrics("0", PROTOCOL_VERSION))
        ports = ServerPorts(
            device,
            self.network.peer_links(identity.address),
            find,
            lambda address: self.network.scheduler_link(identity.address, address),
            tasks,
            self.server_metrics[-1],
            get_logger("rig"),
            passes=gate,
        )
        budget = MemoryBudget(self.hold_bytes, Memory(memory_bytes, host_bytes))
        server = StageServer(identity, ports, ServerSettings(budget=budget, build=build, hub=self.hub))
        self.network.add_receiver(identity.address, server, donor=server)
        self.servers[peer] = tasks.create_task(self._serve(peer, server))

    async def _serve(self, peer: PeerId, server: StageServer) -> None:
        try:
            await server.serve()
        except Revoked:  # its process ends
            assert self.members is not None
            self.members.left_s[peer] = asyncio.get_running_loop().time()
            self.network.kill(f"address-of-{peer}")

    def revoke(self, peer: PeerId) -> None:
        """An admin takes the peer out of the book of members."""
        assert self.members is not None
        self.members.revoked.add(peer)
        self.sessions.revoke(peer, "it was revoked: test")

    def kill(self, peer: PeerId) -> None:
        """The process is gone, as with kill -9."""
        self.servers.pop(peer).cancel()
        self.network.kill(f"address-of-{peer}")

    async def finished(self, job: Job, *, may_stand_still: bool = False) -> None:
        """Wait until the job has ended; that nothing moved is a bug, although the job gets over it."""
        async for _ in self.jobs.watch(job):
            still = job.record.reason.startswith("no step was committed for")
            assert may_stand_still or not still, job.record.reason


class Done(Exception):
    """Ends the rig's TaskGroup when the test has what it wanted."""


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated training: its weights, what was done to the traffic, and the virtual seconds that it took."""

    sha256: str
    counts: Counts
    training_s: float


def run_swarm(
    spec: JobSpec, tokens: Tokens, peers: int, seed: int, *, device_type: type[InlineDevice] = InlineDevice
) -> Run:
    """Train in simulation."""

    async def main() -> Run:
        result: Run | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                rig = await Rig.start(tokens, peers, tasks, Random(seed), device_type=device_type)
                while len(rig.membership.idle_peers()) < peers:
                    await asyncio.sleep(0.1)
                job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())
                loop = asyncio.get_running_loop()
                started_s = 0.0
                async for view in rig.jobs.watch(job):
                    if view.record.state is JobState.RUNNING and not started_s:
                        started_s = loop.time()
                assert job.record.state is JobState.SUCCEEDED, job.record.reason
                assert job.record.timeline == 0, "it was taken back"
                result = Run(job.record.weights_sha256, rig.network.counts, loop.time() - started_s)
                await rig.network.close()
                raise Done
        except* Done:
            pass
        assert result is not None
        return result

    return sim.run(main(), seed=seed, limit_s=3600.0)
