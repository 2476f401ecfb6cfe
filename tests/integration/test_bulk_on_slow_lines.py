"""Files between a stage server and its scheduler on slow lines: they end, sessions live, and little is sent twice."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from client.connection import Scheduler
from scheduler.api.holding import Holding
from scheduler.api.job_service import JobService
from scheduler.api.uploads import Uploads
from scheduler.brain.members.persons import ANYBODY
from scheduler.brain.members.places import CallSlots
from scheduler.storage.database import Database
from scheduler.storage.stores import Stores
from swarm.errors import SchedulerUnreachable, SwarmError
from swarm.rpc.channel import new_server
from swarm.rpc.session import GrpcSchedulerLink, add_session_service
from swarm.types import JobId, PeerId
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc
from swarm.wire.messages import Command, Event, FetchRequest, Heartbeat, StateFile, StoreHeader, Void
from tests.support.serving import serving
from tests.support.slow_line import SlowLine

MBIT = 125_000.0
TWICE_MAX = 1.2


class Keeping:
    """A scheduler that keeps what has arrived of a file, as a checkpoint's sink does."""

    def __init__(self, content: bytes = b"") -> None:
        self.kept = bytearray()
        self.content = content
        self.begun: list[int] = []  # from which byte each store went on
        self.beats = 0

    async def attach(self, events: AsyncIterator[Event]) -> AsyncGenerator[tuple[int, Command], None]:
        yield 1, Void(0, 0, 0)
        async for _ in events:
            self.beats += 1
            yield 1, Void(0, 0, 0)

    async def held(self, header: StoreHeader) -> int:
        return len(self.kept)

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        self.begun.append(len(self.kept))
        async for chunk in chunks:
            self.kept += chunk
        return hashlib.sha256(self.kept).hexdigest()

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        for start in range(request.start, request.stop, 1 << 20):
            yield self.content[start : min(start + (1 << 20), request.stop)]


@asynccontextmanager
async def scheduling(handler: Keeping, megabits: float, delay_s: float) -> AsyncIterator[SlowLine]:
    server = new_server()
    add_session_service(server, handler)
    async with serving(server) as address:
        async with SlowLine(address, megabits * MBIT, delay_s) as line:
            yield line


@asynccontextmanager
async def attached(line: SlowLine) -> AsyncIterator[tuple[GrpcSchedulerLink, asyncio.Task[None]]]:
    """A link with a session that beats; the task fails as the session breaks."""
    link = GrpcSchedulerLink(line.address)
    is_there = asyncio.Event()

    async def beats() -> AsyncIterator[Event]:
        sequence = 0
        while True:
            await asyncio.sleep(0.5)
            sequence += 1
            yield Heartbeat(sequence)

    async def session() -> None:
        async for _ in link.attach(beats()):
            is_there.set()

    task = asyncio.create_task(session())
    try:
        async with asyncio.timeout(10):
            await is_there.wait()
        yield link, task
    finally:
        task.cancel()
        await asyncio.wait({task})
        await link.close()


def header_of(content: bytes) -> StoreHeader:
    sha256 = hashlib.sha256(content).hexdigest()
    return StoreHeader(JobId("j"), PeerId("a"), 1, 0, 1, 0, len(content), "model/model.safetensors", sha256)


@pytest.fixture(autouse=True)
def pings_are_as_in_a_real_swarm(monkeypatch: pytest.MonkeyPatch, connections_take_their_time: None) -> None:
    monkeypatch.setattr("swarm.rpc.channel.KEEPALIVE_TIMEOUT_MS", 2000)


@pytest.fixture
def content() -> bytes:
    return Random(7).randbytes(1 << 20)


async def test_a_stage_is_stored_through_one_megabit_while_its_session_lives(content: bytes) -> None:
    """Two stage servers behind 2.5 Mbit/s trained all their steps, and the save never ended.

    The stage lay in buffers before the pings of the session, which broke every three seconds; then the stage began
    again at its first byte.
    """
    handler = Keeping()
    async with scheduling(handler, 1.0, 0.2) as line, attached(line) as (link, session):
        async with asyncio.timeout(30):
            assert await link.store(header_of(content), content) == hashlib.sha256(content).hexdigest()
        assert not session.done(), "the session broke"
        assert handler.beats > 10
        assert handler.begun == [0]
        assert line.connections == 2, "files travel beside the session"
        assert line.up_bytes <= TWICE_MAX * len(content)


async def test_a_scheduler_whose_disk_takes_its_time_is_waited_for(content: bytes) -> None:
    """The first file of a stage was given up whenever a disk, or an object store behind a slow line, took a payload for
    longer than three seconds. What had been sent meanwhile was sent once more."""

    class Slow(Keeping):
        async def held(self, header: StoreHeader) -> int:
            await asyncio.sleep(4.0)
            return await super().held(header)

        async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
            self.begun.append(len(self.kept))
            async for chunk in chunks:
                self.kept += chunk
                if len(self.kept) - len(chunk) < len(content) // 2 <= len(self.kept):
                    await asyncio.sleep(4.0)
            return hashlib.sha256(self.kept).hexdigest()

    handler = Slow()
    async with scheduling(handler, 100.0, 0.001) as line, attached(line) as (link, _):
        assert await link.store(header_of(content), content) == hashlib.sha256(content).hexdigest()
        assert handler.begun == [0]
        assert line.up_bytes <= TWICE_MAX * len(content)


async def test_a_store_goes_on_from_the_byte_that_arrived(content: bytes) -> None:
    handler = Keeping()
    async with scheduling(handler, 10.0, 0.02) as line:
        async with attached(line) as (link, _):
            storing = asyncio.create_task(link.store(header_of(content), content))
            while len(handler.kept) < len(content) // 2:
                await asyncio.sleep(0.01)
            line.cut()
            with pytest.raises(SchedulerUnreachable):
                await storing
        async with attached(line) as (link, _):
            assert await link.store(header_of(content), content) == hashlib.sha256(content).hexdigest()
        assert handler.begun[-1] >= len(content) // 2
        assert handler.kept == content
        assert line.up_bytes <= TWICE_MAX * len(content)


async def test_starting_weights_arrive_through_one_megabit_while_the_session_lives(content: bytes) -> None:
    """Megabytes lay before the pings in the buffer of the scheduler's line too."""
    handler, content = Keeping(content), content[: 3 << 18]
    async with scheduling(handler, 1.0, 0.2) as line, attached(line) as (link, session):
        request = FetchRequest(JobId("j"), 0, "model/model.safetensors", 0, len(content))
        async with asyncio.timeout(30):
            arrived = [chunk async for chunk in link.fetch(request)]
        assert b"".join(arrived) == content
        assert not session.done(), "the session broke"
        assert max(map(len, arrived)) < len(content) // 8
        assert line.down_bytes <= TWICE_MAX * len(content)


async def test_a_loader_that_is_slow_is_waited_for(content: bytes) -> None:
    async with scheduling(Keeping(content), 100.0, 0.001) as line, attached(line) as (link, _):
        arrived = []
        async for chunk in link.fetch(FetchRequest(JobId("j"), 0, "model/model.safetensors", 0, len(content))):
            await asyncio.sleep(4.0 if len(arrived) == 3 else 0.0)
            arrived.append(chunk)
        assert b"".join(arrived) == content


class Jobs(jobs_pb2_grpc.JobsServicer):  # type: ignore[misc]
    """Uploads and pulls of the real service, with one job that has these weights."""

    def __init__(self, uploads: Uploads, content: bytes = b"") -> None:
        self.uploads, self.content = uploads, content
        self.starts: list[int] = []
        self.service = JobService.__new__(JobService)
        self.service._uploads = uploads
        self.service._asks = lambda: ANYBODY
        self.service._followers = Holding(CallSlots(8, 8, "calls pull"))
        self.service._jobs = cast(
            Any, SimpleNamespace(stores=SimpleNamespace(checkpoints=self, threads=None), registry=self)
        )

    def find(self, _job: str) -> Any:
        return SimpleNamespace(record=SimpleNamespace(id="job", owner=""), spec=None)

    async def to_pull(self, _record: object, _spec: object, _step: str) -> Any:
        return self

    step = 4

    @property
    def files(self) -> list[StateFile]:
        half = len(self.content) // 2
        parts = {"config.json": self.content[:half], "model.safetensors": self.content[half:]}
        return [StateFile(f"model/{name}", len(part), hashlib.sha256(part).hexdigest()) for name, part in parts.items()]

    def chunks(self, path: str, start: int) -> Iterator[bytes]:
        half = len(self.content) // 2
        self.starts.append(start)
        yield self.content[start:half] if path == "model/config.json" else self.content[half + start :]

    async def PutShard(self, requests: AsyncIterator[pb.ShardChunk], context: Any) -> None:
        await self.service.PutShard(requests, context)

    async def Pull(self, requests: AsyncIterator[pb.PullRequest], context: Any) -> AsyncIterator[pb.FileChunk]:
        async for chunk in self.service.Pull(requests, context):
            yield chunk


@asynccontextmanager
async def serving_jobs(jobs: Jobs, megabits: float, delay_s: float) -> AsyncIterator[SlowLine]:
    server = new_server()
    jobs_pb2_grpc.add_JobsServicer_to_server(jobs, server)  # type: ignore[no-untyped-call]
    async with serving(server) as address:
        async with SlowLine(address, megabits * MBIT, delay_s) as line:
            yield line


@pytest.mark.parametrize(("megabits", "delay_s", "is_cut"), [(1.0, 0.2, False), (10.0, 0.02, True)])
async def test_a_file_is_uploaded_and_sent_about_once(
    tmp_path: Path, content: bytes, megabits: float, delay_s: float, is_cut: bool
) -> None:
    content = content[: 3 << 18]
    uploads = Uploads(Stores.under(tmp_path, await Database.open("sqlite://", None)))
    sha256 = hashlib.sha256(content).hexdigest()
    shard = pb.Shard(sha256=sha256, size_bytes=len(content))
    async with serving_jobs(Jobs(uploads), megabits, delay_s) as line:

        def send() -> None:
            with Scheduler(line.address, 10.0) as scheduler:
                scheduler.put_shard(shard, lambda start: [content[start:]])

        sending = asyncio.create_task(asyncio.to_thread(send))
        if is_cut:
            while line.up_bytes < len(content) // 2:
                await asyncio.sleep(0.01)
            line.cut()
        await sending
        assert uploads.path("", sha256).read_bytes() == content
        assert line.up_bytes <= TWICE_MAX * len(content)


@pytest.mark.parametrize(("megabits", "delay_s", "is_cut"), [(1.0, 0.2, False), (10.0, 0.02, True)])
async def test_a_model_is_pulled_and_sent_about_once(
    tmp_path: Path, content: bytes, megabits: float, delay_s: float, is_cut: bool
) -> None:
    content = content[: 3 << 18]
    jobs = Jobs(Uploads(Stores.under(tmp_path, await Database.open("sqlite://", None))), content)
    async with serving_jobs(jobs, megabits, delay_s) as line:

        def pull() -> list[pb.FileChunk]:
            with Scheduler(line.address, 10.0) as scheduler:
                return list(scheduler.pull("job"))

        pulling = asyncio.create_task(asyncio.to_thread(pull))
        if is_cut:
            while line.down_bytes < len(content) * 3 // 4:
                await asyncio.sleep(0.01)
            line.cut()
        chunks = await pulling
        assert [chunk.header.path for chunk in chunks if chunk.HasField("header")] == [
            "config.json",
            "model.safetensors",
        ]
        assert b"".join(chunk.payload for chunk in chunks) == content
        assert len(jobs.starts) == 2 + is_cut
        assert line.down_bytes <= TWICE_MAX * len(content)


async def test_who_falls_silent_while_a_file_is_stored_is_noticed_within_seconds(content: bytes) -> None:
    loop = asyncio.get_running_loop()
    handler = Keeping()
    async with scheduling(handler, 100.0, 0.001) as line, attached(line) as (link, session):
        storing = asyncio.create_task(link.store(header_of(content * 64), content * 64))
        while len(handler.kept) < len(content):
            await asyncio.sleep(0.01)
        line.is_frozen, frozen_s = True, loop.time()
        with pytest.raises(SchedulerUnreachable):
            async with asyncio.timeout(15):
                await storing
        stored_s = loop.time() - frozen_s
        with pytest.raises(SwarmError):
            async with asyncio.timeout(15):
                await session
        assert max(stored_s, loop.time() - frozen_s) < 6.0, "of them three are patience"
        line.is_frozen = False
