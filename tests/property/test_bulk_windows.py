"""Windows of bulk on modelled lines: the queue stays short, the line is full, and flows live together."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import CorruptFrame
from swarm.rpc.channel import KEEPALIVE_TIMEOUT_MS
from swarm.rpc.window import PATIENCE_S_MIN, START_BYTES, WINDOW_BYTES_MAX, Window

MBIT = 125_000.0


@dataclass
class Line:
    """One line with a deep buffer that all flows share; acknowledgements come back at once, after the delay."""

    rate_bytes_per_s: float
    delay_s: float  # one way
    free_s: float = 0.0
    queue_s: list[tuple[float, float]] = field(default_factory=list)  # when something entered, and how long it waits

    def carry(self, count_bytes: int, now_s: float) -> float:
        """When the acknowledgement is back."""
        self.queue_s.append((now_s, max(0.0, self.free_s - now_s)))
        self.free_s = max(self.free_s, now_s) + count_bytes / self.rate_bytes_per_s
        return self.free_s + 2 * self.delay_s

    def longest_s(self, since_s: float = 0.0) -> float:
        return max(queue_s for when_s, queue_s in self.queue_s if when_s >= since_s)


def carried(line: Line, starts_s: list[float], for_s: float, since_s: float) -> list[int]:
    """Bytes of each flow that were acknowledged from `since_s` to `for_s`; flow i begins at starts_s[i]."""
    windows = [Window(start_s) for start_s in starts_s]
    got = [0] * len(windows)
    due = [(start_s, flow, 0) for flow, start_s in enumerate(starts_s)]
    heapq.heapify(due)
    while due and due[0][0] < for_s:
        now_s, flow, count_bytes = heapq.heappop(due)
        window = windows[flow]
        if count_bytes:
            window.acknowledged(count_bytes, now_s)
            got[flow] += count_bytes * (now_s >= since_s)
        while window.room_bytes >= window.piece_bytes or not window.unacknowledged_bytes:
            piece_bytes = window.piece_bytes
            window.sent(piece_bytes, now_s)
            heapq.heappush(due, (line.carry(piece_bytes, now_s), flow, piece_bytes))
    return got


@given(st.floats(1.0, 20.0), st.floats(0.005, 0.2))
@settings(max_examples=25, deadline=None)
def test_the_queue_takes_less_than_a_second_from_one_megabit_on(megabits: float, delay_s: float) -> None:
    line = Line(megabits * MBIT, delay_s)
    carried(line, [0.0], 400.0, 0.0)
    assert line.longest_s() < 1.0


@pytest.mark.parametrize(("megabits", "delay_s"), [(1, 0.2), (2.5, 0.1), (10, 0.04), (100, 0.1), (1000, 0.0005)])
def test_a_line_is_nine_tenths_full(megabits: float, delay_s: float) -> None:
    line = Line(megabits * MBIT, delay_s)
    (got,) = carried(line, [0.0], 32.0, 2.0)
    assert got >= 0.9 * 30 * line.rate_bytes_per_s


@given(st.lists(st.floats(0.0, 20.0), min_size=2, max_size=4), st.sampled_from([2.5, 10.0, 100.0]))
@settings(max_examples=15, deadline=None)
def test_flows_on_one_line_each_get_a_part_of_it(starts_s: list[float], megabits: float) -> None:
    line = Line(megabits * MBIT, 0.05)
    got = carried(line, starts_s, 140.0, 80.0)
    assert sum(got) >= 0.85 * 60 * line.rate_bytes_per_s
    assert min(got) >= 0.02 * sum(got) / len(got)
    assert line.longest_s(80.0) < 0.6 * len(got)


def test_eight_flows_that_begin_together_leave_room_for_the_pings_of_a_session() -> None:
    """Each began with what one megabit carries in half a second, so the eight took four; pings may take two."""
    line = Line(1.0 * MBIT, 0.1)
    carried(line, [0.0] * 8, 60.0, 0.0)
    assert line.longest_s() < 0.001 * KEEPALIVE_TIMEOUT_MS


def test_a_window_never_passes_its_bounds_and_starts_small() -> None:
    window = Window(0.0)
    assert window.size_bytes == START_BYTES
    for moment in range(2000):
        while window.room_bytes:
            window.sent(min(window.piece_bytes, window.room_bytes), moment / 1000)
        assert window.unacknowledged_bytes <= window.size_bytes <= WINDOW_BYTES_MAX
        window.acknowledged(window.unacknowledged_bytes, moment / 1000)
    assert window.size_bytes == WINDOW_BYTES_MAX


def test_who_is_silent_on_a_fast_line_is_dead_after_the_least_patience() -> None:
    window = Window(0.0)
    window.sent(1000, 0.0)
    window.acknowledged(1000, 0.001)
    assert not window.dead(1000.0), "nothing is on its way"
    window.sent(1000, 1000.0)
    assert not window.dead(1000.0 + PATIENCE_S_MIN)
    assert window.dead(1000.1 + PATIENCE_S_MIN)


def test_progress_is_life_however_slow() -> None:
    window = Window(0.0)
    window.sent(60_000, 0.0)
    for second in range(1, 60):
        window.acknowledged(1000, float(second))
        assert not window.dead(second + 0.99)


def test_an_acknowledgement_of_what_was_not_sent_is_refused() -> None:
    window = Window(0.0)
    window.sent(1000, 0.0)
    with pytest.raises(CorruptFrame, match="1001 bytes are acknowledged, 1000 are on their way"):
        window.acknowledged(1001, 0.1)
    with pytest.raises(CorruptFrame, match="-1 bytes"):
        window.acknowledged(-1, 0.1)


def test_a_window_stays_as_large_for_the_next_transfer_and_not_after_a_break() -> None:
    window = Window(0.0)
    for moment in range(200):
        while window.room_bytes:
            window.sent(min(window.piece_bytes, window.room_bytes), moment / 1000)
        window.acknowledged(window.unacknowledged_bytes, moment / 1000)
    grown_bytes = window.size_bytes
    window.restart(1.0, has_ended=True)
    assert window.size_bytes == grown_bytes > START_BYTES
    window.sent(1000, 1.0)
    window.restart(2.0)
    assert (window.size_bytes, window.unacknowledged_bytes) == (START_BYTES, 0)
