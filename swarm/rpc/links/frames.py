"""Tensors as frames: a small header, then the payload in chunks, each with a checksum.

A frame on the wire is a protobuf `Frame` (protos/swarm/wire/frame.proto), so any protobuf client can read and write it,
but the payload never passes through protobuf, which would copy it twice:

    | 08 sequence | 12 len header | 18 offset | 29 checksum | 22 len | payload ... |
      written and scanned by hand, field by field                     joined once, sliced as a memoryview

Between processes of one host a large payload may lie in the sender's memory instead (memory.py). Its frame says where,
and the reader fills it before anything is checked.

A message carries one frame or several (`Frames`): small tensors that wait together travel together, since a message
costs far more than a small tensor's bytes.

A tensor is one or more frames with the same sequence number, in order; the first has the header. Frames of several
tensors may alternate on one stream. The receiver checks the header before it accepts any payload, and holds only what
has arrived, so a header that lies about its size costs nothing.

Not chosen: protobuf around the payload, because it costs a factor of 1.3 to 2. Price: our own scanner, held by property
tests. A tensor that came in company is copied out of its message, whose memory a view would keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final, TypeAlias, assert_never

import xxhash

from swarm.errors import CorruptFrame, Refused
from swarm.rpc.mapping import from_header, parse, to_header
from swarm.types import Direction
from swarm.wire import frame_pb2
from swarm.wire.messages import Boundary, EvaluationBoundary, Need, Slice, TensorHeader

CHUNK_BYTES: Final = 1 << 20
MESSAGE_BYTES: Final = 512 << 10  # once a message has this many, no frame is added
MAX_FRAMES: Final = 64  # of one message
MAX_OPEN_TENSORS: Final = 16  # of one stream; the sender alternates between no more
MAX_TENSOR_BYTES: Final = 1 << 36  # islands send a whole unit; no more is held than has come
MAX_DIMENSIONS: Final = 8
MAX_HEADER_BYTES: Final = 8 << 10
_MAX_OTHER_BYTES = 1 << 10  # of one frame beside header and payload: what is kept holds no more than it seems
_MAX_FIELDS = 32  # of one frame, unknown ones included: scanning stays cheap
_MAX_REMEMBERED = 256  # refused tensors whose remaining chunks may still come

_WORD = (1 << 64) - 1
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FRAME_OF_MESSAGE = 1 << 3 | _LENGTH

Parts: TypeAlias = Sequence[bytes | memoryview]  # of one frame, one behind the other
Lend: TypeAlias = Callable[[memoryview], int | None]
"""Where a payload was written in the sender's memory; None if it has to travel in its frame."""


@dataclass(frozen=True, slots=True)
class RawFrame:
    """A frame that was scanned; its checksum was not compared yet."""

    sequence: int
    header: memoryview | None
    offset: int
    payload: memoryview
    checksum: int
    size_bytes: int
    extent: tuple[int, int] | None = None  # start and size in the sender's memory, in the place of the payload
    offer: memoryview | None = None  # of the sender's memory; nothing else counts then
    is_probe: bool = False  # it only asks whether the receiver lives

    def filled(self, payload: memoryview) -> RawFrame:
        """The frame with what was copied from its extent."""
        return replace(self, payload=payload, size_bytes=self.size_bytes + len(payload), extent=None)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A complete tensor as it arrived; `wire_bytes` counts its frames."""

    sequence: int
    header: TensorHeader
    payload: memoryview  # read-only
    wire_bytes: int


def split(
    sequence: int,
    header: TensorHeader,
    payload: bytes | memoryview,
    lend: Lend = lambda _: None,
    bytes_max: Callable[[], int] = lambda: CHUNK_BYTES,
) -> Iterator[Parts]:
    """The frames of one tensor, each in parts that `message` joins, with at most CHUNK_BYTES of payload; at least one.

    When a frame is made, `lend` is asked for its payload, and if that has to travel in the frame, `bytes_max` says how
    much of it may.

    Raises ValueError if `payload` is not as long as the header says, Refused if the header breaks a rule.
    """
    content = _as_bytes(payload)
    if len(content) != payload_bytes(header):
        raise ValueError(f"the header says {payload_bytes(header)} bytes, the payload has {len(content)}")
    _check(header)
    opening: bytes = to_header(header).SerializeToString()
    if len(opening) > MAX_HEADER_BYTES:
        raise Refused(f"the tensor's header has {len(opening)} bytes, the limit is {MAX_HEADER_BYTES}")
    return _frames(sequence, opening, content, lend, bytes_max)


PROBE: Final[Parts] = [b"\x48\x01"]
"""The frame that asks whether the receiver lives; any answer to the stream says so."""


def offer(sequence: int, memory: bytes) -> Parts:
    """The frame that offers the sender's memory."""
    return [b"\x08", encode_varint(sequence), b"\x42", encode_varint(len(memory)), memory]


def message(frames: Iterable[Parts]) -> bytes:
    """One message with these frames, in order; joined once, here."""
    parts: list[bytes | memoryview] = []
    for frame in frames:
        parts += (b"\x0a", encode_varint(sum(map(len, frame))), *frame)
    return b"".join(parts)


def unpack(data: bytes) -> list[memoryview]:
    """The frames of a message; CorruptFrame if `data` is no message, or has none or more than MAX_FRAMES.

    A frame that came alone is a view into `data`. Frames that came together are copies, so that a kept tensor does not
    keep the others' memory. Unknown fields are an error here: a skipped frame would be a tensor without a receipt.
    """
    view = memoryview(data)
    frames: list[memoryview] = []
    position = 0
    while position < len(data):
        if len(frames) == MAX_FRAMES:
            raise CorruptFrame(f"a message has more than {MAX_FRAMES} frames")
        if data[position] != _FRAME_OF_MESSAGE:
            raise CorruptFrame("a message has something else than frames")
        length, start = _varint(data, position + 1)
        position = start + length
        if position > len(data):
            raise CorruptFrame(f"a message of {len(data)} bytes ends inside a frame")
        frames.append(view[start:position])
    if not frames:
        raise CorruptFrame("a message has no frame")
    return frames if len(frames) == 1 else [memoryview(bytes(frame)) for frame in frames]


def decode(data: bytes | memoryview) -> RawFrame:
    """Find the fields of a frame without copying the payload; CorruptFrame if `data` is no frame.

    Unknown fields are skipped, as protobuf does; a known field that comes twice is an error.
    """
    sequence = offset = checksum = extent_start = extent_bytes = 0
    header: memoryview | None = None
    offer: memoryview | None = None
    is_probe = False
    payload = memoryview(b"")
    view = memoryview(data)
    seen = fields = 0
    position = 0
    while position < len(data):
        fields += 1
        if fields > _MAX_FIELDS:
            raise CorruptFrame(f"a frame has more than {_MAX_FIELDS} fields")
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if number == 0 or key > 0xFFFFFFFF:
            raise CorruptFrame("a frame has a field without a number")
        start = position
        value = 0
        if kind == _VARINT:
            value, position = _varint(data, position)
        elif kind == _FIXED64:
            position += 8
        elif kind == _LENGTH:
            length, start = _varint(data, position)
            position = start + length
        elif kind == _FIXED32:
            position += 4
        else:
            raise CorruptFrame(f"a frame has a field of wire type {kind}")
        if position > len(data):
            raise CorruptFrame(f"a frame of {len(data)} bytes ends inside field {number}")
        if number not in _KIND_OF_FIELD:
            continue
        if kind != _KIND_OF_FIELD[number] or seen & 1 << number:
            raise CorruptFrame(f"field {number} of a frame comes twice or has the wrong type")
        seen |= 1 << number
        match number:
            case 1:
                sequence = value
            case 2:
                header = view[start:position]
            case 3:
                offset = value
            case 4:
                payload = view[start:position]
            case 5:
                checksum = int.from_bytes(view[start:position], "little")
            case 6:
                extent_start = value
            case 7:
                extent_bytes = value
            case 8:
                offer = view[start:position]
            case 9:
                is_probe = bool(value)
    other_bytes = len(data) - len(payload) - len(header or b"")
    if other_bytes > _MAX_OTHER_BYTES:
        raise CorruptFrame(f"a frame has {other_bytes} bytes beside its header and payload")
    if extent_bytes > CHUNK_BYTES or (extent_bytes and payload):
        raise CorruptFrame(f"a frame has {len(payload)} bytes and {extent_bytes} in memory, the limit is {CHUNK_BYTES}")
    extent = (extent_start, extent_bytes) if extent_bytes else None
    return RawFrame(sequence, header, offset, payload, checksum, len(data), extent, offer, is_probe)


class Assembler:
    """Puts the frames of one stream together again.

    `admit` sees every header first and raises a SwarmError to refuse the tensor. What it gives is called whenever a
    part of the tensor has come, but for the last. The remaining frames of a refused tensor are skipped silently, so
    each tensor is answered once.
    """

    def __init__(
        self,
        admit: Callable[[TensorHeader], Callable[[], None] | None],
        *,
        max_open: int = MAX_OPEN_TENSORS,
        max_tensor_bytes: int = MAX_TENSOR_BYTES,
    ) -> None:
        self._admit = admit
        self._max_open = max_open
        self._max_tensor_bytes = max_tensor_bytes
        self._open: dict[int, _Open] = {}
        self._refused: dict[int, None] = {}  # in order of refusal

    def add(self, frame: RawFrame) -> Tensor | None:
        """Take the next frame; gives the tensor that it completes.

        Raises CorruptFrame (checksum, gap, overlap, excess, disorder), Refused (a header that breaks a rule, too many
        open tensors) or the error of `admit`; the tensor of that sequence number is then dropped.
        """
        try:
            return self._add(frame)
        except Exception:
            self._open.pop(frame.sequence, None)
            self._refuse(frame.sequence)
            raise

    def _add(self, frame: RawFrame) -> Tensor | None:
        if frame.header is None and frame.sequence in self._refused:
            return None
        if len(frame.payload) > CHUNK_BYTES:
            raise CorruptFrame(f"a frame carries {len(frame.payload)} bytes, the limit is {CHUNK_BYTES}")
        if frame.checksum != _checksum(frame.sequence, frame.offset, frame.header or b"", frame.payload):
            raise CorruptFrame(f"checksum of tensor {frame.sequence} at byte {frame.offset} is wrong")
        tensor = self._opened(frame)
        if frame.offset != tensor.held_bytes:
            raise CorruptFrame(
                f"tensor {frame.sequence} continues at byte {frame.offset}, expected byte {tensor.held_bytes}"
            )
        missing_bytes = tensor.total_bytes - tensor.held_bytes
        if len(frame.payload) > missing_bytes:
            raise CorruptFrame(
                f"tensor {frame.sequence} has at least {len(frame.payload) - missing_bytes} bytes more than its "
                f"header's {tensor.total_bytes}"
            )
        if not frame.payload and missing_bytes:
            raise CorruptFrame(f"tensor {frame.sequence} has a frame without payload")
        tensor.chunks.append(frame.payload)
        tensor.held_bytes += len(frame.payload)
        tensor.wire_bytes += frame.size_bytes
        if len(frame.payload) < missing_bytes:
            if tensor.moved is not None:
                tensor.moved()
            return None
        self._open.pop(frame.sequence, None)
        # One chunk: a view into the message that gRPC made. More: the one copy on this side.
        payload = tensor.chunks[0] if len(tensor.chunks) == 1 else memoryview(b"".join(tensor.chunks))
        return Tensor(frame.sequence, tensor.header, payload, tensor.wire_bytes)

    def _opened(self, frame: RawFrame) -> _Open:
        """The tensor that a frame belongs to; a frame with a header opens one."""
        if frame.header is None:
            if frame.sequence not in self._open:
                raise CorruptFrame(f"a frame continues tensor {frame.sequence}, which was not opened")
            return self._open[frame.sequence]
        if frame.sequence in self._open:
            raise CorruptFrame(f"tensor {frame.sequence} was opened twice")
        header = read_header(frame.header)
        total_bytes = payload_bytes(header)
        if total_bytes > self._max_tensor_bytes:
            raise Refused(f"a tensor of {total_bytes} bytes is over the limit of {self._max_tensor_bytes}")
        if total_bytes > len(frame.payload) and len(self._open) >= self._max_open:
            raise Refused(f"{self._max_open} tensors of this stream are open, the limit; finish one first")
        opened = _Open(header, total_bytes, self._admit(header))
        if total_bytes > len(frame.payload):
            self._open[frame.sequence] = opened
        self._refused.pop(frame.sequence, None)
        return opened

    def _refuse(self, sequence: int) -> None:
        self._refused[sequence] = None
        while len(self._refused) > _MAX_REMEMBERED:
            del self._refused[next(iter(self._refused))]


def read_header(data: memoryview | bytes) -> TensorHeader:
    """A header from its bytes; CorruptFrame if they are not a header, Refused if it contradicts itself."""
    if len(data) > MAX_HEADER_BYTES:
        raise Refused(f"the tensor's header has {len(data)} bytes, the limit is {MAX_HEADER_BYTES}")
    header = from_header(parse(frame_pb2.TensorHeader, bytes(data)))
    _check(header)
    return header


def uncompressed_bytes(header: TensorHeader) -> int:
    """The size of the tensor as it is computed: in float64, or in float32 for all other types."""
    match header:
        case Boundary(shape=shape) | EvaluationBoundary(shape=shape):
            return prod(shape) * (8 if header.dtype == "float64" else 4) if shape else 0
        case Slice(elements=elements):
            return elements * (8 if header.dtype == "float64" else 4)
        case Need():
            return 0
        case _:
            assert_never(header)


def payload_bytes(header: TensorHeader) -> int:
    """How many bytes follow the header."""
    return 0 if isinstance(header, Need) else header.total_bytes


def kind_of(header: TensorHeader) -> str:
    """The kind under which a tensor is counted: "activation", "gradient" or "state"."""
    match header:
        case Boundary(direction=Direction.FORWARD) | EvaluationBoundary():
            return "activation"
        case Boundary():
            return "gradient"
        case Slice() | Need():
            return "state"
        case _:
            assert_never(header)


@dataclass(slots=True)
class _Open:
    header: TensorHeader
    total_bytes: int
    moved: Callable[[], None] | None
    chunks: list[memoryview] = field(default_factory=list)
    held_bytes: int = 0
    wire_bytes: int = 0


_KIND_OF_FIELD = dict(
    zip(
        range(1, 10),
        (_VARINT, _LENGTH, _VARINT, _LENGTH, _FIXED64, _VARINT, _VARINT, _LENGTH, _VARINT),
        strict=True,
    )
)


def _frames(
    sequence: int, opening: bytes, content: memoryview, lend: Lend, bytes_max: Callable[[], int]
) -> Iterator[Parts]:
    offset = 0
    while not offset or offset < len(content):
        payload = content[offset : offset + CHUNK_BYTES]
        start = lend(payload)
        if start is None:
            payload = payload[: max(1, bytes_max())]
        yield _frame(sequence, b"" if offset else opening, offset, payload, start)
        offset += len(payload)
        if not content:
            return


def _frame(sequence: int, header: bytes, offset: int, payload: memoryview, start: int | None) -> Parts:
    """One frame; fields that protobuf would leave out (zero, empty) are left out."""
    parts: list[bytes | memoryview] = []
    if sequence:
        parts += [b"\x08", encode_varint(sequence)]
    if header:
        parts += [b"\x12", encode_varint(len(header)), header]
    if offset:
        parts += [b"\x18", encode_varint(offset)]
    if start is not None:
        parts += [b"\x30", encode_varint(start), b"\x38", encode_varint(len(payload))]
    parts += [b"\x29", _checksum(sequence, offset, header, payload).to_bytes(8, "little")]
    if payload and start is None:
        parts += [b"\x22", encode_varint(len(payload)), payload]
    return parts


def _checksum(sequence: int, offset: int, header: bytes | memoryview, payload: memoryview) -> int:
    """The checksum of a chunk, seeded with its place: a chunk of another tensor or position has another checksum."""
    seed = (sequence + offset) & _WORD
    if not header:
        return xxhash.xxh3_64_intdigest(payload, seed)
    state = xxhash.xxh3_64(header, seed)
    state.update(payload)
    return state.intdigest()


def _check(header: TensorHeader) -> None:
    """Whether a header can be true at all; the receiver checks the bytes that dtype and codec need."""
    match header:
        case Boundary(shape=shape) | EvaluationBoundary(shape=shape):
            if len(shape) > MAX_DIMENSIONS:
                raise Refused(f"the tensor's shape has {len(shape)} dimensions, the limit is {MAX_DIMENSIONS}")
            _check_elements(prod(shape) if shape else 0, header.total_bytes)
        case Slice(elements=elements):
            _check_elements(elements, header.total_bytes)
        case Need():
            pass
        case _:
            assert_never(header)


def _check_elements(elements: int, total_bytes: int) -> None:
    if elements > 8 * MAX_TENSOR_BYTES:
        raise Refused(f"the tensor has {elements} elements, too many for one tensor")
    if (elements == 0) != (total_bytes == 0):
        raise Refused(f"a tensor of {elements} elements cannot have total_bytes = {total_bytes}")


def _as_bytes(payload: bytes | memoryview) -> memoryview:
    view = memoryview(payload)
    if view.nbytes == 0:
        return memoryview(b"")  # `cast` refuses shapes with a zero
    return view.cast("B")


def _varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """(value, position behind it) of the varint at `position`; CorruptFrame if it is cut or over 64 bits."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise CorruptFrame(f"a frame of {len(data)} bytes ends inside a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > _WORD:
                break
            return value, position
    raise CorruptFrame("a frame has a number of more than 64 bits")


def encode_varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
