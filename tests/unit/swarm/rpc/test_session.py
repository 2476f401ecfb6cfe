"""The queue between a stream and whoever reads it, and bytes that must be as many as was said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from swarm.errors import CorruptFrame, PeerUnavailable
from swarm.rpc.mapping import from_command, parse
from swarm.rpc.session import ENCODED_BYTES_MAX, Encoded, Pipe, exactly
from swarm.types import Hop, Microbatch, PeerId
from swarm.wire import session_pb2
from swarm.wire.messages import Route


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_full_pipe_holds_its_writer_back() -> None:
    pipe: Pipe[int] = Pipe(2)
    written: list[int] = []

    async def write() -> None:
        for number in range(4):
            await pipe.put(number)
            written.append(number)
        pipe.end()

    writing = asyncio.ensure_future(write())
    await settle()
    assert written == [0, 1]
    assert await anext(aiter(pipe)) == 0
    await settle()
    assert written == [0, 1, 2]
    assert [number async for number in pipe] == [1, 2, 3]
    await writing


async def test_what_was_put_before_a_failure_is_still_read_and_nothing_after_it() -> None:
    pipe: Pipe[int] = Pipe(1)
    await pipe.put(1)
    waiting = asyncio.ensure_future(pipe.put(2))
    await settle()
    assert not waiting.done()
    pipe.fail(PeerUnavailable("it broke"))
    pipe.fail(PeerUnavailable("and again"))
    await waiting
    await pipe.put(3)
    assert await anext(aiter(pipe)) == 1
    for _ in range(2):
        with pytest.raises(PeerUnavailable, match="it broke"):
            await anext(aiter(pipe))


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(parts: AsyncIterator[bytes], into: list[bytes]) -> None:
    async for part in parts:
        into.append(part)


@pytest.mark.parametrize("parts", [(b"abc", b"de"), (b"abcde",), (b"", b"abcde", b"")])
async def test_as_many_bytes_as_were_said_pass(parts: tuple[bytes, ...]) -> None:
    assert b"".join([part async for part in exactly(chunks(*parts), 5, "it", "said were")]) == b"abcde"


@pytest.mark.parametrize("parts", [(), (b"abcd",), (b"abc", b"def"), (b"abcde", b"f")])
async def test_fewer_or_more_do_not(parts: tuple[bytes, ...]) -> None:
    passed: list[bytes] = []
    with pytest.raises(CorruptFrame, match="of it arrived, said were 5"):
        await read(exactly(chunks(*parts), 5, "it", "said were"), passed)
    assert sum(map(len, passed)) <= 5


def route(index: int, tokens: bytes = b"") -> Route:
    return Route(Microbatch(0, 0, index), 0, (Hop(PeerId("a"), 1, 1, "at a"),), tokens)


def test_a_command_is_encoded_once_for_all_that_it_goes_to() -> None:
    encoded, command = Encoded(), route(1)
    assert encoded(3, command) is encoded(3, command)
    assert from_command(parse(session_pb2.Command, encoded(4, command))) == (4, command)


def test_bytes_are_always_those_of_the_command_and_no_more_are_kept_than_may_be() -> None:
    encoded = Encoded()
    for index in range(40):
        command = route(index, bytes(1 << 20))  # the one before may be gone: then its id may come again
        assert parse(session_pb2.Command, encoded(1, command)).route.microbatch.index == index
    kept = sum(len(data) for _, _, data in encoded._newest.values())
    assert ENCODED_BYTES_MAX - (2 << 20) < kept <= ENCODED_BYTES_MAX
    assert encoded(1, command) is encoded(1, command)
