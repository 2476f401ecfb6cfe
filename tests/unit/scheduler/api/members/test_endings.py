"""A stage server whose process has ended is gone before the grace period is over."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from scheduler.api.members import endings
from scheduler.api.members.endings import Endings, refuses
from scheduler.api.sessions import Connections
from scheduler.brain.fleet.membership import Membership, Transition
from swarm.events import Hello
from swarm.messages import PROTOCOL_VERSION
from swarm.process.logs import get_logger
from swarm.types import JobId, PeerId, PeerState

A = PeerId("a")
HERE = "ipv4:127.0.0.1:5000"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "LOOK_S", 0.01)
    monkeypatch.setattr(endings, "PAUSE_S", 0.01)
    monkeypatch.setattr(endings, "DIAL_S_MAX", 60.0)


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens, as this test holds it."""
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


async def seen(address: str, origin: str = HERE, *, incarnation: int = 1, unreached: str = "") -> list[Transition]:
    """What is found out after the session of a peer at this address broke."""
    membership, connections, heard = Membership(), Connections(get_logger("test")), list[Transition]()
    membership.hello(Hello(A, incarnation, PROTOCOL_VERSION, "0", address, "", "cpu", 1, 0, -1, JobId("")), 0.0)
    membership.reached(A, incarnation, unreached)
    session = connections.open(A, incarnation, origin)
    made, before = Endings(membership, connections, heard.append, get_logger("test")), asyncio.all_tasks()
    looking = asyncio.create_task(made.run())
    while A not in made._origins:
        await asyncio.sleep(0)
    connections.close(A, session)
    membership.disconnected(A, incarnation, 1.0)
    while not made._origins[A].dialled:  # it was decided whether to dial
        await asyncio.sleep(0)
    if dialling := asyncio.all_tasks() - before - {looking}:
        await asyncio.wait(dialling)
    looking.cancel()
    await asyncio.wait({looking})
    return heard


async def test_who_refuses_connections_has_ended(nobody: str) -> None:
    (gone,) = await seen(nobody)
    assert (gone.peer, gone.before, gone.after) == (A, PeerState.SUSPECT, PeerState.GONE)
    assert "nobody listens at 127.0.0.1:" in gone.reason


async def test_who_listens_may_come_back() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        assert await seen(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") == []


async def test_a_port_at_another_host_than_the_sessions_says_nothing(nobody: str) -> None:
    assert await seen(nobody, "ipv4:10.0.0.5:5000") == []
    assert await seen("") == []


async def test_a_port_that_was_never_reached_says_nothing(nobody: str) -> None:
    """A firewall that lets stage servers alone through refuses the scheduler while the process lives."""
    assert await seen(nobody, unreached="the scheduler cannot dial it") == []


async def test_no_answer_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(endings, "DIAL_S_MAX", 0.02)
    monkeypatch.setattr(asyncio, "open_connection", silent)
    assert not await refuses("127.0.0.1:1")


def test_only_the_incarnation_whose_session_broke_has_ended() -> None:
    membership = Membership()
    for incarnation in (1, 2):
        membership.hello(Hello(A, incarnation, PROTOCOL_VERSION, "0", "x:1", "", "cpu", 1, 0, -1, JobId("")), 0.0)
    membership.disconnected(A, 2, 1.0)
    assert membership.ended(A, 1, 1.0, "it is another process") == []
    assert [one.after for one in membership.ended(A, 2, 1.0, "its process has ended")] == [PeerState.GONE]


def test_who_is_heard_again_has_not_ended() -> None:
    membership = Membership()
    hello = Hello(A, 1, PROTOCOL_VERSION, "0", "x:1", "", "cpu", 1, 0, -1, JobId(""))
    membership.hello(hello, 0.0)
    membership.disconnected(A, 1, 1.0)
    membership.hello(hello, 1.1)
    assert membership.ended(A, 1, 1.2, "nobody listens") == []
