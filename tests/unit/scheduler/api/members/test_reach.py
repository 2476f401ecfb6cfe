"""Which stage servers can be dialled, as far as the scheduler sees."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scheduler.api.members import reach
from scheduler.api.members.reach import Reach
from scheduler.api.sessions import Connections
from scheduler.brain.explain.facts import explain_peer
from scheduler.brain.fleet.membership import BESIDE_OTHERS, Membership
from swarm.pki.authority import Authority
from swarm.pki.identity import Wallet
from swarm.pki.names import Role
from swarm.process.logs import get_logger
from swarm.rpc import channel
from swarm.rpc.channel import bind, new_server
from swarm.types import PROTOCOL_VERSION, JobId, PeerId
from swarm.wire.messages import Hello
from tests.support.members import identity_of

A = PeerId("a")
OURS = Authority.new(time.time())


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "LOOK_S", 0.02)
    monkeypatch.setattr(reach, "DIAL_S_MAX", 60.0)  # refusals come at once, answers when the machine has time


@pytest.fixture
def _on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reach, channel):
        monkeypatch.setattr(module, "is_loopback", lambda host: False)


class Pool:
    """Stage servers that have attached, and what is found out about them."""

    def __init__(self) -> None:
        self.membership, self.connections = Membership(), Connections(get_logger("test"))
        wallet = Wallet(identity_of(OURS, Role.SCHEDULER, "scheduler"))
        self.reach = Reach(self.membership, self.connections, wallet, get_logger("test"))

    def attach(self, address: str, *, via_relay: bool = False, origin: str = "") -> None:
        hello = Hello(A, 1, PROTOCOL_VERSION, "0", address, "", "cpu", 1, 0, -1, JobId(""), 0, 0, via_relay=via_relay)
        self.membership.hello(hello, 0.0)
        self.connections.open(A, 1, origin)

    @property
    def fault(self) -> str:
        return self.membership.find(A).unreached

    async def until(self, words: str) -> None:
        """Look until this is known; "" is that it is reached."""
        looking = asyncio.create_task(self.reach.run())
        try:
            async with asyncio.timeout(60):
                while not (words in self.fault if words else not self.fault):
                    await asyncio.sleep(0.01)
        finally:
            looking.cancel()
            await asyncio.wait({looking})

    async def stays_reached(self) -> None:
        assert await self.reach._fault_of(self.membership.find(A).hello) == ""
        looking = asyncio.create_task(self.reach.run())
        await asyncio.sleep(0.2)
        assert self.fault == ""
        looking.cancel()
        await asyncio.wait({looking})


@asynccontextmanager
async def stage_server(name: str, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = new_server()
    port = bind(server, address, Wallet(identity_of(OURS, Role.STAGE_SERVER, name)))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.usefixtures("_on_several_machines")
async def test_one_that_does_not_answer_at_its_address_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    async with stage_server("a") as address:
        pool.attach(address)
        await pool.stays_reached()
    monkeypatch.setattr(reach, "AGAIN_S", 0.05)
    pool = Pool()
    pool.attach(address)
    await pool.until("the scheduler cannot dial it: its address does not answer")
    facts = {fact.topic: fact.text for fact in explain_peer(pool.membership.find(A), None, None, {}, 1.0)}
    assert "--announce" in facts["network"]
    async with stage_server("a", address):
        await pool.until("")
    async with stage_server("b") as address:
        pool = Pool()
        pool.attach(address)
        await pool.until("does not answer")


async def test_loopback_is_for_those_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dialled the scheduler at its LAN address, from the same machine, got no stage for ever."""
    monkeypatch.setattr(reach, "own_addresses", lambda: {"127.0.0.1", "10.0.0.4", "fd00::4"})
    for origin, fault in (
        ("ipv4:127.0.0.1:4000", ""),
        ("ipv6:%5B::1%5D:4000", ""),
        ("ipv4:10.0.0.4:4000", ""),
        ("ipv6:%5Bfd00::4%5D:4000", ""),
        ("ipv6:%5B::ffff:10.0.0.4%5D:4000", ""),
        ("ipv4:10.0.0.5:4000", "no other machine"),
    ):
        pool = Pool()
        pool.attach("127.0.0.1:1", origin=origin)
        await (pool.until(fault) if fault else pool.stays_reached())


@pytest.mark.usefixtures("_on_several_machines")
async def test_one_that_listens_at_relays_is_not_dialled() -> None:
    pool = Pool()
    pool.attach("127.0.0.1:1", via_relay=True)
    looking = asyncio.create_task(pool.reach.run())
    await asyncio.sleep(0.2)
    assert (pool.fault, pool.reach._tried) == ("", {})
    looking.cancel()
    await asyncio.wait({looking})


@pytest.mark.usefixtures("_on_several_machines")
@pytest.mark.parametrize("listens", [False, True])
async def test_of_an_address_that_is_not_its_own_a_stage_server_learns_nothing_but_that_it_is_not_there(
    monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """A stage server could name one port after the other of any machine that the scheduler reaches: a refusal came at
    once and in words of its own, and silence after three seconds."""
    monkeypatch.setattr(reach, "DIAL_S_MAX", 0.5)
    loop, pool = asyncio.get_running_loop(), Pool()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        began_s = loop.time()
        pool.attach(f"127.0.0.1:{port}", origin="ipv4:10.0.0.5:4000")
        await pool.until("dial")
        assert loop.time() - began_s >= 0.5
        assert pool.fault == reach.NOT_REACHED


async def test_those_on_loopback_are_not_reached_while_others_are_on_other_machines() -> None:
    pool = Pool()
    pool.attach("127.0.0.1:1", origin="ipv4:127.0.0.1:4000")
    await pool.stays_reached()
    far = Hello(PeerId("far"), 1, PROTOCOL_VERSION, "0", "192.0.2.7:7951", "", "cpu", 1, 0, -1, via_relay=True)
    pool.membership.hello(far, 0.0)
    pool.connections.open(far.peer, 1, "ipv4:127.0.0.1:4001")
    await pool.stays_reached()
    pool.connections.open(far.peer, 1, "ipv4:192.0.2.7:4000")
    await pool.until(BESIDE_OTHERS)
    pool.membership.revoked(PeerId("far"), 0.0, "it left")
    await pool.until("")
