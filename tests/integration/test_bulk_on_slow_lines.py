"""Files between a stage server and its scheduler on slow lines: they end, sessions live, and little is sent twice."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from swarm.errors import SchedulerUnreachable, SwarmError
from swarm.events import Event, Heartbeat
from swarm.messages import Command, FetchRequest, StoreHeader, Void
from swarm.rpc.channel import bind, new_server
from swarm.rpc.session import GrpcSchedulerLink, add_session_service
from swarm.types import JobId, PeerId
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
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    try:
        async with SlowLine(address, megabits * MBIT, delay_s) as line:
            yield line
    finally:
        await server.stop(None)


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
