"""Frames: what was sent comes out, damaged or invented frames never do, and plain protobuf speaks the same language."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import CorruptFrame, Refused, StaleMessage
from swarm.rpc.links import frames
from swarm.rpc.links.frames import (
    CHUNK_BYTES,
    MAX_FRAMES,
    MAX_OPEN_TENSORS,
    Assembler,
    Tensor,
    decode,
    message,
    uncompressed_bytes,
    unpack,
)
from swarm.rpc.mapping import to_header
from swarm.types import Direction, JobId, Microbatch, PeerId, Round, UnitName
from swarm.wire import frame_pb2
from swarm.wire.messages import Boundary, Need, Slice, TensorHeader

SIZES = [1, 3, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES + 17]


AT, SENDER = Microbatch(0, 3, 1), PeerId("peer-a")
QUESTION = Need(JobId("job-1"), AT, Direction.FORWARD, 1, 2, SENDER, 7)


def header_of(size_bytes: int, **changes: object) -> TensorHeader:
    if not size_bytes:
        return QUESTION
    header = Boundary(
        job=JobId("job-1"),
        microbatch=AT,
        direction=Direction.FORWARD,
        stage=1,
        attempt=2,
        sender=SENDER,
        incarnation=7,
        dtype="uint8",
        shape=(size_bytes,),
        codec="none",
        total_bytes=size_bytes,
    )
    return replace(header, **changes)  # type: ignore[arg-type]


def content_of(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def split(sequence: int, header: TensorHeader, payload: bytes | memoryview) -> Iterator[bytes]:
    """The frames of one tensor, each in one piece."""
    return (b"".join(parts) for parts in frames.split(sequence, header, payload))


def accept(header: TensorHeader) -> None:
    pass


def feed(assembler: Assembler, chunks: Iterator[bytes] | list[bytes]) -> list[Tensor]:
    tensors = (assembler.add(decode(chunk)) for chunk in chunks)
    return [tensor for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("size_bytes", [0, *SIZES])
def test_a_tensor_comes_out_as_it_went_in_and_plain_protobuf_reads_its_frames(size_bytes: int) -> None:
    header, content = header_of(size_bytes), content_of(size_bytes)
    chunks = list(split(9, header, content))
    assert len(chunks) == max(1, -(-size_bytes // CHUNK_BYTES))
    (tensor,) = feed(Assembler(accept), chunks)
    assert (tensor.sequence, tensor.header, bytes(tensor.payload)) == (9, header, content)
    assert tensor.payload.readonly
    assert tensor.wire_bytes == sum(map(len, chunks))
    found = [frame_pb2.Frame.FromString(chunk) for chunk in chunks]
    assert found[0].header == to_header(header)
    assert not any(frame.HasField("header") for frame in found[1:])
    assert b"".join(frame.payload for frame in found) == content
    assert [(frame.sequence, frame.offset) for frame in found] == [(9, i * CHUNK_BYTES) for i in range(len(found))]
    # Nothing more on the wire than protobuf itself would write.
    assert all(len(frame.SerializeToString()) == frame.ByteSize() for frame in found)


def plain_frames(sequence: int, header: TensorHeader, content: bytes, chunk_bytes: int) -> list[bytes]:
    """What a client that knows only the proto files writes, from the comments there."""
    frames = []
    for offset in range(0, max(1, len(content)), chunk_bytes):
        payload = content[offset : offset + chunk_bytes]
        frame = frame_pb2.Frame(sequence=sequence, offset=offset, payload=payload)
        opening = b""
        if offset == 0:
            frame.header.CopyFrom(to_header(header))
            opening = frame.header.SerializeToString()
        frame.checksum = xxhash.xxh3_64_intdigest(opening + payload, sequence + offset)
        frames.append(frame.SerializeToString())
    return frames


@pytest.mark.parametrize("size_bytes", [0, 1, 1000, 4096])
@pytest.mark.parametrize("sequence", [0, 1, 2**40])
def test_we_read_plain_protobufs_frames(size_bytes: int, sequence: int) -> None:
    header, content = header_of(size_bytes), content_of(size_bytes)
    (tensor,) = feed(Assembler(accept), plain_frames(sequence, header, content, 1000))
    assert (tensor.sequence, tensor.header, bytes(tensor.payload)) == (sequence, header, content)


SMALL = st.lists(st.integers(0, 3000), min_size=1, max_size=MAX_FRAMES)


@given(SMALL)
@settings(max_examples=30, deadline=None)
def test_small_tensors_share_a_message_that_plain_protobuf_reads_and_writes_too(sizes: list[int]) -> None:
    contents = [content_of(size, index) for index, size in enumerate(sizes)]
    together = [next(frames.split(index, header_of(len(one)), one)) for index, one in enumerate(contents)]
    ours = message(together)
    theirs = frame_pb2.Frames.FromString(ours)
    assert [frame.payload for frame in theirs.frames] == contents
    for data in (ours, theirs.SerializeToString()):
        assembler = Assembler(accept)
        tensors = [assembler.add(decode(frame)) for frame in unpack(data)]
        assert [bytes(tensor.payload) for tensor in tensors if tensor is not None] == contents


def test_a_kept_tensor_of_a_shared_message_does_not_keep_the_message() -> None:
    """A view of 64 KiB would hold the memory of all that it travelled with, which no limit of the receiver counts."""
    one, other = (next(frames.split(number, header_of(1000), content_of(1000))) for number in (1, 2))
    alone, shared = message([one]), message([one, other])
    assert [frame.obj for frame in unpack(alone)] == [alone]  # no copy where there is nothing to share
    assert [len(frame.obj) for frame in unpack(shared)] == [frame.nbytes for frame in unpack(shared)]
    assert all(frame.readonly for data in (alone, shared) for frame in unpack(data))


def test_any_buffer_can_be_sent() -> None:
    content = bytearray(content_of(64))
    view = memoryview(content).cast("f").cast("B").cast("f", (4, 4))
    (tensor,) = feed(Assembler(accept), split(1, header_of(64), view))
    assert bytes(tensor.payload) == content


@given(st.lists(st.integers(0, 3 * CHUNK_BYTES), min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_tensors_of_one_stream_may_alternate(sizes: list[int], dice: random.Random) -> None:
    contents = [content_of(size, index) for index, size in enumerate(sizes)]
    streams = [split(index, header_of(len(content)), content) for index, content in enumerate(contents)]
    assembler, received = Assembler(accept), {}
    while streams:
        stream = dice.choice(streams)
        chunk = next(stream, None)
        if chunk is None:
            streams.remove(stream)
        elif (tensor := assembler.add(decode(chunk))) is not None:
            received[tensor.sequence] = bytes(tensor.payload)
    assert received == dict(enumerate(contents))


# Damage ---------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_random_bytes_are_a_typed_error(data: bytes) -> None:
    with suppress(CorruptFrame):
        frame = decode(data)
        with suppress(Refused):
            Assembler(accept).add(frame)


def bent(data: bytes, dice: st.DataObject) -> bytes:
    """`data` with some bits flipped, a piece cut out, doubled or put in."""
    damaged = bytearray(data)
    for _ in range(dice.draw(st.integers(1, 3))):
        if not damaged:
            break
        place = dice.draw(st.integers(0, len(damaged) - 1))
        length = dice.draw(st.integers(1, 8))
        match dice.draw(st.integers(0, 3)):
            case 0:
                damaged[place] ^= 1 << dice.draw(st.integers(0, 7))
            case 1:
                del damaged[place : place + length]
            case 2:
                damaged[place:place] = damaged[place : place + length]
            case 3:
                damaged[place:place] = dice.draw(st.binary(min_size=1, max_size=8))
    return bytes(damaged)


@given(st.integers(0, 300), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=300)
def test_a_damaged_frame_never_becomes_a_wrong_tensor(size_bytes: int, sequence: int, data: st.DataObject) -> None:
    header, content = header_of(size_bytes), content_of(size_bytes)
    (frame,) = split(sequence, header, content)
    try:
        tensor = Assembler(accept).add(decode(bent(frame, data)))
    except (CorruptFrame, Refused):
        return
    if tensor is not None:  # the damage undid itself, or sits in a field that no one reads
        assert (tensor.header, bytes(tensor.payload)) == (header, content)


@given(st.permutations(range(6)), st.lists(st.integers(0, 5), max_size=4))
def test_chunks_in_any_other_order_never_become_a_tensor(order: list[int], repeated: list[int]) -> None:
    content = content_of(600)
    chunks = plain_frames(1, header_of(600), content, 100)
    assembler, tensors = Assembler(accept), []
    for index in [*order, *repeated]:
        with suppress(CorruptFrame):
            tensor = assembler.add(decode(chunks[index]))
            tensors += [tensor] if tensor is not None else []
    assert all(bytes(tensor.payload) == content for tensor in tensors)
    if order != sorted(order) and not repeated:
        assert tensors == []


@pytest.mark.parametrize("place", [0, 10, -1])
def test_one_flipped_bit_is_seen(place: int) -> None:
    content = bytearray(content_of(1000))
    (frame,) = split(1, header_of(1000), content)
    damaged = bytearray(frame)
    damaged[len(frame) - 1000 + place if place >= 0 else place] ^= 1
    with pytest.raises(CorruptFrame, match="checksum"):
        Assembler(accept).add(decode(bytes(damaged)))


def chunks_of_three() -> list[bytes]:
    return plain_frames(1, header_of(300), content_of(300), 100)


FIRST, SECOND, THIRD = chunks_of_three()
EMPTY = frame_pb2.Frame(sequence=1, offset=100, checksum=xxhash.xxh3_64_intdigest(b"", 101)).SerializeToString()
SHORT = plain_frames(1, header_of(250, shape=(250,)), content_of(300), 100)[:2]
LONG = plain_frames(1, header_of(CHUNK_BYTES + 1), content_of(CHUNK_BYTES + 1), CHUNK_BYTES + 1)


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([FIRST, THIRD], "continues at byte 200, expected byte 100"),
        ([FIRST, SECOND, SECOND], "continues at byte 100, expected byte 200"),
        ([FIRST, FIRST], "opened twice"),
        ([SECOND], "not opened"),
        ([*SHORT, THIRD], "50 bytes more"),
        ([FIRST, EMPTY], "without payload"),
        (LONG, "the limit is"),
    ],
    ids=["gap", "overlap", "opened twice", "never opened", "more than said", "for ever", "too long"],
)
def test_chunks_that_do_not_make_up_their_tensor_are_seen(chunks: list[bytes], words: str) -> None:
    with pytest.raises(CorruptFrame, match=words):
        feed(Assembler(accept), chunks)


BROKEN = [
    (unpack, b"", "no frame"),
    (unpack, b"\x0a", "inside a number"),
    (unpack, b"\x0a\x05ab", "inside a frame"),
    (unpack, b"\x0a\x00\x12\x00", "something else than frames"),  # a field that nobody knows
    (unpack, b"\x08\x01", "something else than frames"),
    (decode, b"\x08", "inside a number"),
    (decode, b"\x08" + b"\xff" * 10, "more than 64 bits"),
    (decode, b"\x08" + b"\xff" * 9 + b"\x7f", "more than 64 bits"),
    (decode, b"\x22\x05ab", "inside field 4"),
    (decode, b"\x29\x00", "inside field 5"),
    (decode, b"\x08\x01\x08\x02", "comes twice"),
    (decode, b"\x0a\x00", "wrong type"),
    (decode, b"\x00\x01", "without a number"),
    (decode, b"\x0b", "wire type 3"),
    (decode, b"\x78\x01" * 2_000_000, "more than 32 fields"),  # they are not scanned
]


@pytest.mark.parametrize(("read", "data", "reason"), BROKEN, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_no_message_or_frame_is_corrupt(read: Callable[[bytes], object], data: bytes, reason: str) -> None:
    with pytest.raises(CorruptFrame, match=reason):
        read(data)


def test_a_frame_that_is_mostly_something_else_is_refused() -> None:
    """The few bytes of its payload would keep all others in memory, and nobody would count them."""
    other = b"\x7a" + b"\x80\x80\x01" + bytes(16 << 10)  # field 15
    with pytest.raises(CorruptFrame, match="beside its header and payload"):
        decode(frame_pb2.Frame(sequence=1, payload=b"abcd").SerializeToString() + other)


def test_a_message_of_very_many_frames_is_refused() -> None:
    """Each frame costs time on the one event loop: a message of the greatest size has room for 300,000 of them."""
    most = message([[b""]] * MAX_FRAMES)
    assert len(unpack(most)) == MAX_FRAMES
    with pytest.raises(CorruptFrame, match=f"more than {MAX_FRAMES} frames"):
        unpack(most + message([[b""]]))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), st.data())
@settings(max_examples=300)
def test_a_damaged_message_never_becomes_a_wrong_tensor(sizes: list[int], data: st.DataObject) -> None:
    contents = [content_of(size, index) for index, size in enumerate(sizes)]
    whole = message(next(frames.split(index, header_of(len(one)), one)) for index, one in enumerate(contents))
    assembler = Assembler(accept)
    with suppress(CorruptFrame):
        for frame in unpack(bent(whole, data)):
            with suppress(Refused):
                tensor = assembler.add(decode(frame))
                if tensor is not None:
                    right = contents[tensor.sequence]
                    assert (tensor.header, bytes(tensor.payload)) == (header_of(len(right)), right)


def test_unknown_fields_are_skipped() -> None:
    (frame,) = split(1, header_of(3), b"abc")
    newer = frame + b"\x78\x01" + b"\x7a\x03xyz" + b"\x7d1234" + b"\x7912345678"
    tensor = Assembler(accept).add(decode(newer))
    assert tensor is not None
    assert bytes(tensor.payload) == b"abc"


# Refusals -------------------------------------------------------------------------------------------------------------


def test_the_header_is_asked_about_before_any_more_is_taken_and_the_rest_is_skipped() -> None:
    asked = []

    def refuse(header: TensorHeader) -> None:
        asked.append(header)
        raise StaleMessage("step 3 is over")

    first, second, third = chunks_of_three()
    assembler = Assembler(refuse)
    with pytest.raises(StaleMessage, match="step 3 is over"):
        assembler.add(decode(first))
    assert assembler.add(decode(second)) is assembler.add(decode(third)) is None
    assert asked == [header_of(300)]


def test_a_tensor_may_be_sent_again_under_its_number() -> None:
    first, second, third = chunks_of_three()
    assembler = Assembler(accept)
    with pytest.raises(CorruptFrame):
        feed(assembler, [first, third])
    assert len(feed(assembler, [first, second, third])) == 1


def test_open_tensors_are_bounded_and_small_ones_still_pass() -> None:
    assembler = Assembler(accept)
    for sequence in range(MAX_OPEN_TENSORS):
        assembler.add(decode(plain_frames(sequence, header_of(300), content_of(300), 100)[0]))
    with pytest.raises(Refused, match="are open"):
        assembler.add(decode(plain_frames(99, header_of(300), content_of(300), 100)[0]))
    assert len(feed(assembler, split(100, header_of(3), b"abc"))) == 1


HEADERS = [
    (header_of(4, shape=()), "0 elements cannot have"),
    (header_of(4, shape=(0,)), "0 elements cannot have"),
    (header_of(4, shape=(2**62, 2**62)), "too many"),
    (header_of(4, shape=(1,) * 9), "9 dimensions"),
    (header_of(4, shape=(1,) * 65), "65 (dimensions|elements)"),
    (header_of(4, direction="sideways"), r"Boundary\.direction"),
    (header_of(4, sender="../x"), r"Boundary\.sender"),
    (header_of(4, codec="x" * 10_000), "header has"),
]


@pytest.mark.parametrize(("header", "reason"), HEADERS)
def test_a_header_that_cannot_be_true_is_refused_by_both_sides(header: TensorHeader, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        split(1, header, b"abcd")
    fields = {name: getattr(header, name) for name in ("direction", "sender", "shape", "codec", "total_bytes")}
    opening = frame_pb2.Boundary(microbatch={}, **fields)
    frame = frame_pb2.Frame(header={"boundary": opening}, payload=b"abcd")
    frame.checksum = xxhash.xxh3_64_intdigest(frame.header.SerializeToString() + b"abcd", 0)
    with pytest.raises(Refused, match=reason):
        Assembler(accept).add(decode(frame.SerializeToString()))


def test_a_header_that_promises_too_much_is_refused_and_another_length_is_a_mistake_of_the_sender() -> None:
    frame = plain_frames(1, header_of(2000), content_of(2000), 1000)[0]
    with pytest.raises(Refused, match="over the limit of 1999"):
        Assembler(accept, max_tensor_bytes=1999).add(decode(frame))
    with pytest.raises(ValueError, match="the header says 4 bytes, the payload has 3"):
        split(1, header_of(4), b"abc")


def test_uncompressed_bytes_count_the_type_that_is_computed_in() -> None:
    assert uncompressed_bytes(header_of(6, dtype="bfloat16", shape=(1, 3))) == 12
    part = Slice(JobId("job-1"), 0, 3, UnitName("stage-0"), Round(1, 1), False, 0, SENDER, 7, "float64", 3, 24)
    assert uncompressed_bytes(part) == (24)
    assert uncompressed_bytes(header_of(0)) == 0


def test_a_tensor_of_three_gibibytes_is_taken_in() -> None:
    """Islands send a whole unit at once: with 537 million parameters in a stage they never exchanged."""
    header = header_of(3 << 30, shape=(3 << 28,))
    fields = {name: getattr(header, name) for name in ("direction", "sender", "shape", "codec", "total_bytes", "dtype")}
    frame = frame_pb2.Frame(header={"boundary": frame_pb2.Boundary(microbatch={}, **fields)}, payload=b"abcd")
    frame.checksum = xxhash.xxh3_64_intdigest(frame.header.SerializeToString() + b"abcd", 0)
    assert Assembler(accept).add(decode(frame.SerializeToString())) is None
