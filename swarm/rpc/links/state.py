"""A part of a stage's state on its way to a joiner: a reply with its length and checksum, and chunks.

joiner   asks: a part; I hold so many bytes of the answer with this checksum  ──▶ donor
       ◀── empty chunks while it is made ── reply, from which byte on ── chunks ──
         so many bytes have come  ──▶
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

import xxhash

from swarm.errors import CorruptFrame, Refused
from swarm.rpc.links.frames import CHUNK_BYTES
from swarm.rpc.mapping import from_message, parse, to_message
from swarm.wire import frame_pb2
from swarm.wire.messages import StateReply

ALIVE: Final = b""
"""A chunk with nothing in it: the answer is being made."""


def state_reply(version: int, reach: int, payload: bytes | memoryview) -> StateReply:
    return StateReply(version, reach, memoryview(payload).nbytes, xxhash.xxh3_64_hexdigest(payload))


def state_chunks(
    reply: StateReply,
    payload: bytes | memoryview,
    held_bytes: int = 0,
    bytes_max: Callable[[], int] = lambda: CHUNK_BYTES,
) -> Iterator[bytes]:
    """A part of a stage's state as it travels, from byte `held_bytes` on; the first message describes the others.

    `bytes_max` is asked for the size of each when it is made; none has more than CHUNK_BYTES.
    """
    view = memoryview(payload).cast("B") if memoryview(payload).nbytes else memoryview(b"")
    start, header = held_bytes, to_message(reply)
    while header is not None or start < len(view):
        stop = start + max(1, min(bytes_max(), CHUNK_BYTES))
        held = start if header is not None else 0
        yield frame_pb2.StateChunk(header=header, payload=bytes(view[start:stop]), held_bytes=held).SerializeToString()
        start, header = stop, None


async def collect(chunks: AsyncIterator[bytes], limit_bytes: int) -> tuple[StateReply, memoryview]:
    """Put the output of `state_chunks` together; CorruptFrame if it is not whole, Refused if it is over the limit."""
    arriving = Arriving(limit_bytes)
    async for data in chunks:
        arriving.add(data)
    arriving.end()
    return arriving.result()


class Arriving:
    """One answer as it comes in, perhaps in several pulls; what broke off is continued if the donor still has it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._reply: StateReply | None = None
        self._held = bytearray()
        self._began = False  # this pull has brought its header
        self.is_whole = False

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    def asking(self, request: frame_pb2.StateRequest) -> bytes:
        """What a new pull begins with."""
        self._began = False
        checksum = "" if self._reply is None else self._reply.checksum
        held_bytes = len(self._held) if checksum else 0
        return frame_pb2.Asking(request=request, held_bytes=held_bytes, checksum=checksum).SerializeToString()

    def add(self, data: bytes) -> None:
        """Take the next message; CorruptFrame if it does not fit, Refused if it is over the limit."""
        chunk = parse(frame_pb2.StateChunk, data)
        if chunk.HasField("header"):
            if self._began:
                raise CorruptFrame("StateChunk.header comes twice")
            self._begin(from_message(StateReply, chunk.header), chunk.held_bytes)
        elif not self._began:
            if chunk.payload:
                raise CorruptFrame("StateChunk.header is missing in the first chunk")
            return
        assert self._reply is not None
        self._held += chunk.payload
        if len(self._held) > self._reply.total_bytes:
            raise CorruptFrame("a part of a stage's state arrived damaged")

    def end(self) -> None:
        """The pull ended in order; CorruptFrame if the answer is not whole."""
        reply, held = self._reply, self._held
        if reply is None or len(held) != reply.total_bytes or xxhash.xxh3_64_hexdigest(held) != reply.checksum:
            raise CorruptFrame("a part of a stage's state arrived damaged")
        self.is_whole = True

    def result(self) -> tuple[StateReply, memoryview]:
        assert self._reply is not None
        return self._reply, memoryview(self._held)

    def _begin(self, reply: StateReply, held_bytes: int) -> None:
        if reply.total_bytes > self._limit_bytes:
            raise Refused(f"{reply.total_bytes} bytes of state came, asked for were at most {self._limit_bytes}")
        goes_on = self._reply is not None and reply.checksum == self._reply.checksum and held_bytes
        if held_bytes != (len(self._held) if goes_on else 0):
            raise CorruptFrame(f"a part of a stage's state goes on at byte {held_bytes}, which was not asked for")
        if not goes_on:
            self._held.clear()
        self._reply, self._began = reply, True
