"""stage_server.brain.chunks: every element of the stage is in exactly one chunk."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_server.brain.chunks import Chunk, Piece, TensorSize, cut


def elements_of(chunks: Sequence[Chunk]) -> list[tuple[str, int]]:
    return [(piece.tensor, at) for chunk in chunks for piece in chunk.pieces for at in range(piece.start, piece.stop)]


sizes = st.lists(st.integers(0, 40), max_size=8).map(
    lambda counts: [TensorSize(f"t{number}", count) for number, count in enumerate(counts)]
)


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(1, 200), st.integers(1, 16), st.booleans())
def test_each_element_is_in_one_chunk_in_order_and_chunks_are_small(
    tensors: list[TensorSize], chunk_bytes: int, element_bytes: int, whole_tensors: bool
) -> None:
    chunks = cut(
        tensors,
        chunk_bytes=chunk_bytes,
        element_bytes=element_bytes,
        gradient_bytes=4,
        whole_tensors=whole_tensors,
    )
    assert elements_of(chunks) == [(tensor.name, at) for tensor in tensors for at in range(tensor.elements)]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        count = len(elements_of([chunk]))
        assert count >= 1
        assert (chunk.size_bytes, chunk.record_bytes) == (count * element_bytes, count * 4)
        if whole_tensors:
            assert all((piece.start, piece.stop) == (0, dict(_sizes(tensors))[piece.tensor]) for piece in chunk.pieces)
            assert len(chunk.pieces) == 1 or chunk.size_bytes <= chunk_bytes
        else:
            assert chunk.size_bytes <= max(chunk_bytes, element_bytes)


def _sizes(tensors: Sequence[TensorSize]) -> list[tuple[str, int]]:
    return [(tensor.name, tensor.elements) for tensor in tensors]


def test_small_tensors_share_a_chunk_and_large_ones_are_cut() -> None:
    tensors = [TensorSize("norm", 2), TensorSize("bias", 1), TensorSize("weight", 8)]
    pieces = [chunk.pieces for chunk in cut(tensors, chunk_bytes=64, element_bytes=16, gradient_bytes=8)]
    assert pieces == [
        (Piece("norm", 0, 2), Piece("bias", 0, 1), Piece("weight", 0, 1)),
        (Piece("weight", 1, 5),),
        (Piece("weight", 5, 8),),
    ]


def test_a_tensor_listed_twice_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="listed once"):
        cut([TensorSize("a", 1)] * 2, chunk_bytes=1, element_bytes=1, gradient_bytes=1)
