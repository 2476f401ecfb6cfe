"""Relays and stage servers that only relays lead to, in one process, over real gRPC and TLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from stage_server.app import may_exchange
from stage_server.brain.passes import PassSlot
from stage_server.session.gate import PassGate
from stage_server.session.relays import RelayListener
from swarm.pki.authority import Authority
from swarm.pki.identity import Wallet
from swarm.pki.names import Role
from swarm.pki.passes import PassKey
from swarm.process.logs import get_logger
from swarm.relay.budget import Budget
from swarm.relay.metrics import RelayMetrics
from swarm.relay.service import RelayService, add_relay_service, may_relay
from swarm.rpc.channel import NARROW, PATIENT, bind, new_server
from swarm.rpc.guard import CALLER, Guard
from swarm.rpc.links.dialling import Paths
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.links.state import state_reply
from swarm.rpc.passes import issue
from swarm.types import JobId, PeerId
from swarm.wire.messages import Pass, RelayAt, StateReply, StateRequest, TensorHeader, Welcome
from tests.support.members import identity_of

JOB = JobId("j")
OURS, KEY = Authority.new(time.time()), PassKey.new()
STARTED = time.time()  # on the clock of the scheduler, whenever a test begins


def pass_of(peer: str, stage: int, **changed: object) -> Pass:
    fields = {"job": JOB, "issued_unix_s": STARTED, "expires_unix_s": STARTED + 600} | changed
    return Pass(OURS.cluster, timeline=0, peer=PeerId(peer), incarnation=1, stage=stage, stages=4, **fields)  # type: ignore[arg-type]


def wallet_of(peer: str, shown: Pass | None = None) -> Wallet:
    wallet = Wallet(identity_of(OURS, Role.STAGE_SERVER, peer))
    wallet.pass_token = b"" if shown is None else issue(KEY, shown)
    return wallet


@dataclass
class RelayHere:
    """A relay that listens on loopback."""

    at: RelayAt
    service: RelayService
    registry: CollectorRegistry
    stop: Callable[[], object]

    def bytes_carried(self, direction: str) -> float:
        return self.registry.get_sample_value("swarm_relay_bytes_total", {"direction": direction}) or 0.0


@asynccontextmanager
async def relay_here(
    name: str, on_bytes: Callable[[bytes], bytes] = lambda payload: payload, budget: Budget | None = None
) -> AsyncIterator[RelayHere]:
    metrics = RelayMetrics("0", 0)
    service = RelayService(OURS.cluster, metrics, on_bytes, budget)
    service.welcomed(Welcome(PeerId(name), 1.0, KEY.public, STARTED))
    server = new_server(Guard(may_relay), more=NARROW)
    add_relay_service(server, service)
    port = bind(server, "127.0.0.1:0", Wallet(identity_of(OURS, Role.RELAY, name)))
    await server.start()
    try:
        at = RelayAt(name, f"127.0.0.1:{port}")
        yield RelayHere(at, service, metrics.registry, lambda: server.stop(None))
    finally:
        await server.stop(None)


@dataclass
class Receiver:
    """Takes what is let in; says who sent it, and what it was."""

    got: list[tuple[str, bytes]] = field(default_factory=list)
    state: bytes = b"weights"

    def admit(self, header: TensorHeader) -> None:
        pass

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        caller = CALLER.get()
        assert caller is not None, "plaintext"
        self.got.append((caller.principal.name, bytes(payload)))

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes]:
        return state_reply(1, 0, self.state), self.state


@dataclass
class Hidden:
    """A stage server whose own port nobody is told of."""

    receiver: Receiver
    wallet: Wallet
    listener: RelayListener
    own: str


@asynccontextmanager
async def hidden(peer: str, stage: int, relays: Sequence[RelayAt]) -> AsyncIterator[Hidden]:
    receiver, wallet = Receiver(), wallet_of(peer, pass_of(peer, stage))
    gate = PassGate(wallet, lambda: PassSlot(JOB, 0, stage, 4, is_tied=False))
    gate.welcomed(Welcome(PeerId(peer), 1.0, KEY.public, STARTED))
    server = new_server(Guard(may_exchange), more=PATIENT)
    add_peer_service(server, receiver, None, receiver, gate)
    own = f"127.0.0.1:{bind(server, '127.0.0.1:0', wallet)}"
    await server.start()
    listener = RelayListener(Paths(relays), PeerId(peer), own, wallet, get_logger("test"))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        running = asyncio.create_task(listener.run())
        stack.push_async_callback(asyncio.wait, {running})
        stack.callback(running.cancel)
        yield Hidden(receiver, wallet, listener, own)


async def until(met: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not met():
            await asyncio.sleep(0.01)
