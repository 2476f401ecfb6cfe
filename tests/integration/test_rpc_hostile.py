"""What gRPC alone shows: dead processes, peers that speak nonsense, and the bounds of what is under way."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
import xxhash

from swarm.errors import (
    CorruptFrame,
    DeadlinePassed,
    NotAllowed,
    PeerUnavailable,
    Refused,
    RetryElsewhere,
    SchedulerUnreachable,
    SwarmError,
)
from swarm.rpc.channel import answering, bind, connect, connect_sync, new_server, translate
from swarm.rpc.links.frames import MESSAGE_BYTES, decode, message, split, unpack
from swarm.rpc.links.peer_service import PULLS_OF_HOST_MAX, add_peer_service
from swarm.rpc.links.peers import RECEIPTS_BYTES_MAX, GrpcPeerLinks
from swarm.rpc.links.state import state_reply
from swarm.rpc.mapping import to_event, to_header, to_message
from swarm.rpc.session import GrpcSchedulerLink, add_session_service
from swarm.types import JobId, PeerId
from swarm.wire import frame_pb2, frame_pb2_grpc, session_pb2
from swarm.wire.messages import (
    Boundary,
    Command,
    Event,
    FetchRequest,
    Heartbeat,
    Hello,
    StateReply,
    StateRequest,
    StoreHeader,
    Void,
)
from tests.support.headers import header_of
from tests.support.serving import links_here, server_of, serving

pytestmark = pytest.mark.timeout(300)


class Receiver:
    """Holds every tensor until the gate opens; knows the most that it held at once."""

    def __init__(self, *, opened: bool = True) -> None:
        self.gate = asyncio.Event()
        if opened:
            self.gate.set()
        self.inside_bytes = self.most_bytes = 0
        self.got: list[int] = []
        self.arrived = asyncio.Event()

    def admit(self, header: Boundary) -> None:
        pass

    async def receive(self, header: Boundary, payload: memoryview) -> None:
        self.inside_bytes += payload.nbytes
        self.most_bytes = max(self.most_bytes, self.inside_bytes)
        self.arrived.set()
        await self.gate.wait()
        self.inside_bytes -= payload.nbytes
        self.got.append(header.microbatch.index)


@asynccontextmanager
async def listening(receiver: Receiver) -> AsyncIterator[str]:
    server = new_server()
    add_peer_service(server, receiver)
    async with serving(server) as address:
        yield address


PROCESS = """
import asyncio
from swarm.rpc.channel import bind, new_server
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.session import add_session_service
class Silent:
    def admit(self, header): pass
    async def receive(self, header, payload):
        print("tensor", flush=True)
        await asyncio.Event().wait()
    async def attach(self, events):
        print("session", flush=True)
        await asyncio.Event().wait()
        yield
async def main():
    server = new_server()
    add_peer_service(server, Silent())
    add_session_service(server, Silent())
    port = bind(server, "127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_kill_minus_9_is_seen_at_once_by_tensors_and_by_the_session() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROCESS, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    address = f"127.0.0.1:{int(await process.stdout.readline())}"
    links, link = GrpcPeerLinks(), GrpcSchedulerLink(address)

    async def beats() -> AsyncIterator[Event]:
        yield Heartbeat(1)
        await asyncio.Event().wait()

    sending = asyncio.create_task(links.send(address, header_of(4), b"abcd"))
    attached = asyncio.ensure_future(anext(aiter(link.attach(beats()))))
    arrived = {await process.stdout.readline() for _ in range(2)}
    assert arrived == {b"tensor\n", b"session\n"}
    assert not sending.done()
    assert not attached.done()
    os.kill(process.pid, signal.SIGKILL)
    for one, kind in ((sending, PeerUnavailable), (attached, SchedulerUnreachable)):
        with pytest.raises(kind) as caught:
            await one
        assert "time" not in caught.value.message, "no ping was awaited"
    with pytest.raises(PeerUnavailable):
        await links.send(address, header_of(4), b"abcd")
    await process.wait()
    await links.close()
    await link.close()


async def test_bytes_under_way_to_one_neighbour_are_bounded() -> None:
    receiver = Receiver(opened=False)
    async with listening(receiver) as address:
        links = GrpcPeerLinks(max_bytes_in_flight=100_000)
        sending = [asyncio.create_task(links.send(address, header_of(30_000, i), bytes(30_000))) for i in range(20)]
        while receiver.inside_bytes < 90_000:
            await asyncio.sleep(0.001)
        receiver.gate.set()
        await asyncio.gather(*sending)
        assert receiver.most_bytes <= 90_000
        await links.send(address, header_of(200_000, 20), bytes(200_000))  # larger than the bound: alone
        assert sorted(receiver.got) == list(range(21))
        await links.close()


async def test_cancelled_sends_free_their_place() -> None:
    receiver = Receiver(opened=False)
    async with listening(receiver) as address:
        links = GrpcPeerLinks(max_bytes_in_flight=100_000)
        sending = [asyncio.create_task(links.send(address, header_of(60_000, i), bytes(60_000))) for i in range(5)]
        await receiver.arrived.wait()
        for task in sending:
            task.cancel()
        await asyncio.wait(sending)
        receiver.gate.set()
        await links.send(address, header_of(60_000, 5), bytes(60_000))
        assert receiver.got == [0, 5]  # the first was on its way, the others never left
        await links.close()


async def test_a_tensor_is_not_held_up_by_a_large_one_before_it() -> None:
    receiver = Receiver()
    async with listening(receiver) as address, links_here() as links:
        large = asyncio.create_task(links.send(address, header_of(60 << 20, 0), bytes(60 << 20)))
        await asyncio.sleep(0.005)
        await links.send(address, header_of(4, 1), b"abcd")
        assert receiver.got == [1]
        await large


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff", message([next(split(1, header_of(4), b"abcd"))]).replace(b"\x0a", b"\x12", 1)]
)
async def test_what_is_no_message_of_frames_ends_the_stream_with_the_reason(data: bytes) -> None:
    """A frame that was skipped like an unknown field would be a tensor without a receipt."""
    receiver = Receiver()
    async with listening(receiver) as address, connect(address) as channel:
        call = channel.stream_stream("/swarm.wire.Peer/Exchange")()
        await call.write(data)
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert type(translate(caught.value, address)) is CorruptFrame
    assert receiver.got == []


async def test_a_generated_client_can_send_tensors() -> None:
    receiver = Receiver()
    async with listening(receiver) as address, connect(address) as channel:
        frame = frame_pb2.Frame(sequence=3, header=to_header(header_of(4)), payload=b"abcd")
        frame.checksum = xxhash.xxh3_64_intdigest(frame.header.SerializeToString() + b"abcd", 3)
        broken = frame_pb2.Frame(sequence=4, header=to_header(header_of(4)), payload=b"abcd", checksum=1)
        other = frame_pb2.Frame(sequence=5, header=to_header(header_of(4, 1)), payload=b"efgh")
        other.checksum = xxhash.xxh3_64_intdigest(other.header.SerializeToString() + b"efgh", 5)
        call = frame_pb2_grpc.PeerStub(channel).Exchange()
        await call.write(frame_pb2.Frames(frames=[frame]))
        came_bytes = frame_pb2.Frames(frames=[frame]).ByteSize()
        receipt = frame_pb2.Receipt(sequence=3)
        assert await call.read() == frame_pb2.Receipts(receipts=[receipt], received_bytes=came_bytes)
        await call.write(frame_pb2.Frames(frames=[broken, other]))
        receipts = [receipt for _ in range(2) for receipt in (await call.read()).receipts]
        assert {receipt.sequence: receipt.error_code for receipt in receipts} == {4: CorruptFrame.code, 5: ""}
    assert receiver.got == [0, 1]


class Donor(Receiver):
    """Gives 16 MiB to whoever asks."""

    def __init__(self) -> None:
        super().__init__()
        self.full = asyncio.Event()  # as many answers are on their way as one host may have
        self._given = 0

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes]:
        self._given += 1
        if self._given == PULLS_OF_HOST_MAX:
            self.full.set()
        payload = bytes(16 << 20)
        return state_reply(1, 0, payload), payload


_STATE_REQUEST = StateRequest(JobId("job-1"), 0, 0, "records", 0, 0, 1, PeerId("x"), 1)


@asynccontextmanager
async def pulled_and_not_read() -> AsyncIterator[str]:
    """The address of a donor, from which one host pulls three times what it may and reads nothing."""
    donor, server = Donor(), new_server()
    add_peer_service(server, donor, None, donor)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    # Without the probe a busy machine's window grows until the whole answer fits in.
    async with grpc.aio.insecure_channel(address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        pull = channel.stream_stream("/swarm.wire.Peer/Pull")
        asking = frame_pb2.Asking(request=to_message(_STATE_REQUEST)).SerializeToString()
        unread = [pull() for _ in range(3 * PULLS_OF_HOST_MAX)]
        try:
            for call in unread:
                await call.write(asking)
            await donor.full.wait()
            yield address
        finally:
            for call in unread:
                call.cancel()
            await server.stop(None)


async def test_callers_that_do_not_read_what_they_pulled_are_few() -> None:
    """Each unread stream held an answer of up to 64 MiB, and there was no limit of streams."""
    links = GrpcPeerLinks()
    async with pulled_and_not_read() as address:
        with pytest.raises(RetryElsewhere, match="served already"):
            await links.pull(address, _STATE_REQUEST, 16 << 20)
    await links.close()


async def test_callers_that_do_not_read_what_they_pulled_lose_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unread stream held its answer for ever."""
    monkeypatch.setattr("swarm.rpc.window.PATIENCE_UNMEASURED_S", 0.5)
    links = GrpcPeerLinks()
    async with pulled_and_not_read() as address:
        while True:
            try:
                reply, _ = await links.pull(address, _STATE_REQUEST, 16 << 20)
                break
            except (RetryElsewhere, DeadlinePassed):  # the latter where this machine itself is slow to read
                await asyncio.sleep(0.1)
        assert reply.total_bytes == 16 << 20
    await links.close()


async def test_callers_that_leave_while_they_are_answered_leave_no_traceback_in_the_log() -> None:
    with structlog.testing.capture_logs() as logged:
        async with pulled_and_not_read():
            pass
    assert [entry for entry in logged if entry["log_level"] == "error"] == []


@pytest.mark.parametrize("address", ["unix:/run/x", "unix:80", "dns://192.0.2.1/h:80", "xds:h:80", "h"])
async def test_what_is_no_host_and_port_is_dialled_by_nobody(address: str) -> None:
    """The address of a Hello went to all neighbours, and gRPC took it for a target of any kind."""
    links = GrpcPeerLinks()
    with pytest.raises(Refused, match="is no address to dial"):
        await links.send(address, header_of(4), b"abcd")
    with pytest.raises(Refused, match="is no address to dial"):
        await links.pull(address, StateRequest(JobId("j"), 0, 0, "state", 0, 0, 0, PeerId("x"), 1), 1)
    for dial in (connect, connect_sync):
        with pytest.raises(Refused, match="is no address to dial"):
            dial(address)
    await links.close()


class Handler:
    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.stored = b""

    async def attach(self, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
        async for event in events:
            self.seen.append(event)
            yield 1, Void(0, 0, 0)

    async def held(self, header: StoreHeader) -> int:
        return 0

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        async for chunk in chunks:
            self.stored += chunk
        return "stored"

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        yield b""


@pytest.mark.parametrize("field", ["address", "http_address"])
async def test_a_stage_server_that_says_it_is_somewhere_else_than_at_a_host_and_port_is_refused(field: str) -> None:
    hello = Hello(PeerId("p"), 1, 2, "0", "127.0.0.1:1", "", "cpu", 1, 1, -1)
    handler, server = Handler(), new_server()
    add_session_service(server, handler)
    async with serving(server) as address:

        async def first(said: Hello) -> object:
            async def events() -> AsyncGenerator[Event, None]:
                yield said
                await asyncio.Event().wait()

            link = GrpcSchedulerLink(address)
            async with aclosing(link.attach(events())) as commands:
                try:
                    return await anext(commands)
                finally:
                    await link.close()

        with pytest.raises(Refused, match="is no address to dial"):
            await first(replace(hello, **{field: "unix:/run/docker.sock"}))
        assert handler.seen == []
        assert await first(hello) == (1, Void(0, 0, 0))


@asynccontextmanager
async def exchanging(exchange: Any) -> AsyncIterator[tuple[str, GrpcPeerLinks]]:
    """The address of a peer service that answers tensors like this, and links."""
    server = server_of(service="swarm.wire.Peer", Exchange=grpc.stream_stream_rpc_method_handler(exchange))
    async with serving(server) as address, links_here() as links:
        yield address, links


class DamagingServer:
    """A peer service in front of which some frames lose a bit: the first `damaged` of them."""

    def __init__(self, damaged: int) -> None:
        self.damaged = damaged
        self.frames = 0

    async def exchange(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async for data in requests:
            self.frames += 1
            (frame,) = unpack(data)
            receipt = frame_pb2.Receipt(sequence=decode(frame).sequence)
            if self.frames <= self.damaged:
                receipt.error_code = CorruptFrame.code
            await context.write(frame_pb2.Receipts(receipts=[receipt]).SerializeToString())


@pytest.mark.parametrize("damaged", [0, 1, 2])
async def test_one_damaged_frame_costs_one_resend_two_are_an_error(damaged: int) -> None:
    service = DamagingServer(damaged)
    async with exchanging(service.exchange) as (address, links):
        if damaged < 2:
            await links.send(address, header_of(4), b"abcd")
        else:
            with pytest.raises(CorruptFrame):
                await links.send(address, header_of(4), b"abcd")
        assert service.frames == min(damaged, 1) + 1


class CountingServer:
    """A peer service that answers every message with one, and notes how many frames came in each."""

    def __init__(self) -> None:
        self.frames: list[int] = []

    async def exchange(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        came_bytes = 0
        async for data in requests:
            found, came_bytes = [decode(frame) for frame in unpack(data)], came_bytes + len(data)
            self.frames += [] if found[0].is_probe else [len(found)]
            receipts = [frame_pb2.Receipt(sequence=frame.sequence) for frame in found if frame.header or frame.offer]
            told = frame_pb2.Receipts(receipts=receipts, received_bytes=came_bytes)
            await context.write(told.SerializeToString())


async def test_small_tensors_that_wait_together_travel_together_and_large_ones_alone() -> None:
    service = CountingServer()
    async with exchanging(service.exchange) as (address, links):
        await asyncio.gather(*(links.send(address, header_of(1000, index), bytes(1000)) for index in range(12)))
        assert service.frames == [12]
        await asyncio.gather(
            *(links.send(address, header_of(MESSAGE_BYTES, i), bytes(MESSAGE_BYTES)) for i in range(3))
        )
        assert set(service.frames[1:]) == {1}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"\x0a\x02\x08\x63", "was not sent"),
        (b"\x0a", "no Receipts"),
        (b"\xff\xff", "no Receipts"),
        (b"\x0a\x00" * RECEIPTS_BYTES_MAX, "bytes at once"),
    ],
    ids=["not sent", "cut", "nonsense", "a flood"],
)
async def test_a_receiver_that_answers_nonsense_or_a_flood_loses_the_link(answer: bytes, words: str) -> None:
    """4 MiB of receipts were two million objects on the event loop."""

    async def exchange(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async with answering(context):
            async for _ in requests:
                await context.write(answer)

    async with exchanging(exchange) as (address, links):
        with pytest.raises(CorruptFrame, match=words):
            await links.send(address, header_of(4), b"abcd")


async def test_a_damaged_tensor_of_a_shared_message_is_sent_again_and_the_others_are_not() -> None:
    receiver, sent = Receiver(), 0

    def damage(frame: bytes) -> bytes:
        nonlocal sent
        sent += 1
        return frame[:-1] + bytes([frame[-1] ^ 1]) if sent == 2 else frame

    async with listening(receiver) as address:
        links = GrpcPeerLinks(on_wire=damage)
        await asyncio.gather(*(links.send(address, header_of(1000, index), bytes(1000)) for index in range(5)))
        assert sorted(receiver.got) == list(range(5))
        assert sent == 6
        await links.close()


async def test_receipts_of_tensors_that_came_together_go_together() -> None:
    receiver = Receiver()
    async with listening(receiver) as address, connect(address) as channel:
        call = channel.stream_stream("/swarm.wire.Peer/Exchange")()
        await call.write(message(next(split(number, header_of(4, number), b"abcd")) for number in range(10)))
        answer = frame_pb2.Receipts.FromString(await call.read())
        assert sorted(receipt.sequence for receipt in answer.receipts) == list(range(10))
    assert sorted(receiver.got) == list(range(10))


def chunk(payload: bytes, **header: Any) -> bytes:
    return session_pb2.StoreChunk(payload=payload, **header).SerializeToString()


BEAT = to_event(Heartbeat(1)).SerializeToString()
FOUR = {"header": to_message(StoreHeader(JobId("j"), PeerId("a"), 1, 0, 1, 0, 4))}
BAD_CALLS: list[tuple[str, list[bytes], type[SwarmError], str]] = [
    ("Attach", [BEAT, b""], Refused, "Event.body"),
    ("Attach", [BEAT, b"\xff"], CorruptFrame, "no Event"),
    ("Attach", [BEAT, session_pb2.Event(hello={"peer": "../x"}).SerializeToString()], Refused, "Hello.peer"),
    ("Store", [], Refused, "header is missing"),
    ("Store", [chunk(b"ab")], Refused, "header is missing"),
    ("Store", [b"\xff"], CorruptFrame, "no StoreChunk"),
    ("Store", [chunk(b"abc", **FOUR)], CorruptFrame, "the header says 4"),
    ("Store", [chunk(b"abcde", **FOUR)], CorruptFrame, "the header says 4"),
    ("Store", [chunk(b"ab", **FOUR)] * 2, CorruptFrame, "comes twice"),
]


@pytest.mark.parametrize(("method", "messages", "kind", "reason"), BAD_CALLS)
async def test_a_bad_event_or_store_ends_the_call_with_the_reason(
    method: str, messages: list[bytes], kind: type[SwarmError], reason: str
) -> None:
    handler, server = Handler(), new_server()
    add_session_service(server, handler)
    async with serving(server) as address, connect(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            _ = [reply async for reply in channel.stream_stream(f"/swarm.wire.Session/{method}")(iter(messages))]
    error = translate(caught.value, "scheduler")
    assert type(error) is kind
    assert reason in error.message
    assert handler.seen == [Heartbeat(1)] * (method == "Attach")


async def test_weights_that_are_refused_while_they_are_sent_are_refused_with_the_reason() -> None:
    """In one of seven such calls gRPC forgot it: a stage server took "the job is over" for a fault of the scheduler."""

    class Over(Handler):
        async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
            raise NotAllowed("the job is over")

    server, content = new_server(), bytes(8 << 20)
    add_session_service(server, Over())
    async with serving(server) as address:
        link = GrpcSchedulerLink(address)
        for _ in range(60):
            with pytest.raises(NotAllowed, match="the job is over"):
                await link.store(StoreHeader(JobId("j"), PeerId("a"), 1, 0, 1, 0, len(content)), content)
        await link.close()


async def test_ten_thousand_metadata_keys_are_refused_and_the_server_lives_on() -> None:
    receiver = Receiver()
    async with listening(receiver) as address:
        async with connect(address) as channel:
            metadata = tuple((f"key-{index}", "x" * 20) for index in range(10_000))
            with pytest.raises(grpc.RpcError):
                await channel.stream_stream("/swarm.wire.Peer/Exchange")(metadata=metadata).read()
        links = GrpcPeerLinks()
        await links.send(address, header_of(4), b"abcd")
        await links.close()
    assert receiver.got == [0]


async def test_frames_of_one_sender_never_reach_another_ones_tensor() -> None:
    """Sequence numbers are per stream: two senders use the same ones at the same time."""
    receiver = Receiver()
    size_bytes = (1 << 20) + 4
    async with listening(receiver) as address:
        first, second = GrpcPeerLinks(), GrpcPeerLinks()
        await asyncio.gather(
            *(
                links.send(address, header_of(size_bytes, index), bytes([index]) * size_bytes)
                for links, start in ((first, 0), (second, 10))
                for index in range(start, start + 10)
            )
        )
        assert sorted(receiver.got) == list(range(20))
        await first.close()
        await second.close()


def test_a_frame_says_its_sequence_whatever_the_number() -> None:
    for sequence in (0, 1, 127, 128, 2**63, 2**64 - 1):
        assert [decode(b"".join(parts)).sequence for parts in split(sequence, header_of(4), b"abcd")] == [sequence]
