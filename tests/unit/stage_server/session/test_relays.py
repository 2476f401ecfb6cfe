"""What a relay can have a stage server do with what it says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stage_server.session import relays as module
from stage_server.session.relays import RelayListener
from swarm.errors import RelaySilent
from swarm.limits import RELAY_LINKS_MAX
from swarm.pki.identity import Wallet
from swarm.rpc.links.dialling import Paths
from swarm.types import PeerId
from swarm.wire import relay_pb2
from swarm.wire.messages import RelayAt

ONE, OTHER = RelayAt("r1", "10.0.0.1:7955"), RelayAt("r2", "10.0.0.2:7955")
OPENED = relay_pb2.ListenDown(connection="c", sender="p2", job="j")


def listener(log: Any) -> RelayListener:
    return RelayListener(Paths(), PeerId("p1"), "127.0.0.1:1", Wallet(), log)


async def test_a_relay_that_names_links_without_end_is_dialled_for_as_many_as_it_may_carry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each message of a relay had its stage servers dial it once more, whatever they carried already."""
    dialled: list[RelayAt] = []
    over = asyncio.Event()

    async def accept(relay: RelayAt, *_: Any) -> None:
        dialled.append(relay)
        await over.wait()

    monkeypatch.setattr(module, "accept", accept)
    made = listener(SimpleNamespace(debug=lambda *_, **__: None))
    for _ in range(10 * RELAY_LINKS_MAX):
        made._accept(ONE, OPENED)
    made._accept(OTHER, OPENED)
    await asyncio.sleep(0)
    assert dialled == [ONE] * RELAY_LINKS_MAX + [OTHER]
    over.set()
    while made._links:
        await asyncio.sleep(0)
    made._accept(ONE, OPENED)
    await asyncio.sleep(0)
    assert len(dialled) == RELAY_LINKS_MAX + 2


async def test_links_that_fail_without_end_take_few_lines_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever dials a hidden stage server through a relay, and hangs up, had it write a line each time."""
    monkeypatch.setattr(module, "LINES_PER_S", 0.001)
    told: list[str] = []

    async def accept(*_: Any) -> None:
        raise RelaySilent("it hung up")

    monkeypatch.setattr(module, "accept", accept)
    log = SimpleNamespace(debug=lambda *_, **__: None, warning=lambda text, **_: told.append(text))
    made = listener(log)
    for _ in range(1000):
        made._accept(ONE, OPENED)
        while made._links:
            await asyncio.sleep(0)
    assert told == ["link through a relay not accepted"] * module.LINES_AT_ONCE
