"""Links get the most precise codec that keeps pace with computing; their speed is measured, and they do not flap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_server.brain.link_codecs import (
    FIRST,
    FRESH_S,
    LEAST_BYTES,
    PRECISE_FIRST,
    RATE_MAX,
    REMEMBERED,
    SHARE_MAX,
    Change,
    LinkCodecs,
    allowed,
    choose,
    seconds_of,
)
from swarm.limits import LINKS_TOLD_MAX
from swarm.model import codec
from swarm.types import Direction, PeerId
from swarm.wire.messages import LinkSpeed

ELEMENTS = 1 << 18  # 1 MiB of float32
A, B = PeerId("a"), PeerId("b")
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
CODEC = st.sampled_from(PRECISE_FIRST)
BYTES_PER_S = st.floats(1e3, 1e11)
COMPUTE_S = st.floats(1e-4, 100)


@pytest.mark.parametrize(
    ("megabytes_per_s", "compute_s", "chosen"),
    [
        (1000, 0.1, "none"),  # loopback or 10 GbE: 1 ms beside 100
        (12.5, 1.0, "none"),  # 100 Mbit/s, but computing takes so long that 84 ms do not matter
        (12.5, 0.1, "bfloat16"),  # 84 ms are too many, 42 are not
        (12.5, 0.05, "int8"),
        (1.25, 0.1, "int8"),  # 10 Mbit/s: nothing keeps pace, int8 is the quickest
    ],
)
def test_the_most_precise_codec_that_keeps_pace_is_chosen_and_the_quickest_if_none_does(
    megabytes_per_s: float, compute_s: float, chosen: str
) -> None:
    assert choose(FIRST, ELEMENTS, megabytes_per_s * 1e6, compute_s) == chosen


def test_a_tensor_that_costs_a_round_trip_in_any_codec_travels_as_it_is() -> None:
    assert choose("int8", LEAST_BYTES // 4 - 1, 1e3, 0.001) == "none"


@given(CODEC, BYTES_PER_S, COMPUTE_S)
def test_a_choice_stands_while_nothing_changes(current: str, bytes_per_s: float, compute_s: float) -> None:
    chosen = choose(current, ELEMENTS, bytes_per_s, compute_s)
    for _ in range(len(PRECISE_FIRST)):  # each step goes one way: it may take some
        chosen = choose(chosen, ELEMENTS, bytes_per_s, compute_s)
    assert choose(chosen, ELEMENTS, bytes_per_s, compute_s) == chosen


@given(BYTES_PER_S, COMPUTE_S, st.lists(st.floats(0.85, 1.15), min_size=2, max_size=20))
def test_a_link_whose_speed_wavers_by_a_sixth_does_not_flap(
    bytes_per_s: float, compute_s: float, wavers: list[float]
) -> None:
    used, changes = FIRST, 0
    for waver in [*wavers, *wavers]:
        before, used = used, choose(used, ELEMENTS, bytes_per_s * waver, compute_s)
        changes += before != used
    assert changes <= 2, "to its codec, and at most once across one border"


@given(CODEC, BYTES_PER_S, COMPUTE_S)
def test_where_a_more_precise_codec_keeps_pace_with_room_it_is_used(
    current: str, bytes_per_s: float, compute_s: float
) -> None:
    chosen = choose(current, ELEMENTS, bytes_per_s, compute_s)
    for codec_name in PRECISE_FIRST[: PRECISE_FIRST.index(chosen)]:
        assert seconds_of(codec_name, ELEMENTS, bytes_per_s) > 0.3 * compute_s
    if chosen != current and PRECISE_FIRST.index(chosen) > PRECISE_FIRST.index(current):
        assert seconds_of(current, ELEMENTS, bytes_per_s) > SHARE_MAX * compute_s


def test_the_bytes_that_are_reckoned_with_are_those_of_the_codecs() -> None:
    for name in PRECISE_FIRST:
        wire_s = seconds_of(name, ELEMENTS, 1.0) - seconds_of(name, ELEMENTS, float("inf"))
        assert wire_s == pytest.approx(codec.CODECS[name].payload_bytes(ELEMENTS), rel=1e-3)


def links_of(setting: str, compute_s: float, *, bfloat16_is_exact: bool = False) -> LinkCodecs:
    links = LinkCodecs(setting, bfloat16_is_exact=bfloat16_is_exact)
    links.computed(FORWARD, compute_s)
    return links


def test_a_fixed_setting_is_what_every_link_uses() -> None:
    links = links_of("float16", 0.1)
    links.delivered(A, links.start(A, 0.0), 1 << 20, 1000.0)
    assert links.codec_to(A, FORWARD, ELEMENTS) == ("float16", None)
    assert allowed("float16") == ("float16",)
    assert allowed("auto") == PRECISE_FIRST


def test_each_link_is_measured_and_told_apart_and_a_change_is_told_once() -> None:
    links = links_of("auto", 0.1)
    assert links.codec_to(A, FORWARD, ELEMENTS) == (FIRST, None)  # not measured yet
    links.delivered(A, links.start(A, 0.0), 2 * ELEMENTS, 0.001)
    links.delivered(B, links.start(B, 0.0), 2 * ELEMENTS, 1.0)
    assert links.codec_to(A, BACKWARD, ELEMENTS) == (FIRST, None)  # nothing was computed in that direction
    assert links.codec_to(A, FORWARD, ELEMENTS) == ("none", Change(A, FIRST, "none", 2 * ELEMENTS / 0.001))
    assert links.codec_to(B, FORWARD, ELEMENTS) == ("int8", Change(B, FIRST, "int8", 2.0 * ELEMENTS))
    assert links.codec_to(A, FORWARD, ELEMENTS) == ("none", None)
    assert links.codec_to(None, FORWARD, ELEMENTS) == (FIRST, None)


@pytest.mark.parametrize(("seconds", "codec"), [(0.001, "bfloat16"), (1.0, "int8")])
def test_values_that_are_bfloat16_never_travel_as_float32(seconds: float, codec: str) -> None:
    links = links_of("auto", 0.1, bfloat16_is_exact=True)
    links.delivered(A, links.start(A, 0.0), 2 * ELEMENTS, seconds)
    assert links.codec_to(A, FORWARD, ELEMENTS)[0] == codec
    assert links.codec_to(A, FORWARD, LEAST_BYTES // 4 - 1)[0] == "bfloat16"


def test_tensors_that_share_a_link_do_not_make_it_look_slow() -> None:
    """Four tensors of 1 MB at once on a link of 4 MB/s each take a second."""
    links = links_of("auto", 0.01)
    starts = [links.start(A, 0.0) for _ in range(4)]
    for start in starts:
        links.delivered(A, start, 1_000_000, 1.0)
    assert links.codec_to(A, FORWARD, ELEMENTS)[1] == Change(A, FIRST, "int8", 4_000_000.0)


def test_a_link_that_became_slow_is_noticed_once_its_good_days_are_over() -> None:
    links = links_of("auto", 0.1)
    links.delivered(A, links.start(A, 0.0), 1_000_000, 0.001)
    for second in range(REMEMBERED):
        assert links.codec_to(A, FORWARD, ELEMENTS)[0] == "none"
        links.delivered(A, links.start(A, float(second)), 1_000_000, second + 1.0)
    assert links.codec_to(A, FORWARD, ELEMENTS)[0] == "int8"


def test_one_slow_computation_changes_nothing() -> None:
    links = links_of("auto", 0.05)
    links.delivered(A, links.start(A, 0.0), 12_500_000, 1.0)
    assert links.codec_to(A, FORWARD, ELEMENTS)[0] == "int8"
    for seconds in (0.05, 9.0):
        links.computed(FORWARD, seconds)
        assert links.codec_to(A, FORWARD, ELEMENTS) == ("int8", None)


def test_a_link_is_told_of_with_its_best_rate_and_its_shortest_receipt() -> None:
    links = LinkCodecs("none")
    assert links.speeds() == ()
    links.delivered(A, links.start(A, 0.0), 8_000_000, 2.0)
    links.delivered(A, links.start(A, 3.0), 1_000, 3.5)
    links.delivered(B, links.start(B, 3.0), 1_000_000, 4.0)
    assert links.speeds() == (LinkSpeed(B, 1_000_000.0, 1.0), LinkSpeed(A, 4_000_000.0, 0.5))


def test_links_that_are_no_longer_used_and_clocks_that_stand_still_tell_nothing() -> None:
    links = LinkCodecs("none")
    links.delivered(A, links.start(A, 0.0), 1_000, 1.0)
    links.delivered(B, links.start(B, 1.0), 1_000, 1.0)
    assert [speed.to for speed in links.speeds()] == [A]
    links.delivered(B, links.start(B, FRESH_S), 1 << 40, FRESH_S + 1e-9)
    assert [speed.to for speed in links.speeds()] == [B, A]
    links.delivered(B, links.start(B, FRESH_S), 1_000, FRESH_S + 1.0)
    assert links.speeds() == (LinkSpeed(B, RATE_MAX, links.speeds()[0].receipt_s),)


def test_of_many_links_the_newest_are_told() -> None:
    links = LinkCodecs("none")
    for second in range(LINKS_TOLD_MAX + 5):
        to = PeerId(f"peer-{second}")
        links.delivered(to, links.start(to, second / 10), 1_000, (second + 1) / 10)
    assert len(links.speeds()) == LINKS_TOLD_MAX
    assert links.speeds()[0].to == f"peer-{LINKS_TOLD_MAX + 4}"
