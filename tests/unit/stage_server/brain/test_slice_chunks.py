"""Slices are cut so that all members cut alike, nothing is left out, and small slices stay whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_server.brain.slice_chunks import (
    BLOCK_ELEMENTS,
    CHUNK_ELEMENTS_MIN,
    CHUNKS_MAX,
    UNDER_WAY_BYTES,
    chunks_of,
    under_way_max,
)
from swarm.model.codec import INT8_BLOCK
from swarm.types import PeerId
from swarm.wire.messages import Member


def owner(start: int, stop: int) -> Member:
    return Member(PeerId("a"), 1, "at a", start, stop, "")


def cut(start: int, stop: int) -> int:
    """How many chunks the slice has, if all own as much."""
    return len(chunks_of(owner(start, stop), [owner(start, stop)] * 3))


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 34), st.integers(0, 1 << 34))
def test_chunks_cover_the_slice_once_in_order_and_begin_with_blocks(start: int, elements: int, smallest: int) -> None:
    chunks = chunks_of(owner(start, start + elements), [owner(0, smallest), owner(start, start + elements)])
    assert [chunk.start for chunk in chunks] == [start, *[chunk.stop for chunk in chunks[:-1]]]
    assert chunks[-1].stop == start + elements
    assert all(0 < chunk.elements <= chunks[0].elements for chunk in chunks)
    assert all((chunk.start - start) % BLOCK_ELEMENTS == 0 for chunk in chunks)
    assert len(chunks) <= CHUNKS_MAX


@pytest.mark.parametrize("chunks", [1, 2, 7, CHUNKS_MAX])
def test_a_slice_has_as_many_chunks_as_messages_would_carry_anyway(chunks: int) -> None:
    assert cut(64, 64 + chunks * CHUNK_ELEMENTS_MIN) == chunks
    assert cut(64, 63 + chunks * CHUNK_ELEMENTS_MIN) == max(1, chunks - 1)


def test_unequal_slices_have_finer_chunks() -> None:
    large, small = owner(0, CHUNK_ELEMENTS_MIN), owner(0, CHUNK_ELEMENTS_MIN // 2)
    assert [len(chunks_of(one, [large, small])) for one in (large, small)] == [4, 2]
    alike = owner(0, CHUNK_ELEMENTS_MIN - 64)
    assert [len(chunks_of(one, [large, alike])) for one in (large, alike)] == [1, 1]


def test_a_member_without_a_slice_has_no_chunks() -> None:
    assert chunks_of(owner(64, 64), [owner(0, 64), owner(64, 64)]) == ()


def test_blocks_are_those_of_the_codec() -> None:
    assert BLOCK_ELEMENTS == INT8_BLOCK


@pytest.mark.parametrize(("chunk_bytes", "expected"), [(0, UNDER_WAY_BYTES), (1 << 20, 16), (5 << 20, 3), (1 << 30, 2)])
def test_few_large_chunks_are_under_way_at_a_time(chunk_bytes: int, expected: int) -> None:
    assert under_way_max(chunk_bytes) == expected
