"""Ports of a replica: the device, the neighbours, the scheduler, the log.

One set is made per job. Nothing in it refers back to the replica, so that a job's state is freed as soon as the job
ends, without a run of the garbage collector.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol, TypeAlias

from stage_server.device import Device
from stage_server.metrics import StageServerMetrics
from swarm.errors import NotAllowed
from swarm.job.course import PLAIN, Course
from swarm.job.footprint import owed_room, stage_footprint
from swarm.job.islands import course_of, island_spec
from swarm.job.spec import JobSpec, spec_from_json
from swarm.model.stage import Stage
from swarm.process.logs import Logger
from swarm.rpc.links.peers import PeerLinks
from swarm.types import JobId, Memory, PeerId, Pieces
from swarm.wire.messages import Event, FetchRequest, LoadStage, StoreHeader

BuildStage: TypeAlias = Callable[..., Stage]
"""Called as Stage is; simulations have one whose model is a few numbers."""

# Outputs held for neighbours until the commit take at most this part of the memory on offer.
HOLD_SHARE = 4
HOLD_BYTES_MIN = 64 << 20
# The log of past commits takes at most this part of what the stage leaves of the memory on offer.
LOG_SHARE = 4
LOG_BYTES_MAX = 1 << 30


class FetchCall(Protocol):
    """Bytes of a file that the scheduler has for this job: exactly the requested ones, or an error."""

    def __call__(self, request: FetchRequest) -> AsyncGenerator[bytes, None]: ...


class StoreCall(Protocol):
    """Hands bytes to the scheduler; gives the sha256 that it stored."""

    async def __call__(self, header: StoreHeader, payload: Pieces) -> str: ...


@dataclass(frozen=True, slots=True)
class ReplicaId:
    """The identity of a replica: this peer, its job and its stage."""

    job: JobId
    peer: PeerId
    incarnation: int
    stage: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """The stage of a job that this stage server was given, and its identity there."""

    command: LoadStage
    spec: JobSpec  # as its island trains it
    me: ReplicaId
    course: Course = PLAIN
    islands: int = 1

    @classmethod
    def of(cls, command: LoadStage, me: ReplicaId) -> Assignment:
        """The assignment in a command; InvalidConfig."""
        spec = spec_from_json(command.spec_json)
        return cls(command, island_spec(spec), me, course_of(spec, command.timeline), spec.island_count)

    @property
    def stages(self) -> int:
        return len(self.command.split)

    @property
    def sum_bits(self) -> int | None:
        """The fixed-point grid of the gradient sums; None in ordinary mode."""
        training = self.spec.training
        return training.fixed_point_bits if training.reproducible else None


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory that a replica may use beside its stage."""

    hold_bytes: int = 1 << 30  # outputs, until their step commits
    offered: Memory = field(default_factory=lambda: Memory(8 << 30))  # all that this stage server offers

    @classmethod
    def of(cls, offered: Memory) -> MemoryBudget:
        """Outputs are held in the memory of the host: beside a GPU in blocks of up to twice their size."""
        held_bytes = offered.host_bytes // 2 or offered.device_bytes
        return cls(max(held_bytes // HOLD_SHARE, HOLD_BYTES_MIN), offered)

    def log_bytes(self, assignment: Assignment) -> int:
        """Bytes for the log of past commits: a share of the memory that the stage is not expected to need."""
        command = assignment.command
        stages = assignment.stages
        need = stage_footprint(assignment.spec, command.split[command.stage], command.stage, stages).memory
        left_bytes = self.offered.device_bytes - need.device_bytes - need.host_bytes
        if self.offered.host_bytes:
            left_bytes = self.offered.host_bytes - need.host_bytes
        return min(LOG_BYTES_MAX, max(0, left_bytes) // LOG_SHARE)

    def owed_room(self, assignment: Assignment) -> int:
        """How many microbatches may owe the gradients of their weights."""
        return owed_room(assignment.spec, assignment.command.split, assignment.command.stage, self.offered)


@dataclass(frozen=True, slots=True)
class HubPolicy:
    """The hub models that this stage server may load for jobs, and whether it does so with its owner's rights.

    The submitter of a job names the model, and all who may ask for the job's weights get them. So the owner of this
    machine decides which models are downloaded to it, and with which rights.
    """

    allowed: tuple[str, ...] = ()  # patterns of ids, such as "meta-llama/*"
    with_token: bool = False  # the owner's HF_TOKEN, or login

    def check(self, model: str) -> None:
        """NotAllowed if the owner does not want this model here."""
        if not any(fnmatchcase(model, pattern) for pattern in self.allowed):
            owner, slash, _ = model.partition("/")
            pattern = f"{owner}/*" if slash else model
            raise NotAllowed(
                f'this stage server does not load model.id = "{model}" from the hub',
                hint=f"start it with --allow-hub '{pattern}', or submit from a local folder of the model",
            )


@dataclass(frozen=True, slots=True)
class ReplicaPorts:
    """The ports of one job's replica."""

    device: Device
    links: PeerLinks
    emit: Callable[[Event], None]
    store: StoreCall
    fetch: FetchCall
    work: JobTasks
    metrics: StageServerMetrics
    log: Logger
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    build: BuildStage = Stage
    hub: HubPolicy = field(default_factory=HubPolicy)


class JobTasks:
    """The tasks of one job: they run in the stage server's group and end together."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: dict[asyncio.Task[None], None] = {}  # ordered, unlike a set

    def start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
