"""A narrow link in user space: a TCP proxy that carries so many bytes a second, each way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

PIECE_S = 0.02  # of the link's time, at once


@asynccontextmanager
async def narrow(address: str, bytes_per_s: float) -> AsyncIterator[str]:
    """The address at which `address` is reached through the link; what is sent waits in front of it."""
    host, _, port = address.rpartition(":")
    ends: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(max(1, round(bytes_per_s * PIECE_S))):
                await asyncio.sleep(len(piece) / bytes_per_s)
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ends.add(task)
        opened = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            opened.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(carry(reader, far_writer))
                both.create_task(carry(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in opened:
                one.transport.abort()

    server = await asyncio.start_server(joined, "127.0.0.1", 0, limit=1 << 16)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        await asyncio.sleep(0)  # sockets close then
