"""client.up.between: a slow link between islands on one machine."""

from __future__ import annotations

import asyncio
import socket
import time

import grpc.aio
import pytest

from client.up.between import BACKLOG_S_MAX, Between, SlowLink, Wire, host_of
from swarm.errors import InvalidConfig, UsageError
from swarm.rpc.channel import connect, through_proxy


@pytest.mark.parametrize(
    ("text", "bits_per_s", "round_trip_s"),
    [("50Mbit,100ms", 50e6, 0.1), ("1.5Gbit", 1.5e9, 0.0), ("800kbit,2s", 8e5, 2.0), ("1Mbit,0ms", 1e6, 0.0)],
)
def test_a_link_is_a_rate_and_the_time_there_and_back(text: str, bits_per_s: float, round_trip_s: float) -> None:
    assert SlowLink.parse(text) == SlowLink(bits_per_s, pytest.approx(round_trip_s))


@pytest.mark.parametrize("text", ["", "50", "50Mbit/s", "0Mbit,1ms", "50Mbit,100", "-1Mbit", "fast,slow"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--between is RATE,DELAY"):
        SlowLink.parse(text)


def test_a_wire_sends_one_after_the_other_and_each_arrives_half_a_round_trip_later() -> None:
    wire = Wire(SlowLink(8e6, 0.1))  # a megabyte per second
    assert wire.send(500_000, 10.0) == (10.5, 10.55)
    assert wire.send(500_000, 10.0) == (11.0, 11.05)
    assert wire.send(100, 20.0) == pytest.approx((20.0001, 20.0501))
    assert wire.carried_bytes == 1_000_100


async def echoes(host: str) -> tuple[asyncio.Server, int]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, host, 0)
    return server, server.sockets[0].getsockname()[1]


async def asks(proxy: str, head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
    host, _, port = proxy.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{head}\r\n\r\n".encode())
    return reader, writer, (await reader.readuntil(b"\r\n\r\n")).decode().split()[1]


def test_bytes_between_islands_take_their_time_both_ways_and_are_counted() -> None:
    async def main() -> None:
        async with Between(2, SlowLink(8e6, 0.2)) as between:
            server, port = await echoes(host_of(1))
            reader, writer, status = await asks(between.proxies[0], f"CONNECT {host_of(1)}:{port} HTTP/1.1")
            assert status == "200"
            sent = bytes(range(256)) * 1000
            began_s = time.monotonic()
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent
            took_s = time.monotonic() - began_s
            assert took_s >= 0.256 + 0.2 - 2 * BACKLOG_S_MAX, "its megabyte per second, and there and back"
            assert between.told() == "between islands: 250.0 KiB from 0 to 1, 250.0 KiB from 1 to 0"
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            server.close()

    asyncio.run(main())


def test_a_receiver_that_does_not_read_holds_the_sender_back() -> None:
    async def main() -> None:
        over = asyncio.Event()

        async def frozen(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await over.wait()
            writer.close()

        async with Between(2, SlowLink(8e9, 0.01)) as between:
            server = await asyncio.start_server(frozen, host_of(1), 0, limit=1 << 10)
            port = server.sockets[0].getsockname()[1]
            _, writer, _ = await asks(between.proxies[0], f"CONNECT {host_of(1)}:{port} HTTP/1.1")
            wire, last = between._wires[0, 1], -1
            writer.write(bytes(256 << 20))
            while wire.carried_bytes > last:
                last = wire.carried_bytes
                await asyncio.sleep(0.5)
            assert last < 128 << 20, "what the link and the sockets hold"
            over.set()
            writer.transport.abort()
            server.close()

    asyncio.run(main())


def test_no_proxy_stays_open_where_an_island_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.up.between.host_of", lambda island: "127.0.1.1" if not island else "192.0.2.1")

    async def main() -> None:
        between = Between(2, SlowLink(1e9, 0.0))
        with pytest.raises(InvalidConfig, match="this system lacks"):
            async with between:
                pass
        host, _, port = between.proxies[0].rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))

    asyncio.run(main())


def test_a_proxy_leads_to_other_islands_and_nowhere_else() -> None:
    async def main() -> None:
        async with Between(2, SlowLink(1e9, 0.0)) as between:
            server, port = await echoes("127.0.0.1")
            for target in (f"127.0.0.1:{port}", f"{host_of(0)}:{port}", f"{host_of(2)}:{port}", "example.org:80"):
                _, writer, status = await asks(between.proxies[0], f"CONNECT {target} HTTP/1.1")
                assert status == "403", target
                writer.close()
            _, writer, status = await asks(between.proxies[0], "GET / HTTP/1.1")
            assert status == "403"
            writer.close()
            with socket.socket() as closed:
                closed.bind((host_of(1), 0))
                nobody = f"{host_of(1)}:{closed.getsockname()[1]}"
                _, writer, status = await asks(between.proxies[0], f"CONNECT {nobody} HTTP/1.1")
            assert status == "502"
            writer.close()
            server.close()

    asyncio.run(main())


def test_stage_servers_dial_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.0/8")
    monkeypatch.setenv("no_grpc_proxy", "")  # as `swarm stage-server --proxy` sets it

    async def answer(request: bytes, context: object) -> bytes:
        return request + b"!"

    async def main() -> None:
        method = grpc.unary_unary_rpc_method_handler(answer)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", {"Y": method}),))
        port = server.add_insecure_port(f"{host_of(1)}:0")
        await server.start()
        async with Between(2, SlowLink(1e8, 0.01)) as between:
            channel = connect(f"{host_of(1)}:{port}", more=through_proxy(between.proxies[0]))
            assert await channel.unary_unary("/x/Y")(b"hello", timeout=60.0) == b"hello!"
            assert " 0 B" not in between.told()
            await channel.close()
        await server.stop(0.0)

    asyncio.run(main())
