"""A part of a stage's state on its way to a joiner: whole, or refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import pytest

from swarm.errors import CorruptFrame, Refused
from swarm.rpc.links.frames import CHUNK_BYTES
from swarm.rpc.links.state import collect, state_chunks, state_reply

PAYLOAD = bytes(range(256)) * (CHUNK_BYTES // 128)  # two chunks


async def sent(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@pytest.mark.parametrize("payload", [b"", b"x", PAYLOAD, PAYLOAD + b"x"])
async def test_what_was_cut_is_put_together_again(payload: bytes) -> None:
    reply = state_reply(7, 5, payload)
    chunks = list(state_chunks(reply, payload))
    assert len(chunks) == max(1, -(-len(payload) // CHUNK_BYTES))
    found, together = await collect(sent(chunks), len(PAYLOAD) + 1)
    assert (found, bytes(together)) == (reply, payload)
    assert (found.version, found.reach, found.total_bytes) == (7, 5, len(payload))


async def test_what_arrives_damaged_cut_off_or_twice_is_refused() -> None:
    reply = state_reply(7, 5, PAYLOAD)
    first, second = state_chunks(reply, PAYLOAD)
    _, other = state_chunks(reply, PAYLOAD[:-1] + b"x")
    for chunks in ([], [first], [second], [first, first], [first, other], [first, second, second], [b"nonsense"]):
        with pytest.raises(CorruptFrame):
            await collect(sent(chunks), len(PAYLOAD) + 1)


async def test_more_than_may_be_is_refused_by_its_header() -> None:
    reply = state_reply(7, 5, PAYLOAD)
    with pytest.raises(Refused, match="at most"):
        await collect(sent(list(state_chunks(reply, PAYLOAD))[:1]), len(PAYLOAD) - 1)
