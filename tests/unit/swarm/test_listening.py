"""Where a process can listen, and why it cannot elsewhere."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from swarm import listening
from swarm.errors import InvalidConfig, SchedulerUnreachable
from swarm.listening import (
    LOOPBACK,
    bind_fault,
    cannot_listen,
    check_free,
    host_for,
    host_towards,
    loopback,
    names_the_dialler,
)
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


@pytest.mark.parametrize(
    "listens", [check_free, lambda address: bind(grpc.aio.server(), address)], ids=["probe", "gRPC"]
)
async def test_a_port_in_use_and_an_address_of_another_machine_are_told_apart(
    taken: int, listens: Callable[[str], object]
) -> None:
    """The error named both causes, and the person had to find out which it was."""
    with pytest.raises(InvalidConfig, match=f"127.0.0.1:{taken}: the port is in use "):
        listens(f"127.0.0.1:{taken}")
    with pytest.raises(InvalidConfig, match=r"192\.0\.2\.1:0: the address is not this machine's "):
        listens("192.0.2.1:0")
    with pytest.raises(InvalidConfig, match=r"^cannot listen at no-such-host\.invalid:0: "):
        listens("no-such-host.invalid:0")
    listens("127.0.0.1:0")
    check_free(":0")
    fault = bind_fault("127.0.0.1", taken)
    assert fault is not None
    assert fault.errno == errno.EADDRINUSE


async def test_a_relay_whose_port_is_taken_says_so_before_it_asks_for_its_scheduler(taken: int, tmp_path: Path) -> None:
    """It used its token up, or waited for a scheduler for ever, before it found its port taken."""
    at = f"127.0.0.1:{taken}"
    options = RelayOptions(at, "", "127.0.0.1:9", None, "127.0.0.1", None, tmp_path / "relay", budget_of("", ""))
    with pytest.raises(InvalidConfig, match=f"cannot listen at {at}: the port is in use "):
        await asyncio.wait_for(serve(options), timeout=5.0)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_process_without_a_file_to_spare_is_not_told_to_choose_another_address(number: int) -> None:
    fault = OSError(number, "Too many open files")
    for flags in ("", "--http-host, --http-port"):
        error = cannot_listen("127.0.0.1:0", fault, flags)
        assert "Too many open files" in error.message
        assert error.hint == "raise the limit of open files: ulimit -n"


Found = tuple[socket.AddressFamily, str]


class _Ways:
    """A machine's ways out: the host's addresses, and this machine's address on the way to each; "" is no way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hosts: dict[str, list[Found]], ways: dict[str, str]) -> None:
        self.hosts, self.ways = hosts, ways
        monkeypatch.setattr(listening.socket, "getaddrinfo", self.look_up)
        monkeypatch.setattr(listening.socket, "socket", self.probe)

    def look_up(self, host: str, port: int, **_: Any) -> list[Any]:
        if host not in self.hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, 0, 0, "", (address, port)) for family, address in self.hosts[host]]

    def probe(self, *_: Any) -> Any:
        ways = self.ways

        class Probe:
            own = ""

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None: ...

            def connect(self, address: tuple[str, int]) -> None:
                self.own = ways[address[0]]
                if not self.own:
                    raise OSError(errno.ENETUNREACH, "Network is unreachable")

            def getsockname(self) -> tuple[str, int]:
                return self.own, 1

        return Probe()


IN4, IN6 = socket.AF_INET, socket.AF_INET6


def test_a_process_beside_a_remote_scheduler_listens_on_the_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage server that joined from another machine listened at 127.0.0.1, where the others did not reach it."""
    hosts: dict[str, list[Found]] = {
        "10.77.0.1": [(IN4, "10.77.0.1")],
        "desk.example": [(IN6, "fd00::1"), (IN4, "10.77.0.1")],
        "six.example": [(IN6, "fd00::1")],
        "near.example": [(IN6, "fe80::1%eth0"), (IN4, "10.77.0.1")],
        "me.example": [(IN4, "127.0.1.1")],
        "lost.example": [(IN4, "198.51.100.1")],
    }
    ways = {"10.77.0.1": "10.77.0.2", "fd00::1": "", "127.0.1.1": "127.0.0.1", "198.51.100.1": ""}
    ways["fe80::1%eth0"] = "fe80::2%eth0"
    told = _Ways(monkeypatch, hosts, ways)
    assert host_for("10.77.0.1:7950") == host_for("desk.example:7950") == "10.77.0.2"
    assert host_for("near.example:7950") == "10.77.0.2", "an address of one link alone is no address for others"
    assert host_for("me.example:7950") == host_for("localhost:7950") == host_for("127.0.0.1:7950") == LOOPBACK
    told.ways["fd00::1"] = "fd00::2"
    assert host_for("desk.example:7950") == host_for("six.example:7950") == "[fd00::2]"
    with pytest.raises(SchedulerUnreachable, match=r"no way leads to lost.example:7950: Network is unreachable"):
        host_for("lost.example:7950")
    with pytest.raises(SchedulerUnreachable, match=r"no way leads to no.example:7950: Name or service not known"):
        host_for("no.example:7950")
    del hosts["near.example"][1]
    with pytest.raises(OSError, match="Network is unreachable"):
        host_towards("near.example")


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


def test_a_host_is_another_machine_for_each_that_dials_or_the_same_for_all() -> None:
    own = """127.0.0.1 127.8.9.1 [::1] ::1 [::ffff:127.0.0.1] [::ffff:7f00:1] 0.0.0.0 [::] 0 127.1 0x7f.1 0x7f000001
        2130706433 0177.0.0.1 localhost LocalHost localhost. a.localhost ip6-localhost localhost.localdomain
        169.254.1.1 [fe80::1] [fe80::1%eth0] 224.0.0.1 [ff02::1]"""
    assert [host for host in (*own.split(), "") if not names_the_dialler(host)] == []
    others = "10.0.0.5 192.168.1.2 [fd00::4] 8.8.8.8 gpu-1 localhost.example notlocalhost 10.1"
    assert [host for host in others.split() if names_the_dialler(host)] == []
