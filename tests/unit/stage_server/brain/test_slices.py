"""Slices are cut so that all members cut alike, nothing is left out, and small slices stay whole."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_server.brain.slices import (
    BLOCK_ELEMENTS,
    CHUNK_ELEMENTS_MIN,
    CHUNKS_MAX,
    MEASURED_BYTES_MIN,
    RoundMeter,
    chunks_of,
    has_room,
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
    assert [len(chunks_of(member, [large, small])) for member in (large, small)] == [4, 2]
    alike = owner(0, CHUNK_ELEMENTS_MIN - 64)
    assert [len(chunks_of(member, [large, alike])) for member in (large, alike)] == [1, 1]


def test_a_member_without_a_slice_has_no_chunks() -> None:
    assert chunks_of(owner(64, 64), [owner(0, 64), owner(64, 64)]) == ()


def test_blocks_are_those_of_the_codec() -> None:
    assert BLOCK_ELEMENTS == INT8_BLOCK


@pytest.mark.parametrize(
    ("sizes_bytes", "expected"),
    [([0] * 99, 99), ([1 << 20] * 99, 16), ([5 << 20] * 99, 3), ([1 << 30] * 99, 2), ([1, *[5 << 20] * 99], 4)],
)
def test_few_large_chunks_are_under_way_at_a_time(sizes_bytes: list[int], expected: int) -> None:
    able = takewhile(lambda count: has_room(sizes_bytes[:count], sizes_bytes[count]), range(len(sizes_bytes)))
    assert len(list(able)) == expected


CHUNK = MEASURED_BYTES_MIN // 8
B, C = PeerId("b"), PeerId("c")


def metered(*at_s: float, start_s: float = 10.0) -> RoundMeter:
    """A round that began at `start_s`, with chunks that arrived so long after, the same in both directions."""
    meter = RoundMeter()
    meter.taken(B, CHUNK, start_s - 1.0)  # it had begun
    meter.begin(start_s)
    for second in at_s:
        meter.sent(B, CHUNK, start_s + second)
        meter.taken(B, CHUNK, start_s + second)
    return meter


def test_a_steady_stream_has_its_rate_in_both_directions() -> None:
    meter = metered(*range(1, 17))
    assert meter.up_bytes_per_s == meter.down_bytes_per_s == pytest.approx(CHUNK)


def test_waiting_for_others_does_not_make_a_link_slow() -> None:
    assert metered(*range(1, 9), *range(101, 109)).up_bytes_per_s == pytest.approx(CHUNK)


def test_chunks_that_come_all_at_once_do_not_make_a_link_fast() -> None:
    """A member that was frozen finds all in its buffers."""
    assert metered(*[8.0] * 16).down_bytes_per_s == pytest.approx(2 * CHUNK)
    assert metered(0.001, *[16.0] * 15).down_bytes_per_s == pytest.approx(CHUNK), "one chunk alone says little"


def test_a_small_round_tells_nothing() -> None:
    assert metered(*range(1, 8)).up_bytes_per_s == 0.0
    assert metered(*range(1, 9)).up_bytes_per_s > 0.0
    assert metered().down_bytes_per_s == 0.0
    assert metered(*[0.0] * 16).up_bytes_per_s == 0.0, "no time has passed"


def test_what_came_before_the_round_began_does_not_count() -> None:
    meter = RoundMeter()
    for _ in range(100):
        meter.taken(B, CHUNK, 9.0)
    meter.begin(10.0)
    for second in range(1, 9):
        meter.taken(B, CHUNK, 10.0 + second)
    assert meter.down_bytes_per_s == pytest.approx(CHUNK)


def test_all_have_begun_with_the_first_chunk_of_the_last_one() -> None:
    meter = RoundMeter()
    meter.taken(B, CHUNK, 9.0)
    assert meter.all_began_s is None
    meter.begin(10.0)
    assert meter.all_began_s == 10.0
    for second in range(1, 17):
        meter.taken(C, CHUNK, 20.0 + second)
    assert meter.all_began_s == 21.0
    assert meter.down_bytes_per_s <= CHUNK, "whoever waits looks slower than it is, never faster"
