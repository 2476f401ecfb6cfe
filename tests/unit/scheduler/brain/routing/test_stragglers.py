"""scheduler.brain.routing.stragglers: whose turn it is, and that only turns are watched."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from scheduler.brain.routing.stragglers import (
    MISSES_PER_DOUBLING,
    SAMPLES_MIN,
    Deadlines,
    Stragglers,
    WatchedHop,
    deadline_s,
)
from scheduler.brain.settings import DeadlineSettings
from swarm.types import Direction, PeerId
from tests.support.situations import Calls, Situation, beside

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
DEADLINES_SETTINGS = DeadlineSettings()
A, B, C, D = (PeerId(name) for name in "abcd")  # a and b serve stage 0, c stage 1


def hop(index: int, *, step: int = 0, stage: int = 0, direction: Direction = FORWARD, peer: PeerId = A) -> WatchedHop:
    return WatchedHop(step, stage, index, direction, peer)


def measured(seconds: float, count: int = 16) -> Deadlines:
    """A stage 0 whose forwards took so long."""
    deadlines = Deadlines(DEADLINES_SETTINGS)
    for index in range(count):
        deadlines.began(hop(index, step=-1), 0.0)
        deadlines.done(hop(index, step=-1), seconds)
    return deadlines


def test_the_deadline_is_median_plus_k_deviations() -> None:
    assert deadline_s([9.0, 10.0, 11.0, 12.0] * 4, DEADLINES_SETTINGS) == pytest.approx(10.5 + 6 * 1.4826 * 1.0)
    assert deadline_s([10.0] * 8, DEADLINES_SETTINGS) == pytest.approx(13.0)  # even times: 5 % of the median for each k
    assert deadline_s([0.001] * 8, DEADLINES_SETTINGS) == 1.0
    assert deadline_s([1000.0] * 8, DEADLINES_SETTINGS) == 120.0


@pytest.mark.parametrize("slowest_s", [0.05, 0.1, 0.10102, 0.10103, 0.102, 0.5])
def test_a_deadline_that_no_sample_can_raise_is_the_same_without_sorting_them(slowest_s: float) -> None:
    for samples in ([slowest_s] * 8, [slowest_s / 3, slowest_s] * 8, [0.0] * 7 + [slowest_s]):
        middle = median(samples)
        spread = median([abs(sample - middle) for sample in samples])
        full_s = middle + DEADLINES_SETTINGS.k * max(1.4826 * spread, 0.05 * middle)
        assert deadline_s(samples, DEADLINES_SETTINGS) == max(DEADLINES_SETTINGS.min_s, full_s)


def test_a_deadline_is_computed_anew_when_an_eighth_of_its_samples_is_new() -> None:
    """It was after each completion: an eighth of what the brain did for a hop, with 1,000 peers."""
    deadlines, samples = Deadlines(DEADLINES_SETTINGS), [9.0, 11.0] * 8
    for index, seconds in enumerate(samples):
        deadlines.began(hop(index), 0.0)
        deadlines.done(hop(index), seconds)
    assert deadlines.of(0, FORWARD) == deadline_s(samples, DEADLINES_SETTINGS)
    for index, news in enumerate([[], [], [12.0, 13.0, 14.0]]):
        deadlines.began(hop(16 + index), 0.0)
        deadlines.done(hop(16 + index), 12.0 + index)
        assert deadlines.of(0, FORWARD) == deadline_s([*samples, *news], DEADLINES_SETTINGS)


def test_who_asks_for_a_deadline_does_not_change_it() -> None:
    """It was that of the samples when somebody first asked, so a job that was played again decided otherwise."""
    asked, alone = measured(2.0), measured(2.0)
    for index in range(40):
        for each in (asked, alone):
            each.began(hop(index), 10.0)
            each.done(hop(index), 12.0 + 0.1 * index)
        asked.of(0, FORWARD)
        asked.due_s()
    assert asked.of(0, FORWARD) == alone.of(0, FORWARD) != 2.6


def test_a_hop_that_completes_after_its_deadline_still_widens_it() -> None:
    deadlines = measured(2.0, 8)
    for index in range(7):
        deadlines.began(hop(index), 0.0)
    assert len(deadlines.expired(5.0)) == 7
    for index in range(7):
        deadlines.done(hop(index), 20.0)
    for index in (8, 9, 10):
        deadlines.began(hop(index), 20.0)
        deadlines.done(hop(index), 40.0)
    assert deadlines.of(0, FORWARD) > 10.0


def test_if_everything_became_slower_at_once_the_deadline_doubles_until_something_completes() -> None:
    deadlines = measured(2.0)
    now_s = 0.0
    for index in range(3 * MISSES_PER_DOUBLING):
        deadlines.began(hop(index), now_s)
        now_s += 120.0
        assert len(deadlines.expired(now_s)) == 1
    assert deadlines.of(0, FORWARD) == pytest.approx(8 * 2.6)
    deadlines.began(hop(99), now_s)
    deadlines.done(hop(99), now_s + 2.0)
    assert deadlines.of(0, FORWARD) == pytest.approx(2.6)


def test_a_hop_has_expired_when_it_is_due_to_the_bit() -> None:
    """The difference of two times may round to less than the deadline that was added."""
    for tenths in range(1, 100):
        deadlines = Deadlines(DeadlineSettings(max_s=1.1))
        deadlines.began(hop(0), tenths / 10)
        due_s = deadlines.due_s()
        assert due_s is not None
        assert len(deadlines.expired(due_s)) == 1


SETTINGS = DeadlineSettings(k=6.0, min_s=1.0, max_s=10.0)


def watched(lateness: Stragglers) -> list[tuple[int, Direction, PeerId]]:
    return [(hop.stage, hop.direction, hop.peer) for hop in lateness._deadlines.watched()]


def test_a_turn_that_takes_much_longer_than_others_is_told_once() -> None:
    lateness = Stragglers(SETTINGS)
    for index in range(SAMPLES_MIN):
        lateness.routed(0, index, [A, B], [False, False], float(index))
        lateness.forwarded(0, 0, index, A, index + 0.1)
    assert lateness._deadlines.of(0, Direction.FORWARD) == SETTINGS.min_s
    lateness.forget_step(0)
    lateness.routed(1, 0, [A, B], [False, False], 20.0)
    due_s = lateness.due_s()
    assert due_s == 21.0
    assert lateness.expired(20.9) == []
    (late,) = lateness.expired(due_s)
    assert (late.hop.peer, late.hop.stage) == (A, 0)
    assert lateness.expired(50.0) == []
    lateness.look_again(late, 50.0)
    assert lateness.due_s() == 51.0
    (again,) = lateness.expired(51.0)
    assert (again.hop, again.waited_s) == (late.hop, 2.0)
    lateness.look_again(again, 51.0)
    lateness.forwarded(1, 0, 0, A, 51.5)
    assert A not in {late.hop.peer for late in lateness.expired(100.0)}
    lateness.routed(1, 0, [C, B], [False, False], 101.0)
    lateness.forget_peer(C)
    assert watched(lateness) == []


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_turns_are_watched_as_the_text_says(situation: Situation) -> None:
    known = {"deadline_s": deadline_s, "measured": measured, "hop": hop, "watched": watched, "SHORT": SETTINGS}
    classes: dict[str, Any] = {"Deadlines": Deadlines, "Stragglers": Stragglers, **Direction.__members__}
    classes["reasons"] = lambda overdue: [late.reason for late in overdue]
    situation.check(Calls(None, SETTINGS=DEADLINES_SETTINGS, **known, **classes).play)
