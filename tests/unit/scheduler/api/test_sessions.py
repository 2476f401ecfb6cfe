"""Who may speak in a session, and how much may wait in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from scheduler.api.sessions import COMMANDS_WAITING_MAX, Connections, Sessions
from scheduler.brain.fleet.membership import Membership, Transition
from swarm.errors import IncompatibleVersion, Refused, StaleMessage
from swarm.messages import PROTOCOL_VERSION, Event, FetchRequest, Heartbeat, Hello, Release, StoreHeader, Welcome
from swarm.process.logs import get_logger
from swarm.types import JobId, PeerId

PEER = PeerId("p")
HELLO = Hello(PEER, 2, PROTOCOL_VERSION, "0", "at p", "", "cpu", 1, 0, -1, JobId(""), 0, 0)
STATE = StoreHeader(JobId("job"), PEER, 2, 0, 1, 0, 0, "model/model.safetensors")


@dataclass
class Heard:
    """The events that came out of the sessions."""

    events: list[Event] = field(default_factory=list)

    def on_event(self, peer: PeerId, event: Event) -> None:
        self.events.append(event)

    def on_transition(self, transition: Transition) -> None:
        pass


class Transfer:
    """Takes what is stored, and expects nobody to fetch."""

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        return "stored"

    def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        raise AssertionError("nothing is fetched here")


@asynccontextmanager
async def sessions(heard: Heard, connections: Connections | None = None) -> AsyncIterator[Sessions]:
    log = get_logger("test")
    async with asyncio.TaskGroup() as tasks:
        yield Sessions(7, Membership(), connections or Connections(log), heard, Transfer(), tasks, log)


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


class Line:
    """The events of one session, sent when the test says so."""

    def __init__(self, *first: Event) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        for event in first:
            self.send(event)

    def send(self, event: Event) -> None:
        self._queue.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            yield await self._queue.get()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_session_begins_with_a_hello_of_this_protocol() -> None:
    async with sessions(Heard()) as made:
        with pytest.raises(Refused, match="begins with Hello"):
            await anext(aiter(made.attach(aiter(Line(Heartbeat(0))))))
        with pytest.raises(IncompatibleVersion, match=f"speaks {PROTOCOL_VERSION + 2}"):
            await anext(aiter(made.attach(aiter(Line(replace(HELLO, protocol=PROTOCOL_VERSION + 2))))))
        with pytest.raises(StaleMessage):
            await made.store(STATE, nothing())


async def test_commands_carry_the_epoch_and_state_comes_from_those_that_are_attached() -> None:
    async with sessions(Heard()) as made:
        session = aiter(made.attach(aiter(Line(HELLO))))
        assert await anext(session) == (7, Welcome(PEER, 1.0))
        assert await made.store(STATE, nothing()) == "stored"
        for other in (replace(STATE, incarnation=1), replace(STATE, peer=PeerId("q"))):
            with pytest.raises(StaleMessage, match="has no session"):
                await made.store(other, nothing())
        made.close()
        with pytest.raises(StopAsyncIteration):
            await anext(session)


async def test_a_session_that_was_replaced_is_not_heard_any_more() -> None:
    heard = Heard()
    async with sessions(heard) as made:
        old, new = Line(HELLO), Line(HELLO)
        first, second = aiter(made.attach(aiter(old))), aiter(made.attach(aiter(new)))
        await anext(first)
        old.send(Heartbeat(1))
        await settle()
        await anext(second)
        old.send(Heartbeat(2))
        new.send(Heartbeat(3))
        await settle()
        assert [event.sequence for event in heard.events if isinstance(event, Heartbeat)] == [1, 3]
        with pytest.raises(StopAsyncIteration):
            await anext(first)
        made.close()
        with pytest.raises(StopAsyncIteration):
            await anext(second)


async def test_a_peer_that_does_not_read_its_commands_loses_its_session() -> None:
    connections = Connections(get_logger("test"))
    async with sessions(Heard(), connections) as made:
        session = aiter(made.attach(aiter(Line(HELLO))))
        await anext(session)
        for _ in range(COMMANDS_WAITING_MAX + 1):
            connections.send(PEER, Release(JobId("job"), ""))
        async with asyncio.timeout(30):
            assert len([command async for command in session]) < COMMANDS_WAITING_MAX
