"""How long a ping to a neighbour may take: longer after each link that stood and broke as answers came late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from swarm.errors import PeerUnavailable
from swarm.messages import RelayAt
from swarm.peer_messages import StateReply, StateRequest, TensorHeader
from swarm.pki.identity import Wallet
from swarm.rpc.channel import PING_S_MAX, bind, new_server, ping_within
from swarm.rpc.links import dialling as module
from swarm.rpc.links.dialling import PING_FACTOR, PING_S, STOOD_S, Connection, Dialler
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.links.peers import GrpcPeerLinks, PeerLinks
from swarm.rpc.links.state import state_reply
from swarm.types import JobId, PeerId
from tests.support.headers import header_of
from tests.support.narrow import narrow

A, B = PeerId("a"), PeerId("b")


@pytest.fixture
def pings(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the pings of each channel may take, in the order in which the channels are made."""
    made: list[float] = []
    really = module.connect_to_peer

    def noted(address: str, peer: PeerId | None, wallet: Wallet, more: list[tuple[str, int | str]]) -> object:
        made.append(int(dict(more)["grpc.http2.ping_timeout_ms"]) / 1000)
        assert more == ping_within(made[-1])
        return really(address, peer, wallet, more)

    monkeypatch.setattr(module, "connect_to_peer", noted)
    return made


LATE, RESET = "Stream removed (recvmsg:Connection timed out (110))", "recvmsg:Connection reset by peer (104)"


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def dialled(dialler: Dialler, peer: PeerId | None = A, address: str = "127.0.0.1:9") -> Connection:
    made = await dialler.dial(address, peer)
    await made.close()
    return made


async def test_a_link_that_stood_and_broke_with_answers_owed_gets_longer_pings(pings: list[float]) -> None:
    dialler = Dialler(Wallet())
    for stood, owed in ((False, True), (True, False), (True, True), (True, True), (True, True), (True, True)):
        made = await dialled(dialler)
        made.stood_at_s, made.owed = now_s() if stood else None, owed
        dialler.broke(made, LATE)
    await dialled(dialler)
    await dialled(dialler, B)
    await dialled(dialler, None)
    longer = [PING_S, PING_FACTOR * PING_S, PING_FACTOR**2 * PING_S, PING_S_MAX, PING_S_MAX]
    assert pings == [PING_S, PING_S, *longer, PING_S, PING_S]


async def test_pings_get_shorter_when_a_link_is_replaced_in_order(pings: list[float]) -> None:
    dialler = Dialler(Wallet())
    for _ in range(2):
        made = await dialled(dialler)
        made.stood_at_s, made.owed = now_s(), True
        dialler.broke(made, LATE)
    for _ in range(3):
        dialler.ease("127.0.0.1:9", A)
        await dialled(dialler)
    assert pings[2:] == [PING_FACTOR * PING_S, PING_S, PING_S]


async def test_a_relay_that_breaks_says_nothing_of_the_own_address(pings: list[float]) -> None:
    dialler = Dialler(Wallet())
    made = await dialled(dialler)
    made.stood_at_s, made.owed = now_s(), True
    made.way = RelayAt("r", "127.0.0.1:8")
    dialler.broke(made, LATE)
    await dialled(dialler)
    assert pings == [PING_S, PING_S]


@pytest.mark.parametrize(
    ("why", "factor"),
    [
        (LATE, PING_FACTOR),
        ("a:1 does not answer: ping timeout", PING_FACTOR),
        ("Keepalive timeout. Closing transport.", PING_FACTOR),
        (RESET, 1.0),
        ("a:1 does not answer: Socket closed", 1.0),
    ],
)
async def test_only_a_link_on_which_nothing_came_in_time_gets_longer_pings(
    pings: list[float], why: str, factor: float
) -> None:
    dialler = Dialler(Wallet())
    made = await dialled(dialler)
    made.stood_at_s, made.owed = now_s(), True
    dialler.broke(made, why)
    await dialled(dialler)
    assert pings == [PING_S, factor * PING_S]


async def test_pings_get_shorter_after_a_link_that_stood_for_long_and_are_forgotten_with_the_peer(
    pings: list[float],
) -> None:
    dialler = Dialler(Wallet())
    for stood_s, why in ((0.0, LATE), (0.0, RESET), (STOOD_S, RESET), (0.0, LATE)):
        made = await dialled(dialler)
        made.stood_at_s, made.owed = now_s() - stood_s, True
        dialler.broke(made, why)
    await dialled(dialler)
    dialler.forget(A)
    await dialled(dialler)
    longer_s = PING_FACTOR * PING_S
    assert pings == [PING_S, longer_s, longer_s, PING_S, longer_s, PING_S]


class Receiver:
    """Counts what arrives."""

    def __init__(self) -> None:
        self.arrived = 0

    def admit(self, header: TensorHeader) -> None:
        pass

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        self.arrived += 1

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes]:
        return state_reply(1, 0, STATE), STATE


@asynccontextmanager
async def stage_server(receiver: Receiver) -> AsyncIterator[str]:
    server = new_server(more=ping_within(PING_S_MAX))  # as stage_server/app.py
    add_peer_service(server, receiver, None, receiver)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def again_and_again(attempt: Callable[[], Awaitable[object]]) -> int:
    """How often it was in vain."""
    for failures in range(20):
        try:
            await attempt()
        except PeerUnavailable:
            await asyncio.sleep(0.1)
        else:
            return failures
    raise AssertionError("it never arrived")


async def patiently(links: PeerLinks, address: str) -> int:
    """Send as a replica does, again and again; how often that was in vain."""
    return await again_and_again(lambda: links.send(address, header_of(SIZE_BYTES), bytes(SIZE_BYTES)))


SIZE_BYTES, RATE = 120_000, 80_000  # two of them take three seconds; a ping goes after one, and has half
STATE = bytes(2 * SIZE_BYTES)


async def test_tensors_arrive_over_a_link_on_which_pings_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow link was broken every two seconds, and no tensor that takes longer ever arrived."""
    monkeypatch.setattr(module, "PING_S", 0.5)
    receiver = Receiver()
    async with stage_server(receiver) as address, narrow(address, RATE) as way:
        links = GrpcPeerLinks()
        try:
            failures = await asyncio.gather(*(patiently(links, way) for _ in range(2)))
            assert max(failures) >= 1, "the link is not slow enough to show anything"
            assert links._dialler._ping_s[way] > module.PING_S
        finally:
            await links.close()
    assert receiver.arrived >= 2


async def test_state_arrives_over_a_link_on_which_pings_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pull has a connection of its own, which learned nothing from the one before, and broke like it."""
    monkeypatch.setattr(module, "PING_S", 0.5)
    request = StateRequest(JobId("job"), 0, 0, "state", 0, 0, 0, PeerId("joiner"), 1)
    async with stage_server(Receiver()) as address, narrow(address, RATE) as way:
        links = GrpcPeerLinks()
        try:
            pulls = (again_and_again(lambda: links.pull(way, request, len(STATE))) for _ in range(2))
            assert max(await asyncio.gather(*pulls)) >= 1, "the link is not slow enough to show anything"
            assert links._dialler._ping_s[way] > module.PING_S
        finally:
            await links.close()
