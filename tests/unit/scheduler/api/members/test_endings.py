"""A stage server whose process has ended is gone before the grace period is over."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from scheduler.api.members import endings
from scheduler.api.members.endings import refuses, watch_endings
from scheduler.api.sessions import Connections
from scheduler.brain.fleet.membership import Membership, Transition
from swarm.process.logs import get_logger
from swarm.types import PROTOCOL_VERSION, JobId, PeerId, PeerState
from swarm.wire.messages import Hello

A = PeerId("a")
HERE = "ipv4:127.0.0.1:5000"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "LOOK_S", 0.0)
    monkeypatch.setattr(endings, "PAUSE_S", 0.0)
    monkeypatch.setattr(endings, "DIAL_S_MAX", 60.0)


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens, as this test holds it."""
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


class Scene:
    """A stage server at this address whose session broke, and what is found out."""

    def __init__(self, address: str) -> None:
        self.membership, self.connections = Membership(), Connections(get_logger("test"))
        self.heard: list[Transition] = []
        self.told = asyncio.Event()
        self.membership.hello(Hello(A, 1, PROTOCOL_VERSION, "0", address, "", "cpu", 1, 0, -1, JobId("")), 0.0)
        session = self.connections.open(A, 1, HERE)
        self.looking = asyncio.create_task(
            watch_endings(self.membership, self.connections, self.hear, get_logger("test"))
        )
        self.session = session

    def hear(self, transition: Transition) -> None:
        self.heard.append(transition)
        self.told.set()

    async def breaks(self) -> None:
        await asyncio.sleep(0)  # the session was seen
        self.connections.close(A, self.session)
        self.membership.disconnected(A, 1, 1.0)

    async def end(self) -> None:
        self.looking.cancel()
        await asyncio.wait({self.looking})


async def test_who_refuses_connections_has_ended(nobody: str) -> None:
    scene = Scene(nobody)
    await scene.breaks()
    await scene.told.wait()
    await scene.end()
    (gone,) = scene.heard
    assert (gone.peer, gone.before, gone.after) == (A, PeerState.SUSPECT, PeerState.GONE)
    assert "nobody listens at 127.0.0.1:" in gone.reason


async def test_who_has_a_session_again_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tunnel that failed refuses connections for good, and the process has found another way."""
    dialled, answer = asyncio.Event(), asyncio.Event()

    async def refuses_at_last(_: str) -> bool:
        dialled.set()
        await answer.wait()
        return True

    monkeypatch.setattr(endings, "refuses", refuses_at_last)
    scene = Scene("127.0.0.1:1")
    await scene.breaks()
    await dialled.wait()
    scene.connections.open(A, 1, HERE)
    answer.set()
    for _ in range(3):
        await asyncio.sleep(0)
    await scene.end()
    assert scene.heard == []


async def test_who_listens_may_come_back() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        assert not await refuses(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_no_answer_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(endings, "DIAL_S_MAX", 0.02)
    monkeypatch.setattr(asyncio, "open_connection", silent)
    assert not await refuses("127.0.0.1:1")


def test_only_the_incarnation_whose_session_broke_and_that_is_not_heard_again_has_ended() -> None:
    membership = Membership()
    for incarnation in (1, 2):
        membership.hello(Hello(A, incarnation, PROTOCOL_VERSION, "0", "x:1", "", "cpu", 1, 0, -1, JobId("")), 0.0)
    membership.disconnected(A, 2, 1.0)
    assert membership.ended(A, 1, 1.0, "it is another process") == []
    membership.hello(Hello(A, 2, PROTOCOL_VERSION, "0", "x:1", "", "cpu", 1, 0, -1, JobId("")), 1.1)
    assert membership.ended(A, 2, 1.2, "it is heard again") == []
    membership.disconnected(A, 2, 1.3)
    assert [transition.after for transition in membership.ended(A, 2, 1.3, "its process has ended")] == [PeerState.GONE]
