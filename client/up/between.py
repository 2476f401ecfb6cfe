"""A slow link between the islands of `swarm up`, in this process.

    island 0 at 127.0.1.1 ──dials 127.0.2.1──▶ its proxy ──a wire: so many bits a second, so much later──▶ island 1
                          ◀────────────────── another wire: the same ────────────────────────────────────

Stage servers of an island dial each other directly, and those at other hosts through an HTTP proxy (CONNECT), one for
each island. All connections from an island to another share a wire, in order. What a wire cannot take waits with the
sender, as its socket is not read meanwhile; nothing is lost.

Not chosen: netem, because it needs root. Price: bytes are shaped and not packets, so none is lost or reordered.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

from swarm.errors import InvalidConfig, UsageError
from swarm.text import size

CHUNK_BYTES = 16 << 10
BACKLOG_S_MAX = 0.05  # what a wire takes in before it sends it
SOCKET_BYTES = 256 << 10  # kept by the kernel before it is read; more would only hide that the wire is slow
HEAD_S_MAX = 5.0

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|M|G)bit")
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
_FACTORS = {"k": 1e3, "M": 1e6, "G": 1e9, "ms": 1e-3, "s": 1.0}
_CONNECT = re.compile(rb"CONNECT (127\.0\.\d+\.1):(\d+) HTTP/1\.[01]\r\n")


@dataclass(frozen=True, slots=True)
class SlowLink:
    """What a pair of islands can send each other, each way, and how long there and back takes."""

    bits_per_s: float
    round_trip_s: float

    @classmethod
    def parse(cls, text: str) -> SlowLink:
        """A link from RATE,DELAY, such as 50Mbit,100ms; UsageError."""
        rate, _, delay = text.partition(",")
        found, waits = _RATE.fullmatch(rate), _DELAY.fullmatch(delay or "0ms")
        if found is None or waits is None or not float(found[1]):
            raise UsageError(
                f'--between is RATE,DELAY, not "{text[:80]}"',
                hint="for example --between 50Mbit,100ms",
            )
        return cls(float(found[1]) * _FACTORS[found[2]], float(waits[1]) * _FACTORS[waits[2]])


@dataclass(slots=True)
class Wire:
    """One direction; time is an argument."""

    link: SlowLink
    carried_bytes: int = 0
    _free_s: float = 0.0

    @property
    def aboard_bytes_max(self) -> float:
        """What of a connection is on its way while its receiver reads."""
        return CHUNK_BYTES + (self.link.round_trip_s / 2 + BACKLOG_S_MAX) * self.link.bits_per_s / 8

    def send(self, size_bytes: int, now_s: float) -> tuple[float, float]:
        """When the wire has sent this, behind all before it, and when it has arrived."""
        self.carried_bytes += size_bytes
        self._free_s = max(now_s, self._free_s) + 8 * size_bytes / self.link.bits_per_s
        return self._free_s, self._free_s + self.link.round_trip_s / 2


def host_of(island: int) -> str:
    """Where the stage servers of an island listen."""
    return f"127.0.{island + 1}.1"


@dataclass(slots=True)
class Between:
    """The wires and proxies of some islands, as a context manager."""

    islands: int
    link: SlowLink
    proxies: list[str] = field(default_factory=list)  # the address of each island's
    _wires: dict[tuple[int, int], Wire] = field(default_factory=dict)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _carrying: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        """InvalidConfig if this system has no addresses for islands."""
        async with AsyncExitStack() as opened:  # closes them if one fails
            for island in range(self.islands):
                self._wires |= {(island, to): Wire(self.link) for to in range(self.islands) if to != island}
                await opened.enter_async_context(self._proxy(island))
            self._stack = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        await self._stack.aclose()

    def told(self) -> str:
        """What went over the wires so far, for a person."""
        wires = sorted(self._wires.items())
        sent = (f"{size(wire.carried_bytes)} from {one} to {other}" for (one, other), wire in wires)
        return f"between islands: {', '.join(sent)}"

    @contextlib.asynccontextmanager
    async def _proxy(self, island: int) -> AsyncIterator[None]:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)
            try:
                with contextlib.suppress(asyncio.CancelledError):  # asyncio's streams complain of it
                    await self._carry(island, reader, writer)
            except* (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                pass  # either end is gone
            finally:
                writer.close()

        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        try:
            listening.bind((host_of(island), 0))
        except OSError as error:
            listening.close()
            raise InvalidConfig(
                f"--between needs {host_of(island)} for island {island}, which this system lacks: {error.strerror}",
                hint=f"add it (macOS: sudo ifconfig lo0 alias {host_of(island)}), or leave out --between",
            ) from None
        server = await asyncio.start_server(carry, sock=listening, limit=CHUNK_BYTES)
        self.proxies.append(f"{host_of(island)}:{listening.getsockname()[1]}")
        try:
            yield
        finally:
            server.close()
            await server.wait_closed()

    async def _carry(self, island: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Put one connection through, only to a stage server of another island."""
        async with asyncio.timeout(HEAD_S_MAX):
            head = _CONNECT.match(await reader.readuntil(b"\r\n\r\n"))
        to = next((n for n in range(self.islands) if head and host_of(n) == head[1].decode()), island)
        if head is None or to == island:
            writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            await writer.drain()
            return
        far = socket.socket()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        far.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(far, (host_of(to), int(head[2])))
        except OSError:
            far.close()
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            await writer.drain()
            return
        far_reader, far_writer = await asyncio.open_connection(sock=far, limit=CHUNK_BYTES)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            async with asyncio.TaskGroup() as both:
                both.create_task(_over(self._wires[island, to], reader, far_writer))
                both.create_task(_over(self._wires[to, island], far_reader, writer))
        finally:
            far_writer.close()


async def _over(wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry what is read over the wire until the sender has sent all."""
    loop, travelling = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()
    aboard_bytes, room = 0, asyncio.Event()

    async def arrive() -> None:
        nonlocal aboard_bytes
        while True:
            arrived_s, data = await travelling.get()
            await asyncio.sleep(arrived_s - loop.time())
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            aboard_bytes -= len(data)
            room.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(arrive())
        while True:
            data = await reader.read(CHUNK_BYTES)
            sent_s, arrived_s = wire.send(len(data), loop.time())
            travelling.put_nowait((arrived_s, data))
            aboard_bytes += len(data)
            if not data:
                return
            await asyncio.sleep(sent_s - loop.time() - BACKLOG_S_MAX)
            while aboard_bytes > wire.aboard_bytes_max:
                room.clear()
                await room.wait()
