"""Payloads by memory between processes of one host: the same bits, whatever breaks, and nothing for those who lie."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import partial

import grpc
import grpc.aio
import pytest

from client.up.between import Between, SlowLink, host_of
from swarm.errors import CorruptFrame, NoPass, PeerUnavailable, StaleMessage
from swarm.rpc.channel import connect, new_server, translate, write
from swarm.rpc.links import frames
from swarm.rpc.links import memory as module
from swarm.rpc.links.dialling import Paths
from swarm.rpc.links.frames import CHUNK_BYTES, message, offer, split
from swarm.rpc.links.memory import FILE_BYTES, HEAD_BYTES, LEAST_BYTES, FileCount, LentMemory
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.links.peers import GrpcPeerLinks, _Link
from swarm.wire import frame_pb2
from swarm.wire.messages import Boundary
from tests.support.headers import header_of
from tests.support.serving import links_here, serving

pytestmark = pytest.mark.timeout(60)

SIZES = [3, LEAST_BYTES - 1, LEAST_BYTES, CHUNK_BYTES, 2 * CHUNK_BYTES + LEAST_BYTES, 3 * CHUNK_BYTES + 17]
WHOLE = [(HEAD_BYTES, FILE_BYTES)]


def content_of(index: int, size: int) -> bytes:
    return random.Random(index).randbytes(size)


class Receiver:
    """Keeps what arrives, by microbatch; refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.got: dict[int, bytes] = {}
        self.refused: set[int] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()

    def admit(self, header: Boundary) -> None:
        if header.microbatch.index in self.refused:
            raise StaleMessage("it has moved on")

    async def receive(self, header: Boundary, payload: memoryview) -> None:
        assert payload.readonly
        self.arrived.set()
        await self.gate.wait()
        self.got[header.microbatch.index] = bytes(payload)


class Counts:
    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()

    def sent(self, address: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None:
        self.bytes["sent"] += wire_bytes

    def received(self, peer: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None:
        self.bytes["received"] += wire_bytes


@asynccontextmanager
async def listening(receiver: Receiver, counts: Counts | None = None, host: str = "127.0.0.1") -> AsyncIterator[str]:
    server = new_server()
    add_peer_service(server, receiver, counts)
    async with serving(server, host=host) as address:
        yield address


async def introduced(links: GrpcPeerLinks, address: str) -> _Link:
    """The link, once its memory is in use."""
    index = 1000
    while True:
        await links.send(address, header_of(LEAST_BYTES, index), content_of(index, LEAST_BYTES))
        (link,) = (link for link in links._links.values() if link.error is None)
        if link._memory.written_bytes:
            return link
        index += 1


def is_open(name: str) -> bool:
    with suppress(FileNotFoundError):  # that of the listing itself
        return os.readlink(f"/proc/self/fd/{name}") == module._TARGET
    return False


async def all_closed() -> None:
    """Neither end has a file open any more; the dialled one hears of the end of a stream a little later."""
    while any(map(is_open, os.listdir("/proc/self/fd"))):
        await asyncio.sleep(0.005)


async def test_all_bits_arrive_and_all_extents_are_free_again() -> None:
    receiver, counts = Receiver(), Counts()
    async with listening(receiver, counts) as address:
        links = GrpcPeerLinks(counts)
        link = await introduced(links, address)
        sizes = SIZES * 3 + [8 << 20] * 3  # more than there is room for
        await asyncio.gather(
            *(links.send(address, header_of(size, index), content_of(index, size)) for index, size in enumerate(sizes))
        )
        for index, size in enumerate(sizes):
            assert receiver.got[index] == content_of(index, size)
        assert link._memory._extents._free == WHOLE
        assert link._memory.written_bytes < sum(sizes), "some found no room"
        assert counts.bytes["sent"] == counts.bytes["received"] >= sum(sizes), "by memory or not, bytes count"
        await links.close()
    await all_closed()


RECEIVER = """
import asyncio, hashlib, sys
from swarm.rpc.channel import bind, new_server
from swarm.rpc.links.dialling import Paths
from swarm.rpc.links.peer_service import add_peer_service
class Told:
    def admit(self, header): pass
    async def receive(self, header, payload):
        print(header.microbatch.index, hashlib.sha256(payload).hexdigest(), flush=True)
async def main():
    server = new_server()
    add_peer_service(server, Told())
    print(bind(server, "127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("by_memory", [True, False])
async def test_another_process_gets_the_same_bits_by_memory_and_without(
    by_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_memory:  # as from another container
        monkeypatch.setattr(module, "_host", lambda word: bytes(16))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", RECEIVER, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    address = f"127.0.0.1:{int(await process.stdout.readline())}"
    links = GrpcPeerLinks()
    sizes = [*SIZES, *SIZES]
    for index, size in enumerate(sizes):
        await links.send(address, header_of(size, index), content_of(index, size))
        told = f"{index} {hashlib.sha256(content_of(index, size)).hexdigest()}\n"
        assert await process.stdout.readline() == told.encode()
    (link,) = links._links.values()
    assert bool(link._memory.written_bytes) is by_memory
    await links.close()
    process.kill()
    await process.wait()
    await all_closed()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


async def test_a_slow_link_between_islands_is_not_passed_by(receiver: Receiver) -> None:
    """The proxy of `swarm up --between` is slow on purpose, on one host."""
    async with listening(receiver, host=host_of(1)) as address, Between(2, SlowLink(1e9, 0.0)) as between:
        links = GrpcPeerLinks(paths=Paths(proxy=between.proxies[0], host=host_of(0)))
        for index in range(4):
            await links.send(address, header_of(CHUNK_BYTES, index), content_of(index, CHUNK_BYTES))
        (link,) = links._links.values()
        assert link._memory.written_bytes == 0
        await links.close()
    assert receiver.got == {index: content_of(index, CHUNK_BYTES) for index in range(4)}


async def test_a_link_that_breaks_takes_its_memory_along(receiver: Receiver) -> None:
    """What is sent again goes by a new file: an extent of the old one means nothing any more."""
    async with listening(receiver) as address, links_here() as links:
        old = await introduced(links, address)
        receiver.gate.clear()
        receiver.arrived.clear()
        sending = [
            asyncio.create_task(links.send(address, header_of(CHUNK_BYTES, i), content_of(i, CHUNK_BYTES)))
            for i in range(4)
        ]
        await receiver.arrived.wait()
        old.cut()
        for sent in sending:
            with pytest.raises(PeerUnavailable):
                await sent
        receiver.gate.set()
        new = await introduced(links, address)
        assert new is not old
        assert old._memory.write(99, memoryview(bytes(LEAST_BYTES))) is None
        for index in range(4):
            await links.send(address, header_of(CHUNK_BYTES, index), content_of(index, CHUNK_BYTES))
            assert receiver.got[index] == content_of(index, CHUNK_BYTES)
        assert new._memory._extents._free == WHOLE
    await all_closed()


async def test_a_refused_tensor_keeps_no_extent(receiver: Receiver) -> None:
    """Its later frames were still made once the refusal had freed what it held, and were never freed."""
    async with listening(receiver) as address, links_here() as links:
        link = await introduced(links, address)
        receiver.refused = set(range(5))
        sending = (links.send(address, header_of(12 << 20, index), bytes(12 << 20)) for index in range(5))
        outcomes = await asyncio.gather(*sending, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {StaleMessage}
        await introduced(links, address)
        assert link._memory._extents._free == WHOLE


async def test_a_cancelled_tensor_keeps_its_extents_until_its_receipt(receiver: Receiver) -> None:
    async with listening(receiver) as address, links_here() as links:
        link = await introduced(links, address)
        receiver.gate.clear()
        receiver.arrived.clear()
        sending = asyncio.create_task(links.send(address, header_of(CHUNK_BYTES), content_of(0, CHUNK_BYTES)))
        await receiver.arrived.wait()
        sending.cancel()
        await asyncio.wait({sending})
        assert link._memory._extents._free == [(HEAD_BYTES + CHUNK_BYTES, FILE_BYTES)]
        receiver.gate.set()
        await introduced(links, address)
        assert receiver.got[0] == content_of(0, CHUNK_BYTES)
        assert link._memory._extents._free == WHOLE


async def test_a_damaged_frame_of_a_payload_in_memory_is_sent_again() -> None:
    receiver, seen = Receiver(), 0

    def damage(frame: bytes) -> bytes:
        nonlocal seen
        seen += len(frame) < LEAST_BYTES
        return frame[:-1] + bytes([frame[-1] ^ 1]) if len(frame) < LEAST_BYTES and seen == 2 else frame

    async with listening(receiver) as address:
        links = GrpcPeerLinks(on_wire=damage)
        link = await introduced(links, address)
        for index in range(3):
            await links.send(address, header_of(LEAST_BYTES, index), content_of(index, LEAST_BYTES))
            assert receiver.got[index] == content_of(index, LEAST_BYTES)
        assert seen > 3
        assert link._memory._extents._free == WHOLE
        await links.close()


# Senders that lie -----------------------------------------------------------------------------------------------------


class Liar:
    """A sender that writes its messages itself. Its memory was taken."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.memory = LentMemory(FileCount(1))
        self.memory.begin()
        self.memory.write(0, memoryview(bytes(LEAST_BYTES)))
        self.call = channel.stream_stream("/swarm.wire.Peer/Exchange")()

    async def offers(self) -> frame_pb2.Receipt:
        offered = self.memory.offer()
        assert offered is not None
        self.descriptor = frame_pb2.Memory.FromString(offered).descriptor
        await self.says(message([offer(1, offered)]))
        (receipt,) = frame_pb2.Receipts.FromString(await self.call.read()).receipts
        self.memory.answered(is_taken=not receipt.error_code)
        return receipt

    async def says(self, data: bytes) -> None:
        """Write, but for a call that was refused: gRPC forgets why when a write follows."""
        with suppress(asyncio.InvalidStateError, grpc.RpcError):
            await write(self.call, data)

    def frame(self, sequence: int, content: bytes) -> bytes:
        """A sound frame of a tensor in memory."""
        lend = partial(self.memory.write, sequence)
        return b"".join(next(split(sequence, header_of(len(content), sequence), content, lend)))

    async def error(self) -> type[Exception]:
        """By which the stream was ended."""

        async def read() -> None:
            while await self.call.read() is not grpc.aio.EOF:
                pass

        with pytest.raises(grpc.RpcError) as caught:
            await read()
        return type(translate(caught.value, self.address))


@asynccontextmanager
async def liar(address: str) -> AsyncIterator[Liar]:
    async with connect(address) as channel:
        made = Liar(address, channel)
        with closing(made.memory):
            assert await made.offers() == frame_pb2.Receipt(sequence=1)
            yield made


async def works(address: str, receiver: Receiver) -> None:
    """Others are served as before."""
    links = GrpcPeerLinks()
    await introduced(links, address)
    await links.send(address, header_of(CHUNK_BYTES, 77), content_of(77, CHUNK_BYTES))
    assert receiver.got[77] == content_of(77, CHUNK_BYTES)
    await links.close()


def outside(sender: Liar, start: int) -> bytes:
    lie = frame_pb2.Frame.FromString(sender.frame(2, bytes(LEAST_BYTES)))
    lie.extent_start = start
    return frame_pb2.Frames(frames=[lie]).SerializeToString()


def cut(sender: Liar) -> bytes:
    frame = sender.frame(2, bytes(LEAST_BYTES))
    os.ftruncate(sender.descriptor, HEAD_BYTES)
    return message([[frame]])


def many_times(sender: Liar) -> bytes:
    """64 frames of one extent of 1 MiB are 64 MiB of copies for 3 KiB: no more than a large message carries."""
    return message([[sender.frame(2, bytes(CHUNK_BYTES))]] * 5)


def offered_again(sender: Liar) -> bytes:
    return message([offer(2, frame_pb2.Memory(process=1).SerializeToString())])


PLACES = (0, HEAD_BYTES - 1, FILE_BYTES - LEAST_BYTES + 1, (1 << 64) - 1)


@pytest.mark.parametrize("lie", [*(partial(outside, start=start) for start in PLACES), cut, many_times, offered_again])
async def test_a_sender_that_lies_about_its_memory_loses_its_stream_and_others_are_served(
    receiver: Receiver, lie: Callable[[Liar], bytes]
) -> None:
    async with listening(receiver) as address, liar(address) as sender:
        await sender.says(lie(sender))
        assert await sender.error() is CorruptFrame
        await works(address, receiver)
    assert 2 not in receiver.got
    await all_closed()


async def test_an_extent_without_a_memory_ends_the_stream(receiver: Receiver) -> None:
    async with listening(receiver) as address, liar(address) as sender, connect(address) as channel:
        other = Liar(address, channel)
        with closing(other.memory):
            await other.says(message([[sender.frame(2, bytes(LEAST_BYTES))]]))
            assert await other.error() is CorruptFrame
        await works(address, receiver)
    assert 2 not in receiver.got


async def test_bytes_that_change_before_they_are_read_are_refused_by_their_checksum(receiver: Receiver) -> None:
    async with listening(receiver) as address, liar(address) as sender:
        frame = sender.frame(2, content_of(2, LEAST_BYTES))
        os.pwrite(sender.descriptor, b"x", HEAD_BYTES + 5)
        await sender.says(message([[frame]]))
        (receipt,) = frame_pb2.Receipts.FromString(await sender.call.read()).receipts
        assert (receipt.sequence, receipt.error_code) == (2, CorruptFrame.code)
        sound = sender.frame(3, content_of(3, LEAST_BYTES))
        await sender.says(message([[sound]]))
        assert frame_pb2.Receipts.FromString(await sender.call.read()).receipts[0].error_code == ""
    assert receiver.got == {3: content_of(3, LEAST_BYTES)}


async def test_who_is_not_let_in_has_no_file_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offer is said in the stream, behind the gate."""

    class Closed:
        @asynccontextmanager
        async def enter(self, token: bytes, name: str | None, *, pulls: bool) -> AsyncIterator[None]:
            raise NoPass("nobody is let in")
            yield

    opened: list[object] = []
    monkeypatch.setattr(module, "_opened", opened.append)
    server = new_server()
    add_peer_service(server, Receiver(), gate=Closed())  # type: ignore[arg-type]
    async with serving(server) as address:
        async with connect(address) as channel:
            sender = Liar(address, channel)
            with closing(sender.memory):
                offered = sender.memory.offer()
                assert offered is not None
                await sender.says(message([offer(1, offered)]))
                assert await sender.error() is NoPass
    assert opened == []


async def test_a_receiver_that_knows_no_memory_is_sent_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older version skips the offer's field, and answers that the frame is corrupt."""
    known = {number: kind for number, kind in frames._KIND_OF_FIELD.items() if number <= 5}
    monkeypatch.setattr(frames, "_KIND_OF_FIELD", known)
    receiver = Receiver()
    async with listening(receiver) as address, links_here() as links:
        for index in range(3):
            await links.send(address, header_of(CHUNK_BYTES, index), content_of(index, CHUNK_BYTES))
        (link,) = links._links.values()
        assert link._memory.written_bytes == 0
        await all_closed()
    assert receiver.got == {index: content_of(index, CHUNK_BYTES) for index in range(3)}
