"""Passes at the port of a stage server: it takes tensors from, and gives state to, those whom the scheduler sent.

The attacks are over gRPC; what each pass is worth is a table (tests/unit/stage_server/brain/test_passes.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from stage_server.app import may_exchange
from stage_server.brain.passes import PassSlot
from stage_server.session.gate import PassGate
from swarm.errors import NoPass, PeerUnavailable, Refused, Revoked, StaleMessage, SwarmError
from swarm.pki.authority import Authority
from swarm.pki.identity import Wallet
from swarm.pki.names import Role
from swarm.pki.passes import PassKey
from swarm.rpc import channel
from swarm.rpc.channel import new_server
from swarm.rpc.guard import Guard
from swarm.rpc.links import peers
from swarm.rpc.links.memory import LEAST_BYTES
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.rpc.links.state import state_reply
from swarm.rpc.passes import issue
from swarm.types import JobId, PeerId
from swarm.wire.messages import CutOff, Pass, StateReply, StateRequest, TensorHeader, Welcome
from tests.support.headers import header_of
from tests.support.members import identity_of
from tests.support.relays import until
from tests.support.serving import links_here, serving

pytestmark = pytest.mark.timeout(300)

A, B, JOB = PeerId("a"), PeerId("b"), JobId("j")
OURS, KEY = Authority.new(time.time()), PassKey.new()
NOW = time.time()
AT = PassSlot(JOB, 0, 1, 4, is_tied=False)
PASS = Pass(OURS.cluster, JOB, 0, A, 1, 1, 4, NOW, NOW + 600)
ASKED = StateRequest(JOB, 0, 1, "state", 0, 0, 1, A, 1)


class Receiver:
    """Takes what is let in, and holds it while it is told to."""

    def __init__(self) -> None:
        self.came = self.got = 0
        self.opened = asyncio.Event()
        self.opened.set()

    def admit(self, header: TensorHeader) -> None:
        pass

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        self.came += 1
        await self.opened.wait()
        self.got += 1

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes]:
        self.came += 1
        await self.opened.wait()
        return state_reply(1, 0, b"weights"), b"weights"


@dataclass
class World:
    """The stage server b, which serves stage 1 of 4, and the links of a."""

    receiver: Receiver
    gate: PassGate
    address: str
    wallet: Wallet
    links: GrpcPeerLinks
    denied: list[str]

    async def send(self, **header: Any) -> None:
        async with asyncio.timeout(60):
            await self.links.send(self.address, replace(header_of(4), **header), b"abcd", to=B)

    async def pull(self, **request: Any) -> bytes:
        async with asyncio.timeout(60):
            _, payload = await self.links.pull(self.address, replace(ASKED, **request), 1 << 20, to=B)
        return bytes(payload)

    async def refusals(self, **changed: Any) -> tuple[type[SwarmError] | None, type[SwarmError] | None]:
        """What comes of a tensor and of a pull with this pass."""
        self.wallet.pass_token = issue(KEY, replace(PASS, **changed))
        return await _error(self.send()), await _error(self.pull())


async def _error(call: Any) -> type[SwarmError] | None:
    try:
        await call
    except SwarmError as error:
        return type(error)
    return None


@pytest.fixture(params=["TLS", "plaintext"])
async def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """On two machines, or on one."""
    async with _world(monkeypatch, speaks_tls=request.param == "TLS") as made:
        yield made


@asynccontextmanager
async def _world(monkeypatch: pytest.MonkeyPatch, *, speaks_tls: bool) -> AsyncIterator[World]:
    monkeypatch.setattr(channel, "is_loopback", lambda host: not speaks_tls)
    receiver, denied = Receiver(), list[str]()
    own, theirs = (Wallet(identity_of(OURS, Role.STAGE_SERVER, name)) for name in (B, A))
    gate = PassGate(own, lambda: AT, lambda _, error: denied.append(error.code))
    gate.welcomed(Welcome(B, 1.0, KEY.public, NOW))
    server = new_server(Guard(may_exchange) if speaks_tls else None)
    add_peer_service(server, receiver, None, receiver, gate)
    async with serving(server, own if speaks_tls else None) as address:
        theirs.pass_token = issue(KEY, PASS)
        links = GrpcPeerLinks(wallet=theirs)
        try:
            yield World(receiver, gate, address, theirs, links, denied)
        finally:
            await links.close()


async def test_whom_the_scheduler_sent_is_let_in(world: World) -> None:
    await world.send()
    assert await world.pull() == b"weights"
    assert await world.refusals(stage=2) == (None, NoPass), "the next stage sends, and has no business with the state"
    assert world.receiver.got == 2


async def test_payloads_go_by_memory_in_a_stream_that_was_let_in_and_no_longer(world: World) -> None:
    """With TLS as without: the word of the file is said in the stream alone."""
    written_bytes = 0

    async def send() -> None:
        async with asyncio.timeout(20):
            await world.links.send(world.address, header_of(LEAST_BYTES), bytes(LEAST_BYTES), to=B)

    while not written_bytes:
        await send()
        (link,) = world.links._links.values()
        written_bytes = link._memory.written_bytes
    world.wallet.pass_token = b""
    assert await _error(send()) is NoPass
    (link,) = world.links._links.values()
    assert link._memory.written_bytes == 0


async def test_a_pass_for_something_else_lets_nobody_in(world: World) -> None:
    assert await world.refusals(stage=3) == (NoPass, NoPass), "right job, wrong stage"
    assert await world.refusals(expires_unix_s=NOW - 1) == (NoPass, NoPass)
    assert await world.refusals(job=JobId("other")) == (StaleMessage, StaleMessage)
    assert await world.refusals(timeline=1) == (StaleMessage, StaleMessage)
    for forged in (b"", issue(PassKey.new(), PASS), issue(KEY, PASS)[:-1] + b"\x01"):
        world.wallet.pass_token = forged
        assert (await _error(world.send()), await _error(world.pull())) == (NoPass, NoPass)
    assert world.receiver.got == 0
    assert world.denied == ["E0508"] * 10


async def test_the_pass_of_another_is_none_and_nobody_is_named_but_its_holder(world: World) -> None:
    # On one machine nothing but the message names another than the pass.
    refused = Refused if channel.is_loopback("") else NoPass
    assert await world.refusals(peer=PeerId("c")) == (refused, refused)
    world.wallet.pass_token = issue(KEY, PASS)
    for changed in ({"sender": PeerId("c")}, {"incarnation": 2}, {"job": JobId("other")}):
        assert await _error(world.send(**changed)) is Refused
        assert await _error(world.pull(**changed)) is Refused
    assert world.receiver.got == 0


async def test_whoever_is_revoked_is_cut_off_in_the_midst(world: World) -> None:
    world.receiver.opened.clear()
    sending = asyncio.ensure_future(_error(world.send()))
    await until(lambda: world.receiver.came == 1)
    world.gate.cut_off(CutOff(A, NOW))
    assert await sending is Revoked
    world.receiver.opened.set()
    assert await world.refusals() == (Revoked, Revoked)
    assert world.receiver.got == 0
    assert await world.refusals(issued_unix_s=NOW + 1) == (None, None), "it joined again"


@pytest.mark.parametrize("call", [World.send, World.pull])
async def test_what_goes_on_with_one_who_was_revoked_ends_and_it_is_not_dialled_again(
    world: World, call: Callable[[World], Awaitable[object]]
) -> None:
    """An order from before the revocation may still name it; a broken link was dialled anew for that."""
    world.receiver.opened.clear()
    calling = asyncio.ensure_future(_error(call(world)))
    await until(lambda: world.receiver.came == 1)
    world.links.cut_off(PeerId("c"))
    await asyncio.sleep(0.05)
    assert not calling.done()
    world.links.cut_off(B)
    assert await calling is PeerUnavailable
    world.receiver.opened.set()
    assert (await _error(world.send()), await _error(world.pull())) == (PeerUnavailable, PeerUnavailable)
    assert world.receiver.came == 1


async def test_who_was_revoked_may_join_again_and_is_dialled_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SHUNNED_S", 0.0)
    world.links.cut_off(B)
    assert (await _error(world.send()), await _error(world.pull())) == (None, None)


async def test_a_renewed_pass_breaks_nothing_that_is_under_way(world: World) -> None:
    """The older link ends when its tensors have arrived, so no stream lives as long as its pass."""
    world.receiver.opened.clear()
    first = asyncio.ensure_future(_error(world.send()))
    await until(lambda: world.receiver.came == 1)
    world.wallet.pass_token = issue(KEY, replace(PASS, issued_unix_s=NOW + 300, expires_unix_s=NOW + 900))
    second = asyncio.ensure_future(_error(world.send()))
    await until(lambda: world.receiver.came == 2)
    assert {shown.issued_unix_s for shown in world.gate.inside} == {NOW, NOW + 300}
    world.receiver.opened.set()
    assert (await first, await second) == (None, None)
    await until(lambda: len(world.gate.inside) == 1)
    assert [shown.issued_unix_s for shown in world.gate.inside] == [NOW + 300]
    assert world.receiver.got == 2


async def test_no_connection_outlives_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody stays whose certificate has ended. What breaks is a link like any other, and is dialled again."""
    monkeypatch.setattr(channel, "CONNECTION_GRACE_S", 0.2)
    receiver, server = Receiver(), new_server(None, 0.3)
    add_peer_service(server, receiver)
    async with serving(server) as address, links_here() as links:
        receiver.opened.clear()
        with pytest.raises(PeerUnavailable, match="max connection age"):
            await links.send(address, header_of(4), b"abcd")
        receiver.opened.set()
        while await _error(links.send(address, header_of(4), b"abcd")) is PeerUnavailable:
            pass  # on a machine that stands still connections live no longer than this
    assert receiver.got >= 1
