"""A narrow line with a deep buffer: what is sent waits in the line, not at its sender."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

READ_BYTES = 16 << 10


class SlowLine:
    """Forwards TCP connections to an address; all share the line's rate, each way by itself."""

    def __init__(self, to: str, bytes_per_s: float, delay_s: float) -> None:
        self.bytes_per_s, self.delay_s = bytes_per_s, delay_s
        self.address = ""
        self.up_bytes = self.down_bytes = 0  # that have been forwarded
        self.is_frozen = False
        self.connections = 0  # that were made
        self._host, _, port = to.rpartition(":")
        self._port = int(port)
        self._free_s = {"up": 0.0, "down": 0.0}
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """Break all connections; what was on its way is lost."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        for task in self._tasks:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += writer, far_writer
        for way, source, sink in (("up", reader, far_writer), ("down", far_reader, writer)):
            held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            for work in (self._take(way, source, held), self._give(way, sink, held)):
                task = asyncio.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _take(self, way: str, source: asyncio.StreamReader, held: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while content := await source.read(READ_BYTES):
                self._free_s[way] = max(self._free_s[way], loop.time()) + len(content) / self.bytes_per_s
                held.put_nowait((self._free_s[way] + self.delay_s, content))
        held.put_nowait((self._free_s[way] + self.delay_s, b""))

    async def _give(self, way: str, sink: asyncio.StreamWriter, held: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while True:
                due_s, content = await held.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                while self.is_frozen:
                    await asyncio.sleep(0.05)
                if not content:
                    sink.close()
                    return
                if way == "up":
                    self.up_bytes += len(content)
                else:
                    self.down_bytes += len(content)
                sink.write(content)
                await sink.drain()
