"""The queue between a stream and whoever reads it, and bytes that must be as many as was said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext

import pytest

from swarm.errors import CorruptFrame, PeerUnavailable
from swarm.rpc.channel import MAX_MESSAGE_BYTES
from swarm.rpc.mapping import from_command, parse
from swarm.rpc.session import (
    ENCODED_BYTES_MAX,
    TOGETHER_BYTES_MAX,
    TOGETHER_MAX,
    UNHURRIED_S,
    WAITING_BYTES_MAX,
    Encoded,
    MessageBatches,
    Pipe,
    exactly,
    parts,
)
from swarm.types import Hop, Microbatch, PeerId
from swarm.wire import session_pb2
from swarm.wire.messages import Route
from tests.support.sim import loop as sim


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


@pytest.mark.parametrize(
    ("parts", "passes"),
    [
        *[(parts, True) for parts in ((b"abc", b"de"), (b"abcde",), (b"", b"abcde", b""))],
        *[(parts, False) for parts in ((), (b"abcd",), (b"abc", b"def"), (b"abcde", b"f"))],
    ],
)
async def test_as_many_bytes_as_were_said_pass_and_neither_fewer_nor_more(
    parts: tuple[bytes, ...], passes: bool
) -> None:
    passed: list[bytes] = []
    with nullcontext() if passes else pytest.raises(CorruptFrame, match="of it arrived, said were 5"):
        async for part in exactly(chunks(*parts), 5, "it", "said were"):
            passed.append(part)
    assert b"".join(passed) == b"abcde" if passes else sum(map(len, passed)) <= 5


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


class Line:
    """A stream whose writes take `seconds`; it notes when each was begun."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.written: list[bytes] = []
        self.times_s: list[float] = []
        self.failure: Exception | None = None

    async def write(self, data: bytes) -> None:
        self.times_s.append(asyncio.get_running_loop().time())
        self.written.append(data)
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure

    @property
    def sequences(self) -> list[list[int]]:
        return [[part.heartbeat.sequence for part in parts(session_pb2.Event, data)] for data in self.written]


def beat(number: int, padding: int = 0) -> bytes:
    logged = session_pb2.Event(logged=session_pb2.Logged(message="x" * padding))
    return (session_pb2.Event(heartbeat={"sequence": number}) if not padding else logged).SerializeToString()


def written(line: Line, put: Callable[[MessageBatches], Awaitable[None]]) -> Line:
    """The line, once all that is put has been written."""

    async def main() -> Line:
        batches = MessageBatches(line.write)
        writing = asyncio.ensure_future(batches.write_all())
        await put(batches)
        await batches.finish()
        await writing
        return line

    return sim.run(main(), seed=0)


async def put_all(batches: MessageBatches, messages: list[bytes], *, hurry: bool = True) -> None:
    for message in messages:
        await batches.put(message, hurry=hurry)


def test_what_comes_while_one_is_written_goes_with_the_next_in_order() -> None:
    async def put(batches: MessageBatches) -> None:
        await batches.put(beat(0))
        await asyncio.sleep(0.5)
        await put_all(batches, [beat(number) for number in range(1, 5)])

    assert written(Line(seconds=1.0), put).sequences == [[0], [1, 2, 3, 4]]


def test_what_is_in_no_hurry_waits_a_moment_for_what_is_and_no_longer() -> None:
    async def put(batches: MessageBatches) -> None:
        line.times_s.append(asyncio.get_running_loop().time())
        await put_all(batches, [beat(0), beat(1)], hurry=False)
        await asyncio.sleep(1.0)  # nothing came
        await batches.put(beat(2), hurry=False)
        await asyncio.sleep(UNHURRIED_S / 5)
        await batches.put(beat(3))
        await asyncio.sleep(1.0)

    line = Line()
    assert written(line, put).sequences == [[0, 1], [2, 3]]
    began_s, *times_s = line.times_s
    assert [time_s - began_s for time_s in times_s] == pytest.approx([UNHURRIED_S, 1.0 + UNHURRIED_S / 5])


@pytest.mark.parametrize(
    ("messages", "together"),
    [
        ([beat(number) for number in range(3 * TOGETHER_MAX)], TOGETHER_MAX),
        ([beat(0, padding=TOGETHER_BYTES_MAX // 2 - 50)] * 8, 2),
    ],
    ids=["small", "large"],
)
def test_a_batch_has_its_limits_and_the_rest_follows(messages: list[bytes], together: int) -> None:
    line = written(Line(seconds=1.0), lambda batches: put_all(batches, messages))
    assert max(map(len, line.written)) <= TOGETHER_BYTES_MAX + 6 * TOGETHER_MAX
    counts = [len(list(parts(session_pb2.Event, data))) for data in line.written]
    assert (sum(counts), max(counts)) == (len(messages), together)


def test_the_largest_message_travels_alone_behind_small_ones() -> None:
    messages = [bytes(1000)] * 60 + [bytes(MAX_MESSAGE_BYTES)]
    line = written(Line(), lambda batches: put_all(batches, messages))
    assert len(line.written[-1]) == MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("message", "waiting_max"),
    [(beat(1), TOGETHER_MAX), (bytes(WAITING_BYTES_MAX // 8), 8), (bytes(MAX_MESSAGE_BYTES), 1)],
    ids=["small", "large", "largest"],
)
def test_a_writer_that_is_held_up_holds_back_whoever_puts(message: bytes, waiting_max: int) -> None:
    async def main() -> int:
        line = Line(seconds=1e3)
        batches = MessageBatches(line.write)
        writing = asyncio.ensure_future(batches.write_all())
        putting = asyncio.ensure_future(put_all(batches, [message] * 10 * TOGETHER_MAX))
        await asyncio.sleep(1.0)
        assert not putting.done()
        putting.cancel()
        writing.cancel()
        return len(batches._waiting)

    assert sim.run(main(), seed=0) == waiting_max


def test_what_a_write_raises_reaches_whoever_puts_and_whoever_finishes() -> None:
    async def main() -> None:
        line = Line()
        line.failure = ConnectionError("gone")
        batches = MessageBatches(line.write)
        writing = asyncio.ensure_future(batches.write_all())
        await batches.put(beat(0))
        await writing
        with pytest.raises(ConnectionError, match="gone"):
            await batches.put(beat(1))
        with pytest.raises(ConnectionError, match="gone"):
            await batches.finish()

    sim.run(main(), seed=0)


def test_a_message_that_came_alone_is_what_it_was_and_one_with_too_many_is_refused() -> None:
    assert [part.heartbeat.sequence for part in parts(session_pb2.Event, beat(7))] == [7]
    command = session_pb2.Command(epoch=1, more=[session_pb2.Command(epoch=2).SerializeToString()])
    assert [part.epoch for part in parts(session_pb2.Command, command.SerializeToString())] == [1, 2]
    for count, is_refused in ((TOGETHER_MAX - 1, False), (TOGETHER_MAX, True)):
        data = session_pb2.Event(more=[beat(1)] * count).SerializeToString()
        if is_refused:
            with pytest.raises(CorruptFrame, match="limit is 64"):
                list(parts(session_pb2.Event, data))
        else:
            assert len(list(parts(session_pb2.Event, data))) == 1 + count
    with pytest.raises(CorruptFrame, match="no Event"):
        list(parts(session_pb2.Event, session_pb2.Event(more=[b"\x0a\xff"]).SerializeToString()))
