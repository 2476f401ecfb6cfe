"""Links through a relay behind 1 Mbit/s: they live while its line carries bulk, and new ones come about meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from swarm.rpc.links import peers
from swarm.rpc.links.dialling import Paths
from swarm.rpc.links.memory import FileCount
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.types import PeerId
from swarm.wire.messages import RelayAt, StateRequest
from tests.support.deep import DeepLine, deep
from tests.support.headers import header_of
from tests.support.relays import JOB, Hidden, RelayHere, hidden, pass_of, relay_here, until, wallet_of

RATE, DELAY_S = 125_000.0, 0.1  # 1 Mbit/s, 100 ms each way
SIZE_BYTES = 120_000
H = PeerId("h")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch, connections_take_their_time: None) -> None:
    """Pings have less time than the line needs for one turn; all else waits as long as this machine likes."""
    monkeypatch.setattr("swarm.rpc.channel.KEEPALIVE_TIMEOUT_MS", 300)
    monkeypatch.setattr(peers, "lent_files", lambda: FileCount(0))
    for module in ("swarm.rpc.links.tunnel", "swarm.relay.service"):
        monkeypatch.setattr(f"{module}.OPEN_S_MAX", 60.0)
    monkeypatch.setattr("swarm.rpc.links.dialling.THROUGH_S_MAX", 60.0)


@asynccontextmanager
async def behind_a_slow_relay() -> AsyncIterator[tuple[RelayHere, DeepLine, RelayAt, Hidden]]:
    async with relay_here("one") as relay, deep(relay.at.address, RATE, DELAY_S) as line:
        at = RelayAt("one", line.address)
        async with hidden("h", 1, [at]) as there:
            there.receiver.state = bytes(SIZE_BYTES)
            await until(lambda: relay.registry.get_sample_value("swarm_relay_listeners") == 1.0)
            yield relay, line, at, there


async def send(at: RelayAt, name: str) -> None:
    links = GrpcPeerLinks(wallet=wallet_of(name, pass_of(name, 0)), paths=Paths([at]))
    try:
        await links.send("", replace(header_of(SIZE_BYTES), sender=PeerId(name)), bytes(SIZE_BYTES), to=H)
    finally:
        await links.close()


async def pull(at: RelayAt, name: str) -> None:
    links = GrpcPeerLinks(wallet=wallet_of(name, pass_of(name, 1)), paths=Paths([at]))
    try:
        await links.pull("", StateRequest(JOB, 0, 1, "state", 0, 0, 1, PeerId(name), 1), SIZE_BYTES, to=H)
    finally:
        await links.close()


@pytest.mark.timeout(180)
async def test_links_live_while_the_line_of_their_relay_carries_bulk_and_a_new_one_comes_about() -> None:
    """Eight links began at a relay behind 1 Mbit/s. Three seconds of tensors lay before its pings, which may take two:
    all connections of the relay broke at once, and again as soon as they were made."""
    async with behind_a_slow_relay() as (relay, line, at, there):
        begun = [asyncio.create_task(move) for move in (send(at, "a"), pull(at, "b"), send(at, "c"), pull(at, "d"))]
        await until(lambda: line.carried_bytes > SIZE_BYTES)
        assert not any(task.done() for task in begun)
        await asyncio.gather(*begun, send(at, "e"))
        assert len(there.receiver.got) == 3
        assert line.connections == 1 + 2 * 5, "a connection broke"
        carried_bytes = relay.bytes_carried("to_listener") + relay.bytes_carried("from_listener")
        assert carried_bytes <= 1.2 * 5 * SIZE_BYTES
        assert line.carried_bytes <= 1.2 * 5 * SIZE_BYTES
