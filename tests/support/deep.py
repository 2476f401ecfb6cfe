"""A slow line with deep buffers, in user space: a TCP proxy that takes all that comes, and carries it slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

PIECE_BYTES = 2 << 10


@dataclass
class DeepLine:
    """Each direction carries so many bytes a second, one behind the other, and each arrives `delay_s` later."""

    bytes_per_s: float
    delay_s: float
    address: str = ""
    carried_bytes: int = 0  # to the far end
    carried_back_bytes: int = 0
    connections: int = 0
    longest_s: float = 0.0  # that anything has waited in front of the line
    held_bytes_max: int = 0  # most that was in front of the line, or on it
    _free_s: dict[bool, float] = field(default_factory=dict)
    _held: bool = False
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    def hold(self) -> None:
        """Carry nothing any more, and break nothing."""
        self._held = True

    def cut(self) -> None:
        """Break all connections; new ones may be made."""
        for task in self._open:
            task.cancel()

    async def joined(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.connections += 1
        opened = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
            opened.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, far_writer, back=False))
                both.create_task(self._carry(far_reader, writer, back=True))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            for stream in opened:
                stream.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool) -> None:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        held_bytes = 0

        async def take() -> None:
            nonlocal held_bytes
            while piece := await reader.read(PIECE_BYTES):
                now_s = loop.time()
                begins_s = max(now_s, self._free_s.get(back, 0.0))
                self.longest_s = max(self.longest_s, begins_s - now_s)
                self._free_s[back] = begins_s + len(piece) / self.bytes_per_s
                held_bytes += len(piece)
                self.held_bytes_max = max(self.held_bytes_max, held_bytes)
                waiting.put_nowait((self._free_s[back] + self.delay_s, piece))
            waiting.put_nowait((loop.time(), b""))

        async def give() -> None:
            nonlocal held_bytes
            while True:
                at_s, piece = await waiting.get()
                await asyncio.sleep(max(0.0, at_s - loop.time()))
                if not piece:
                    break
                if self._held:
                    await asyncio.Event().wait()
                writer.write(piece)
                await writer.drain()
                held_bytes -= len(piece)
                if back:
                    self.carried_back_bytes += len(piece)
                else:
                    self.carried_bytes += len(piece)
            writer.close()

        with suppress(ConnectionError):
            async with asyncio.TaskGroup() as both:
                both.create_task(take())
                both.create_task(give())


@asynccontextmanager
async def deep(address: str, bytes_per_s: float, delay_s: float) -> AsyncIterator[DeepLine]:
    """The line through which `address` is reached."""
    host, _, port = address.rpartition(":")
    line = DeepLine(bytes_per_s, delay_s)
    server = await asyncio.start_server(
        lambda reader, writer: line.joined(host, int(port), reader, writer), "127.0.0.1", 0, limit=1 << 16
    )
    line.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()
        open_ = list(line._open)
        line.cut()
        await asyncio.gather(*open_, return_exceptions=True)
        await asyncio.sleep(0)  # sockets close then
