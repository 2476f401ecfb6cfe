"""Tensors to bytes and back, for the way between stage servers, in the precision of a codec.

A codec names what a tensor looks like on the wire: as it is, cast to a shorter float, or as int8 or fp4 in blocks. One
table holds them; fp4 is for proposals of islands only. Slices of gradients travel as they are, or as bfloat16 or int8,
whose blocks begin with the slice.

    int8 payload of n values:  n int8 | ceil(n / 256) float32      value = int8 / 127 * scale of its block

The scale of a block is its largest magnitude, so zeros and the largest values survive exactly and every error is at
most scale / 254. A block with a value that is not finite gets such a scale too: all of it arrives as NaN, and the step
is reported as not finite instead of being clipped silently.

    fp4 payload of n values:   ceil(n / 2) bytes, low half first | ceil(n / 256) float32

fp4 is a sign and three bits of exponent (E3M0): 0, or plus or minus 2^(e - 7) times the scale of the block, e = 1 .. 7.
The nearest of these is taken, of two the one farther from zero. So a value below 2^-7 of the scale becomes 0, and every
error is at most the larger of a third of the value and 2^-7 of the scale. Values that are not finite are treated as in
int8.

A tensor is encoded and decoded where it lies or is needed, by the same operations on the CPU and on a GPU. So only its
payload crosses between them.

Decoded tensors lie in fresh memory of torch's own alignment, never in the received buffer: matrix kernels may round
differently on memory that is aligned differently, and bits must not depend on how bytes arrived.

Decisions: docs/decisions/035, 040.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from swarm.errors import CorruptFrame
from swarm.model.runtime import SentAhead, is_gpu, received, send_ahead, to_device, to_host

Payload: TypeAlias = bytes | bytearray | memoryview
Shape: TypeAlias = tuple[int, ...]

# No tensor of the protocol comes near; a header that claims more is refused before anything is allocated.
MAX_TENSOR_BYTES = 1 << 40
MAX_DIMENSIONS = 8

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
SLICE_DTYPES = {name: DTYPES[name] for name in ("float32", "float64")}  # as they are
SLICE_CODECS = ("bfloat16", "int8")  # a slice's dtype names its codec
PROPOSAL_DTYPE = "uint8"  # of what an island proposes for a unit: coded parameter by parameter

FLOAT16_ROUNDS_UP = 65520.0  # halfway from float16's largest value to the one that it lacks: this becomes infinite

INT8_BLOCK = 256
INT8_TOP = 127
# 4 MiB of float32 at a time: the passes over a tile find it in cache.
INT8_TILE = 1 << 20

FP4_BLOCK = 256
# A ratio to the scale that reaches bound e - 1 has at least exponent e: half of the way from the value before, up.
_FP4_BOUNDS = (2.0**-7, *(1.5 * 2.0**power for power in range(-6, 0)))
_FP4_VALUES = [sign * value for sign in (1, -1) for value in (0.0, *(2.0**power for power in range(-6, 1)))]
_FP4_PAIRS = torch.tensor([(_FP4_VALUES[byte & 15], _FP4_VALUES[byte >> 4]) for byte in range(256)])


@dataclass(frozen=True, slots=True)
class Codec:
    """How a float32 tensor becomes bytes, and back.

    `dtype` is what the header says, `payload_bytes` the exact length by elements. `encode` gives flat uint8, `decode`
    makes the given number of elements of it, flat float32. Both work where their tensor lies, and what they give may
    share its memory.
    """

    dtype: str
    payload_bytes: Callable[[int], int]
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, int], Tensor]


def _cast(dtype: str) -> Codec:
    return Codec(
        dtype,
        lambda elements: elements * DTYPES[dtype].itemsize,
        lambda tensor: _raw(tensor.to(DTYPES[dtype])),
        lambda payload, _elements: payload.view(DTYPES[dtype]).to(torch.float32),
    )


def _int8_bytes(elements: int) -> int:
    return elements + 4 * math.ceil(elements / INT8_BLOCK)


def _int8_encode(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)
    elements = flat.numel()
    payload = torch.empty(_int8_bytes(elements), dtype=torch.uint8, device=flat.device)
    values, scales = payload[:elements].view(torch.int8), []
    for start in range(0, elements, INT8_TILE):
        tile = flat[start : start + INT8_TILE]
        used = tile.numel()
        if used % INT8_BLOCK:  # the last block is filled up with zeros, which are not sent
            tile = nn.functional.pad(tile, (0, INT8_BLOCK - used % INT8_BLOCK))
        blocks = tile.view(-1, INT8_BLOCK)
        scale = torch.linalg.vector_norm(blocks, math.inf, dim=1, keepdim=True)  # NaN if the block has one
        # Divided by the scale first: 127 / scale would overflow for the smallest numbers. Rounds half to even.
        ratio = (blocks / torch.where(scale == 0, 1.0, scale)).mul_(INT8_TOP).round_()
        ratio.nan_to_num_(0.0)  # where the scale is not finite, which alone says so
        values[start : start + used].copy_(ratio.view(-1)[:used])
        # One NaN for all: infinity times zero is another one on each kind of processor.
        scales.append(torch.where(scale.isfinite(), scale, math.nan).view(-1))
    # The scales may begin at any byte.
    payload[elements:].copy_(torch.cat(scales).view(torch.uint8))
    return payload


def _int8_decode(payload: Tensor, elements: int) -> Tensor:
    values = payload[:elements].view(torch.int8)
    scales = payload[elements:].clone().view(torch.float32).view(-1, 1)
    # A tensor there, not a number: CUDA divides by a number as it multiplies by 1 / 127, which rounds twice.
    top = torch.full((), float(INT8_TOP), device=payload.device)
    flat = torch.empty(elements, device=payload.device)
    for start in range(0, elements, INT8_TILE):
        tile = flat[start : start + INT8_TILE]
        torch.div(values[start : start + INT8_TILE], top, out=tile)
        whole = tile.numel() - tile.numel() % INT8_BLOCK
        first = start // INT8_BLOCK
        blocks = whole // INT8_BLOCK
        tile[:whole].view(-1, INT8_BLOCK).mul_(scales[first : first + blocks])
        if whole < tile.numel():
            tile[whole:].mul_(scales[first + blocks])
    return flat


def _fp4_bytes(elements: int) -> int:
    return math.ceil(elements / 2) + 4 * math.ceil(elements / FP4_BLOCK)


def _fp4_encode(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)
    blocks = nn.functional.pad(flat, (0, -flat.numel() % FP4_BLOCK)).view(-1, FP4_BLOCK)
    scale = torch.linalg.vector_norm(blocks, math.inf, dim=1, keepdim=True)  # NaN if the block has one
    ratio = (blocks / torch.where(scale == 0, 1.0, scale)).nan_to_num_(0.0)
    size, exponents = ratio.abs(), torch.zeros_like(ratio, dtype=torch.uint8)
    for bound in _FP4_BOUNDS:
        exponents += size >= bound
    codes = (exponents + 8 * ((ratio < 0) & (exponents > 0))).to(torch.uint8).view(-1)
    codes = codes[: flat.numel() + flat.numel() % 2]
    scales = torch.where(scale.isfinite(), scale, math.nan).view(-1)
    return torch.cat([codes[0::2] | codes[1::2] << 4, scales.view(torch.uint8)])


def _fp4_decode(payload: Tensor, elements: int) -> Tensor:
    packed = payload[: math.ceil(elements / 2)]
    scales = payload[math.ceil(elements / 2) :].clone().view(torch.float32)
    values = to_device(_FP4_PAIRS, payload.device).index_select(0, packed.int()).view(-1)[:elements]
    return values.mul_(scales.repeat_interleave(FP4_BLOCK)[:elements])


CODECS: dict[str, Codec] = {
    "none": _cast("float32"),
    "bfloat16": _cast("bfloat16"),
    "float16": _cast("float16"),
    "int8": Codec("int8", _int8_bytes, _int8_encode, _int8_decode),
    "fp4": Codec("fp4", _fp4_bytes, _fp4_encode, _fp4_decode),
}


def encode(tensor: Tensor, codec: str) -> tuple[memoryview, str, Shape]:
    """Payload, dtype and shape of a float32 boundary tensor on the wire.

    The payload is read-only and may share the tensor's memory: do not write to the tensor while it is held. A value out
    of float16's range becomes infinite; the step is then reported as not finite.
    """
    (payload,) = to_host(encode_there(tensor, codec))
    return readable(payload), dtype_of(codec), tuple(tensor.shape)


def encode_there(tensor: Tensor, codec: str) -> Tensor:
    """The payload of a float32 boundary tensor as flat uint8 where the tensor lies; it may share its memory."""
    return _known(codec).encode(tensor.detach())


def overflows(tensor: Tensor, codec: str) -> Tensor | None:
    """Whether values become infinite on the wire although all of the tensor are finite, on its device; None: they never
    do."""
    if codec != "float16":
        return None
    peak: Tensor = torch.linalg.vector_norm(tensor.detach(), math.inf)  # NaN if there is one
    return (peak >= FLOAT16_ROUNDS_UP).logical_and(peak.isfinite())


def dtype_of(codec: str) -> str:
    """The name of the payload's elements in a header."""
    return _known(codec).dtype


def readable(payload: Tensor) -> memoryview:
    """The bytes of a payload on the CPU."""
    return payload.numpy().data.toreadonly()


@dataclass(frozen=True, slots=True)
class Arrived:
    """A boundary tensor as it came, for a device. `payload` is flat uint8 on the CPU, in memory of its own."""

    payload: Tensor
    shape: Shape
    codec: str
    device: torch.device

    def ahead(self) -> SentAhead:
        """The float32 tensor on its way to a GPU, which decodes it beside what it computes; else it is decoded here."""
        return send_ahead(self.payload, self.device, lambda there: decode_there(there, self.shape, self.codec))


def arrived(payload: Payload, dtype: str, shape: Sequence[int], codec: str, device: torch.device) -> Arrived:
    """The tensor that `encode` described, for a device; CorruptFrame if the parts disagree."""
    sized = _sized(payload, encoded_bytes(dtype, shape, codec), codec, shape)
    return Arrived(_landed(sized, pinned=is_gpu(device)), tuple(shape), codec, device)


def decode(payload: Payload, dtype: str, shape: Sequence[int], codec: str) -> Tensor:
    """The float32 tensor that `encode` described, on the CPU; CorruptFrame if the parts disagree."""
    return received(arrived(payload, dtype, shape, codec, torch.device("cpu")).ahead())


def decode_there(payload: Tensor, shape: Shape, codec: str) -> Tensor:
    """The float32 tensor of a payload of the right length, where that lies; it may share its memory."""
    return _known(codec).decode(payload, math.prod(shape)).view(shape)


def round_trip(tensor: Tensor, codec: str) -> Tensor:
    """The tensor as its receiver would hold it, in memory of its own where the tensor lies."""
    return decode_there(encode_there(tensor, codec).clone(), tuple(tensor.shape), codec)


def encoded_bytes(dtype: str, shape: Sequence[int], codec: str) -> int:
    """Bytes of a boundary tensor's payload, to check a header by; CorruptFrame if this codec cannot give such a one."""
    known = _known(codec)
    if dtype != known.dtype:
        raise CorruptFrame(f"codec {codec} carries {known.dtype}, the header says {dtype[:32]!r}")
    return _bounded(known.payload_bytes(_elements(shape)))


def encode_slice(tensor: Tensor, codec: str = "none") -> tuple[memoryview, str]:
    """Payload and dtype of a 1-D slice of a unit; the payload may share the tensor's memory.

    The slice is float32 or float64; a codec of SLICE_CODECS takes float32 alone.
    """
    assert tensor.dim() == 1, "slices are flat"
    assert tensor.dtype in SLICE_DTYPES.values(), "slices are float32 or float64"
    if codec != "none":
        assert tensor.dtype is torch.float32, "a sum on a grid is not rounded"
        return encode(tensor.cpu(), codec)[:2]
    return readable(_raw(tensor.detach().cpu())), str(tensor.dtype).removeprefix("torch.")


def decode_slice(payload: Payload, dtype: str, elements: int) -> Tensor:
    """The 1-D slice that `encode_slice` described, in memory of its own; CorruptFrame if the parts disagree."""
    sized = sized_slice(payload, dtype, elements)
    if dtype not in SLICE_CODECS:
        return _landed(sized).view(SLICE_DTYPES[dtype])
    return CODECS[dtype].decode(_landed(sized), elements)


def sized_slice(payload: Payload, dtype: str, elements: int) -> memoryview:
    """The payload of a slice; CorruptFrame if it has another size."""
    return _sized(payload, slice_bytes(dtype, elements), dtype, (elements,))


def slice_dtypes(codec: str) -> tuple[str, ...]:
    """The dtypes that headers of slices may name in a job with this averaging.compression."""
    return tuple(SLICE_DTYPES) if codec == "none" else (codec,)


def slice_bytes(dtype: str, elements: int) -> int:
    """Bytes of a slice's payload; CorruptFrame if there can be no such slice."""
    if dtype in SLICE_CODECS:
        return _bounded(CODECS[dtype].payload_bytes(_elements((elements,))))
    if dtype == PROPOSAL_DTYPE:
        return _bounded(_elements((elements,)))
    if dtype not in SLICE_DTYPES:
        known = ", ".join((*SLICE_DTYPES, *SLICE_CODECS))
        raise CorruptFrame(f"a slice is one of {known}, the header says {dtype[:32]!r}")
    return _bounded(_elements((elements,)) * SLICE_DTYPES[dtype].itemsize)


def _known(codec: str) -> Codec:
    if codec not in CODECS:
        raise CorruptFrame(f"unknown codec {codec[:32]!r}; known are {', '.join(CODECS)}")
    return CODECS[codec]


def _elements(shape: Sequence[int]) -> int:
    if not 1 <= len(shape) <= MAX_DIMENSIONS or any(size < 1 for size in shape):
        raise CorruptFrame(f"a tensor has 1 to {MAX_DIMENSIONS} dimensions of at least 1, got {list(shape[:16])}")
    return math.prod(shape)


def _bounded(size_bytes: int) -> int:
    if size_bytes > MAX_TENSOR_BYTES:
        raise CorruptFrame(f"a tensor of {size_bytes} bytes is over the limit of {MAX_TENSOR_BYTES}")
    return size_bytes


def _sized(payload: Payload, expected: int, what: str, shape: Sequence[int]) -> memoryview:
    view = memoryview(payload).cast("B")
    if view.nbytes != expected:
        raise CorruptFrame(f"{what} of shape {list(shape)} has {expected} bytes, the payload has {view.nbytes}")
    return view


def _raw(tensor: Tensor) -> Tensor:
    """The tensor's bytes as flat uint8, without a copy where they lie in order."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _landed(payload: memoryview, *, pinned: bool = False) -> Tensor:
    """A copy as flat uint8; from pinned memory a GPU fetches it in the background."""
    try:
        landed = torch.empty(payload.nbytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError:
        if not pinned:
            raise
        landed = torch.empty(payload.nbytes, dtype=torch.uint8)  # no more may be pinned: the copy takes longer
    landed.numpy()[:] = np.frombuffer(payload, dtype=np.uint8)
    return landed
