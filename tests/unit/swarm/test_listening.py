"""Where a process can listen, and why it cannot elsewhere."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from swarm import listening
from swarm.errors import InvalidConfig
from swarm.listening import bind_fault, check_free, loopback
from swarm.relay.app import RelayOptions, serve
from swarm.relay.budget import budget_of
from swarm.rpc.channel import bind


@pytest.fixture
def taken() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_machine_without_an_ipv4_loopback_listens_at_the_ipv6_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """swarm up ended with "this machine has no 127.0.0.1" where ::1 would have served."""
    assert loopback() == "127.0.0.1"
    lacks = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
    monkeypatch.setattr(listening, "bind_fault", lambda host, port: lacks if host == "127.0.0.1" else None)
    assert loopback() == "[::1]"
    monkeypatch.setattr(listening, "bind_fault", lambda host, port: lacks)
    assert loopback() == "127.0.0.1"


def test_a_port_in_use_and_an_address_of_another_machine_are_told_apart(taken: int) -> None:
    """The error named both causes, and the person had to find out which it was."""
    with pytest.raises(InvalidConfig, match=f"127.0.0.1:{taken}: the port is in use "):
        check_free(f"127.0.0.1:{taken}")
    with pytest.raises(InvalidConfig, match=r"192\.0\.2\.1:0: the address is not this machine's "):
        check_free("192.0.2.1:0")
    with pytest.raises(InvalidConfig, match=r"^cannot listen at no-such-host\.invalid:0: "):
        check_free("no-such-host.invalid:0")
    check_free("127.0.0.1:0")
    check_free(":0")


async def test_a_grpc_server_tells_them_apart_too(taken: int) -> None:
    server = grpc.aio.server()
    with pytest.raises(InvalidConfig, match="the port is in use "):
        bind(server, f"127.0.0.1:{taken}")
    with pytest.raises(InvalidConfig, match="the address is not this machine's "):
        bind(server, "192.0.2.1:0")
    port = bind(server, "127.0.0.1:0")
    await server.start()
    fault = bind_fault("127.0.0.1", port)
    await server.stop(None)
    assert fault is not None
    assert fault.errno == errno.EADDRINUSE


async def test_a_relay_whose_port_is_taken_says_so_before_it_asks_for_its_scheduler(taken: int, tmp_path: Path) -> None:
    """It used its token up, or waited for a scheduler for ever, before it found its port taken."""
    at = f"127.0.0.1:{taken}"
    options = RelayOptions(at, "", "127.0.0.1:9", None, "127.0.0.1", None, tmp_path / "relay", budget_of("", ""))
    with pytest.raises(InvalidConfig, match=f"cannot listen at {at}: the port is in use "):
        await asyncio.wait_for(serve(options), timeout=5.0)


async def test_a_connection_that_has_ended_does_not_hold_its_port() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await reader.read()
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()
    assert bind_fault("127.0.0.1", port) is None
