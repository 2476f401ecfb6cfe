"""Tensors between machines: only members send and receive them, each under its own name, and to whom they are meant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from stage_server.app import may_exchange
from swarm.errors import PeerUnavailable, Refused
from swarm.pki.authority import Authority
from swarm.pki.identity import Identity, Wallet
from swarm.pki.names import Role, any_of
from swarm.rpc import channel
from swarm.rpc.channel import connect, new_server
from swarm.rpc.guard import Guard
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.types import JobId, PeerId
from swarm.wire.messages import StateReply, StateRequest, TensorHeader
from tests.support.headers import header_of
from tests.support.members import identity_of
from tests.support.serving import serving

A, B = PeerId("a"), PeerId("b")
OURS = Authority.new(time.time())
ASKED = StateRequest(
    job=JobId("j"), timeline=0, stage=0, part="records", chunk=0, start=0, stop=1, sender=A, incarnation=1
)


class Receiver:
    """Takes whatever is let in."""

    def __init__(self) -> None:
        self.senders: list[str] = []

    def admit(self, header: TensorHeader) -> None:
        self.senders.append(header.sender)

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        pass

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes]:
        self.senders.append(request.sender)
        raise Refused("there is no state here")


@pytest.fixture(autouse=True)
def _on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between loopback addresses tensors are plaintext; here each process is on a machine of its own."""
    monkeypatch.setattr(channel, "is_loopback", lambda host: False)


@asynccontextmanager
async def stage_server(name: str, receiver: Receiver) -> AsyncIterator[str]:
    server = new_server(Guard(may_exchange))
    add_peer_service(server, receiver, None, receiver)
    async with serving(server, Wallet(identity_of(OURS, Role.STAGE_SERVER, name))) as address:
        yield address


@asynccontextmanager
async def links_of(identity: Identity | None) -> AsyncIterator[GrpcPeerLinks]:
    links = GrpcPeerLinks(wallet=Wallet(identity))
    try:
        yield links
    finally:
        await links.close()


async def sent(identity: Identity | None, address: str, *, sender: str = "a", to: PeerId | None = B) -> None:
    async with links_of(identity) as links, asyncio.timeout(60):
        await links.send(address, replace(header_of(4), sender=PeerId(sender)), b"abcd", to=to)


async def test_a_member_sends_under_its_own_name_only() -> None:
    receiver, own = Receiver(), identity_of(OURS, Role.STAGE_SERVER, "a")
    async with stage_server("b", receiver) as address:
        await sent(own, address)
        assert receiver.senders == ["a"]
        with pytest.raises(Refused, match="stage-server a called itself c"):
            await sent(own, address, sender="c")
        async with links_of(own) as links:
            with pytest.raises(Refused, match="no state here"):
                await links.pull(address, ASKED, 1 << 20, to=B)
            with pytest.raises(Refused, match="called itself c"):
                await links.pull(address, replace(ASKED, sender=PeerId("c")), 1 << 20, to=B)
    assert receiver.senders == ["a", "a"]


async def test_a_tensor_goes_to_whom_it_is_meant_whoever_has_his_address() -> None:
    receiver, own = Receiver(), identity_of(OURS, Role.STAGE_SERVER, "a")
    async with stage_server("thief", receiver) as address:
        with pytest.raises(PeerUnavailable):
            await sent(own, address, to=B)
        async with links_of(own) as links:
            with pytest.raises(PeerUnavailable):
                await links.pull(address, ASKED, 1 << 20, to=B)
    assert receiver.senders == []


async def test_nobody_else_reaches_a_stage_server() -> None:
    receiver, other = Receiver(), Authority.new(time.time())
    stranger = identity_of(other, Role.STAGE_SERVER, "a")
    async with stage_server("b", receiver) as address:
        for nobody in (
            None,
            Identity(stranger.key_pem, stranger.certificate_pem, OURS.pem),
            identity_of(OURS, Role.STAGE_SERVER, "a", life_s=-1.0),
        ):
            with pytest.raises(PeerUnavailable):
                await sent(nobody, address)
        admin = identity_of(OURS, Role.ADMIN, "a")
        name = any_of(OURS.cluster, Role.STAGE_SERVER)
        async with connect(address, admin, name) as dialled:
            for method in ("Exchange", "Pull"):
                call = dialled.unary_stream(f"/swarm.wire.Peer/{method}")(b"", timeout=60)
                with pytest.raises(grpc.RpcError, match="admin a is no stage server"):
                    await call.read()
    assert receiver.senders == []
