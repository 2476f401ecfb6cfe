"""What a member says of its links is a lower bound, whatever comes early, late or all at once."""

from __future__ import annotations

import pytest

from stage_server.brain.round_meter import MEASURED_BYTES_MIN, RoundMeter
from swarm.types import PeerId

CHUNK = MEASURED_BYTES_MIN // 8
B, C = PeerId("b"), PeerId("c")


def metered(*at_s: float, start_s: float = 10.0) -> RoundMeter:
    """A round that began at `start_s`, with chunks that arrived so long after, the same in both directions."""
    meter = RoundMeter()
    meter.taken(B, CHUNK, start_s - 1.0)  # it had begun
    meter.begin(start_s)
    for second in at_s:
        meter.sent(CHUNK, start_s + second)
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
