"""A part of a stage's state on its way to a joiner: a reply with its length and checksum, then chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import xxhash

from swarm.errors import CorruptFrame, Refused
from swarm.peer_messages import StateReply
from swarm.rpc.links.frames import CHUNK_BYTES
from swarm.rpc.mapping import from_message, parse, to_message
from swarm.wire import frame_pb2


def state_reply(version: int, reach: int, payload: bytes | memoryview) -> StateReply:
    return StateReply(version, reach, memoryview(payload).nbytes, xxhash.xxh3_64_hexdigest(payload))


def state_chunks(reply: StateReply, payload: bytes | memoryview) -> Iterator[bytes]:
    """A part of a stage's state as it travels; the first message describes the others."""
    view = memoryview(payload)
    yield frame_pb2.StateChunk(header=to_message(reply), payload=bytes(view[:CHUNK_BYTES])).SerializeToString()
    for start in range(CHUNK_BYTES, view.nbytes, CHUNK_BYTES):
        yield frame_pb2.StateChunk(payload=bytes(view[start : start + CHUNK_BYTES])).SerializeToString()


async def collect(chunks: AsyncIterator[bytes], limit_bytes: int) -> tuple[StateReply, memoryview]:
    """Put the output of `state_chunks` together; CorruptFrame if it is not whole, Refused if it is over the limit."""
    reply: StateReply | None = None
    held = bytearray()
    async for data in chunks:
        chunk = parse(frame_pb2.StateChunk, data)
        if chunk.HasField("header") == (reply is not None):
            raise CorruptFrame("StateChunk.header is missing in the first chunk, or comes twice")
        if reply is None:
            reply = from_message(StateReply, chunk.header)
            if reply.total_bytes > limit_bytes:
                raise Refused(f"{reply.total_bytes} bytes of state came, asked for were at most {limit_bytes}")
        held += chunk.payload
        if len(held) > reply.total_bytes:
            break
    if reply is None or len(held) != reply.total_bytes or xxhash.xxh3_64_hexdigest(held) != reply.checksum:
        raise CorruptFrame("a part of a stage's state arrived damaged")
    return reply, memoryview(held)
