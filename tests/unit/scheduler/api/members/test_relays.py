"""Relays at the scheduler: all stage servers hear of them, and they are asked what they carried; they get no stage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler.api.members.passes import Issuer, Passes
from scheduler.api.members.relays import RelayDesk
from scheduler.api.sessions import Connections
from scheduler.brain.fleet.membership import Membership
from scheduler.jobs.registry import JobRegistry
from swarm.errors import IncompatibleVersion, Refused
from swarm.limits import Buckets
from swarm.pki.authority import Authority
from swarm.pki.identity import Wallet, issue
from swarm.pki.names import Role, scheduler_of
from swarm.pki.passes import PassKey
from swarm.process.logs import get_logger
from swarm.relay.session import RelaySession
from swarm.rpc.channel import bind, new_server
from swarm.rpc.guard import Guard
from swarm.types import JobId, PeerId
from swarm.wire import relay_pb2_grpc
from swarm.wire.messages import CutOff, RelayAt, UseRelays, Welcome
from tests.support.members import identity_of
from tests.support.relays import until

OURS, KEY = Authority.new(time.time()), PassKey.new()
P, Q = PeerId("p"), PeerId("q")


class Service:
    """What a relay hears of its scheduler."""

    def __init__(self) -> None:
        self.heard: list[Welcome | CutOff] = []
        self.used: dict[tuple[str, PeerId, PeerId], int] = {}

    def welcomed(self, welcome: Welcome) -> None:
        self.heard.append(welcome)

    def cut_off(self, order: CutOff) -> None:
        self.heard.append(order)

    def take_used(self) -> dict[tuple[str, PeerId, PeerId], int]:
        used, self.used = self.used, {}
        return used


@dataclass
class Side:
    desk: RelayDesk
    passes: Passes
    connections: Connections
    membership: Membership
    address: str
    relays: list[asyncio.Task[None]] = field(default_factory=list)

    def told(self, peer: PeerId) -> list[Any]:
        session = self.connections.get(peer)
        assert session is not None
        return [session.commands.get_nowait() for _ in range(session.commands.qsize())]

    def attach(self, name: str, address: str = "10.0.0.1:7955") -> tuple[Service, asyncio.Task[None]]:
        async def find() -> str:
            return self.address

        service, wallet = Service(), Wallet(identity_of(OURS, Role.RELAY, name))
        session = RelaySession(address, "0", cast(Any, service), wallet, get_logger("test"), report_s=0.05)
        task = asyncio.create_task(session.keep(find))
        self.relays.append(task)
        return service, task


@asynccontextmanager
async def _side() -> AsyncIterator[Side]:
    connections, membership = Connections(get_logger("test")), Membership()
    registry = SimpleNamespace(get=lambda id: None)
    passes = Passes(Issuer(KEY, OURS.cluster), cast(JobRegistry, registry), membership, connections, time.time)
    desk = RelayDesk(passes, connections, get_logger("test"))
    connections.open(P, 1)
    server = new_server(Guard(lambda caller, method: None))
    relay_pb2_grpc.add_RelaysServicer_to_server(desk, server)  # type: ignore[no-untyped-call]
    wallet = Wallet(issue(OURS, scheduler_of(OURS.cluster), time.time()))
    side = Side(desk, passes, connections, membership, f"127.0.0.1:{bind(server, '127.0.0.1:0', wallet)}")
    await server.start()
    try:
        yield side
    finally:
        for task in side.relays:
            task.cancel()
        await asyncio.wait({*side.relays, asyncio.create_task(asyncio.sleep(0))})
        await server.stop(None)


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    async with _side() as made:
        yield made


async def test_stage_servers_hear_of_relays_as_they_come_and_go_and_none_is_a_stage_server(side: Side) -> None:
    here: list[bool] = []
    side.desk.on_change = here.append
    service, task = side.attach("r1")
    await until(lambda: bool(service.heard))
    at = RelayAt("r1", "10.0.0.1:7955")
    assert side.told(P) == [UseRelays((at,))]
    assert side.passes.welcome(Q, 1.0).relays == (at,)
    (welcome,) = service.heard
    assert isinstance(welcome, Welcome)
    assert welcome.pass_key == KEY.public
    assert [(view.id, view.state, view.address) for view in side.desk.views()] == [("r1", "relay", at.address)]
    assert list(side.membership.peers()) == []
    task.cancel()
    await until(lambda: side.desk.views() == [])
    assert side.told(P) == [UseRelays(())]
    assert side.passes.welcome(Q, 1.0).relays == ()
    assert here == [True, False], "jobs hear of the first one and of the last"


async def test_a_relay_hears_who_was_revoked(side: Side) -> None:
    service, _ = side.attach("r1")
    await until(lambda: bool(service.heard))
    side.passes.cut_off(Q)
    await until(lambda: len(service.heard) == 2)
    order = service.heard[-1]
    assert isinstance(order, CutOff)
    assert order.peer == Q
    later, _ = side.attach("r2")
    await until(lambda: bool(later.heard))
    assert cast(Welcome, later.heard[0]).cut_off == (order,)


async def test_what_a_relay_carried_is_told_of_both_ends(side: Side) -> None:
    service, _ = side.attach("r1")
    job = JobId("j")
    service.used = {(job, P, Q): 3 << 20, (job, Q, P): 5}
    await until(lambda: bool(side.desk.facts(P)))
    service.used = {(job, P, Q): 1 << 20}
    await until(lambda: "4.0 MiB from it" in side.desk.facts(P)[0].text)
    (fact,) = side.desk.facts(P)
    assert fact.text == "through relay r1, job j: 5 B came to it, 4.0 MiB from it"
    assert side.desk.facts(Q)[0].numbers == {"received_bytes": 4 << 20, "sent_bytes": 5}
    assert side.desk.facts(PeerId("z")) == []


async def test_a_relay_of_another_version_or_with_no_address_is_refused(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, task = side.attach("r1", "unix:/run/x")
    await asyncio.sleep(0.5)
    assert service.heard == []
    assert not task.done(), "it tries again"
    assert side.desk.views() == []
    monkeypatch.setattr("swarm.relay.session.PROTOCOL_VERSION", 1)
    _, older = side.attach("r2")
    with pytest.raises(IncompatibleVersion):
        await older
    assert Refused.code == "E1200"


async def test_a_relay_that_dials_without_end_floods_no_stage_server(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its sessions was told to all stage servers, as often as it liked."""
    monkeypatch.setattr("swarm.relay.session.AGAIN_S", (0.01, 0.01))
    told: list[object] = []
    monkeypatch.setattr(side.connections, "send", lambda peer, command: told.append(command))
    side.desk._beginning = Buckets(0.001, 3, 10)
    service, _ = side.attach("r1")
    other, _ = side.attach("r2")
    await until(lambda: bool(service.heard) and bool(other.heard))
    for _ in range(6):
        side.desk.revoke("r1")
        await asyncio.sleep(0.1)
    assert len(told) <= 2 * 3 + 1, "three times it comes and goes, and the other one comes"
    await until(lambda: [view.id for view in side.desk.views()] == ["r2"])
