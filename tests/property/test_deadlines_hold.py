"""Deadlines whatever the times: within bounds, deaf to a minority, and no hop told too early, twice or never."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.brain.routing.stragglers import Deadlines, WatchedHop, deadline_s
from scheduler.brain.settings import DeadlineSettings
from swarm.types import Direction, PeerId

times = st.floats(min_value=0.0, max_value=1e6)
WIDE = DeadlineSettings(min_s=1e-9, max_s=1e12)


@settings(max_examples=100, deadline=None)
@given(st.lists(times, max_size=64), st.floats(1.0, 50.0), st.floats(0.05, 600.0), st.floats(1.0, 6.0))
def test_a_deadline_is_within_its_bounds_and_above_half_of_the_times(
    samples: list[float], k: float, min_s: float, factor: float
) -> None:
    bounds = DeadlineSettings(k, min_s, min_s * factor)
    limit_s = deadline_s(samples, bounds)
    assert bounds.min_s <= limit_s <= bounds.max_s
    if limit_s < bounds.max_s:
        assert sum(sample <= limit_s for sample in samples) * 2 >= len(samples)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 100.0), min_size=8, max_size=64), st.floats(0.1, 100.0))
def test_times_in_another_unit_give_the_deadline_in_that_unit(samples: list[float], factor: float) -> None:
    scaled = deadline_s([sample * factor for sample in samples], WIDE)
    assert scaled == pytest.approx(factor * deadline_s(samples, WIDE))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1.0, 2.0), min_size=9, max_size=33), st.lists(st.floats(0.0, 1e6), max_size=31))
def test_a_minority_however_slow_cannot_carry_the_deadline_away(honest: list[float], rest: list[float]) -> None:
    rest = rest[: (len(honest) - 1) // 2]
    assert deadline_s(honest + rest, WIDE) <= 2.0 + 6.0 * 1.4826 * 1.0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_every_hop_is_done_expired_forgotten_or_watched(seed: int) -> None:
    rng = Random(seed)
    deadlines = Deadlines(DeadlineSettings(k=2.0, min_s=0.5, max_s=20.0))
    now_s = 0.0
    began: dict[WatchedHop, float] = {}
    told: set[WatchedHop] = set()
    for number in range(200):
        now_s += rng.expovariate(2.0)
        roll = rng.random()
        if roll < 0.5:
            direction = rng.choice(list(Direction))
            hop = WatchedHop(number // 40, rng.randrange(2), number, direction, PeerId(rng.choice("abc")))
            began[hop] = now_s
            deadlines.began(hop, now_s)
        elif roll < 0.85 and (known := [*began, *told]):
            hop = rng.choice(known)
            deadlines.done(hop, now_s)
            began.pop(hop, None)
        elif roll < 0.87:
            peer = PeerId(rng.choice("abc"))
            deadlines.forget_peer(peer)
            began = {hop: at_s for hop, at_s in began.items() if hop.peer != peer}
        else:
            due_s = deadlines.due_s()
            limits = {(hop.stage, hop.direction): deadlines.of(hop.stage, hop.direction) for hop in began}
            late = deadlines.expired(now_s)
            assert bool(late) == (due_s is not None and due_s <= now_s)
            expected = {hop for hop, at_s in began.items() if now_s - at_s >= limits[(hop.stage, hop.direction)]}
            assert {replica.hop for replica in late} == expected
            for timer in late:
                assert timer.waited_s >= timer.deadline_s >= 0.5
                told.add(timer.hop)
                del began[timer.hop]
        assert deadlines.watched() == sorted(began)
