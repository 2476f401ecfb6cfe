"""How the state of a stage is cut, so that a joiner can fetch it from several donors and update each part.

      tensors    |      a      | b |        c         |      in the stage's order, flat
      chunks     |   0   |   1   |   2   |   3   | 4  |      fixed size; with `whole_tensors` cut at tensors only

A chunk is a range of parameters together with their optimizer state (and the older weights, if two versions are kept),
because a commit changes these together and element by element. Per-tensor state of the optimizer (a counter of updates)
travels with each chunk that has a part of the tensor. Optimizers that look at a whole tensor (LAMB) need
`whole_tensors`. Cutting the same tensors by the same sizes gives the same chunks, so an index names a chunk.

Donors cut at tensors only: a vector loop treats the end of an array otherwise than its middle, and bits must not depend
on where a chunk ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSize:
    name: str
    elements: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a parameter, flat."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """`size_bytes` is the size of its snapshot, `record_bytes` its share of one averaged gradient."""

    index: int
    pieces: tuple[Piece, ...]
    size_bytes: int
    record_bytes: int


def cut(
    tensors: Sequence[TensorSize],
    *,
    chunk_bytes: int,
    element_bytes: int,
    gradient_bytes: int,
    whole_tensors: bool = False,
) -> tuple[Chunk, ...]:
    """Chunks of at most `chunk_bytes` (one element or, with `whole_tensors`, one tensor may be more), in order.

    `element_bytes` is the size of an element in a snapshot, `gradient_bytes` that in a record of the log.
    """
    assert min(chunk_bytes, element_bytes, gradient_bytes) >= 1
    assert len({tensor.name for tensor in tensors}) == len(tensors), "a tensor is listed once"
    room = max(1, chunk_bytes // element_bytes)
    groups: list[list[Piece]] = []
    filled = room
    for tensor in tensors:
        start = 0
        while start < tensor.elements:
            left = room - filled
            if left <= 0 or (whole_tensors and tensor.elements > left):
                groups.append([])
                filled, left = 0, room
            stop = tensor.elements if whole_tensors else min(tensor.elements, start + left)
            groups[-1].append(Piece(tensor.name, start, stop))
            filled += stop - start
            start = stop
    return tuple(
        Chunk(index, tuple(pieces), elements * element_bytes, elements * gradient_bytes)
        for index, pieces in enumerate(groups)
        for elements in (sum(piece.stop - piece.start for piece in pieces),)
    )
