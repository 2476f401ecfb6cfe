"""Tensors to bytes and back: what travels between stage servers, and in which precision.

A codec names what a boundary tensor looks like on the wire: as it is, or cast to a shorter float. One table holds
them, with room for codecs whose payload is more than one cast (blockwise int8). Slices of gradients always travel as
they are.

Whatever is decoded lies in fresh memory of torch's own alignment, never in the received buffer: matrix kernels may
round differently on memory that is aligned differently, and bits must not depend on how bytes arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from swarm.errors import CorruptFrame

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
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Codec:
    """How a float32 tensor becomes bytes of `dtype`, and back; both functions return contiguous tensors."""

    dtype: str
    shrink: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor], Tensor]


def _cast(dtype: str) -> Codec:
    return Codec(dtype, lambda tensor: tensor.to(DTYPES[dtype]), lambda tensor: tensor.to(torch.float32))


CODECS: dict[str, Codec] = {
    "none": _cast("float32"),
    "bfloat16": _cast("bfloat16"),
    "float16": _cast("float16"),
}


def encode(tensor: Tensor, codec: str) -> tuple[memoryview, str, Shape]:
    """Payload, dtype and shape of a float32 boundary tensor on the wire.

    The payload is read-only and may share the tensor's memory: do not write to the tensor while it is held. A value out
    of float16's range becomes infinite; the step is then reported as not finite.
    """
    small = _known(codec).shrink(tensor.detach())
    return _bytes_of(small), _NAMES[small.dtype], tuple(small.shape)


def decode(payload: Payload, dtype: str, shape: Sequence[int], codec: str) -> Tensor:
    """The float32 tensor that `encode` described, in memory of its own; CorruptFrame if the parts disagree."""
    known = _known(codec)
    if dtype != known.dtype:
        raise CorruptFrame(f"codec {codec} carries {known.dtype}, the header says {dtype}")
    return known.restore(_tensor_of(payload, dtype, shape))


def round_trip(tensor: Tensor, codec: str) -> Tensor:
    """What the receiver of `tensor` would hold."""
    return decode(*encode(tensor, codec), codec)


def encode_slice(tensor: Tensor) -> tuple[memoryview, str]:
    """Payload and dtype of a 1-D float32 or float64 slice of a unit; the payload may share the tensor's memory."""
    assert tensor.dim() == 1, "slices are flat"
    assert tensor.dtype in (torch.float32, torch.float64), "slices are float32 or float64"
    return _bytes_of(tensor.detach()), _NAMES[tensor.dtype]


def decode_slice(payload: Payload, dtype: str, elements: int) -> Tensor:
    """The 1-D slice that `encode_slice` described, in memory of its own; CorruptFrame if the parts disagree."""
    if dtype not in ("float32", "float64"):
        raise CorruptFrame(f"a slice is float32 or float64, the header says {dtype}")
    return _tensor_of(payload, dtype, (elements,))


def encoded_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes that a payload of this dtype and shape has; CorruptFrame if there can be no such payload.

    For checking a header before anything is allocated.
    """
    if dtype not in DTYPES:
        raise CorruptFrame(f"unknown dtype {dtype[:32]!r}; known are {', '.join(DTYPES)}")
    if not 1 <= len(shape) <= MAX_DIMENSIONS or any(size < 1 for size in shape):
        raise CorruptFrame(f"a tensor has 1 to {MAX_DIMENSIONS} dimensions of at least 1, got {list(shape[:16])}")
    total = math.prod(shape) * DTYPES[dtype].itemsize
    if total > MAX_TENSOR_BYTES:
        raise CorruptFrame(f"a tensor of {total} bytes is over the limit of {MAX_TENSOR_BYTES}")
    return total


def _known(codec: str) -> Codec:
    if codec not in CODECS:
        raise CorruptFrame(f"unknown codec {codec[:32]!r}; known are {', '.join(CODECS)}")
    return CODECS[codec]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().cpu().view(-1)
    return flat.view(torch.uint8).numpy().data.toreadonly()


def _tensor_of(payload: Payload, dtype: str, shape: Sequence[int]) -> Tensor:
    expected = encoded_bytes(dtype, shape)
    view = memoryview(payload)
    if view.nbytes != expected:
        raise CorruptFrame(f"{dtype} of shape {list(shape)} has {expected} bytes, the payload has {view.nbytes}")
    tensor = torch.empty(tuple(shape), dtype=DTYPES[dtype])
    tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(view, dtype=np.uint8)
    return tensor
