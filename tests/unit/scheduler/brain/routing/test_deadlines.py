"""scheduler.brain.routing.deadlines: what is too late, and who is."""

from __future__ import annotations

from statistics import median

import pytest

from scheduler.brain.routing.deadlines import MISSES_PER_DOUBLING, Deadlines, WatchedHop, deadline_s
from scheduler.brain.settings import DeadlineSettings
from swarm.types import Direction, PeerId

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
SETTINGS = DeadlineSettings()
A = PeerId("a")


def hop(index: int, *, step: int = 0, stage: int = 0, direction: Direction = FORWARD, peer: PeerId = A) -> WatchedHop:
    return WatchedHop(step, stage, index, direction, peer)


def measured(seconds: float, count: int = 16) -> Deadlines:
    """A stage 0 whose forwards took so long."""
    deadlines = Deadlines(SETTINGS)
    for index in range(count):
        deadlines.began(hop(index, step=-1), 0.0)
        deadlines.done(hop(index, step=-1), seconds)
    return deadlines


def test_the_deadline_is_median_plus_k_deviations() -> None:
    assert deadline_s([9.0, 10.0, 11.0, 12.0] * 4, SETTINGS) == pytest.approx(10.5 + 6 * 1.4826 * 1.0)
    assert deadline_s([10.0] * 8, SETTINGS) == pytest.approx(13.0)  # even times: 5 % of the median for each k
    assert deadline_s([0.001] * 8, SETTINGS) == 1.0
    assert deadline_s([1000.0] * 8, SETTINGS) == 120.0


@pytest.mark.parametrize("slowest_s", [0.05, 0.1, 0.10102, 0.10103, 0.102, 0.5])
def test_a_deadline_that_no_sample_can_raise_is_the_same_without_sorting_them(slowest_s: float) -> None:
    for samples in ([slowest_s] * 8, [slowest_s / 3, slowest_s] * 8, [0.0] * 7 + [slowest_s]):
        middle = median(samples)
        spread = median([abs(sample - middle) for sample in samples])
        full_s = middle + SETTINGS.k * max(1.4826 * spread, 0.05 * middle)
        assert deadline_s(samples, SETTINGS) == max(SETTINGS.min_s, full_s)


def test_before_eight_completions_all_patience_is_granted() -> None:
    assert deadline_s([1.0] * 7, SETTINGS) == 120.0
    assert Deadlines(SETTINGS).of(3, BACKWARD) == 120.0


def test_a_deadline_is_computed_anew_when_an_eighth_of_its_samples_is_new() -> None:
    """It was after each completion: an eighth of what the brain did for a hop, with 1,000 peers."""
    deadlines, samples = Deadlines(SETTINGS), [9.0, 11.0] * 8
    for index, seconds in enumerate(samples):
        deadlines.began(hop(index), 0.0)
        deadlines.done(hop(index), seconds)
    assert deadlines.of(0, FORWARD) == deadline_s(samples, SETTINGS)
    for index, news in enumerate([[], [], [12.0, 13.0, 14.0]]):
        deadlines.began(hop(16 + index), 0.0)
        deadlines.done(hop(16 + index), 12.0 + index)
        assert deadlines.of(0, FORWARD) == deadline_s([*samples, *news], SETTINGS)


def test_who_asks_for_a_deadline_does_not_change_it() -> None:
    """It was that of the samples when somebody first asked, so a job that was played again decided otherwise."""
    asked, alone = measured(2.0), measured(2.0)
    for index in range(40):
        for one in (asked, alone):
            one.began(hop(index), 10.0)
            one.done(hop(index), 12.0 + 0.1 * index)
        asked.of(0, FORWARD)
        asked.due_s()
    assert asked.of(0, FORWARD) == alone.of(0, FORWARD) != 2.6


def test_stages_and_directions_are_measured_apart() -> None:
    deadlines = measured(2.0)
    assert deadlines.of(0, FORWARD) == pytest.approx(2.6)
    assert deadlines.of(0, BACKWARD) == deadlines.of(1, FORWARD) == 120.0


def test_a_hop_past_its_deadline_is_told_once_by_name() -> None:
    deadlines = measured(2.0)
    deadlines.began(hop(1), 10.0)
    deadlines.began(hop(2, peer=PeerId("b")), 11.0)
    assert deadlines.due_s() == pytest.approx(12.6)
    assert deadlines.expired(12.5) == []
    (late,) = deadlines.expired(12.7)
    assert late.hop == hop(1)
    assert late.reason == "a has had forward of 0.1 at stage 0 for 2.7 s; others take less than 2.6 s"
    assert deadlines.expired(12.7) == []
    assert deadlines.watched() == [hop(2, peer=PeerId("b"))]


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


def test_what_is_forgotten_neither_expires_nor_counts() -> None:
    deadlines = measured(2.0)
    deadlines.began(hop(1, peer=PeerId("b")), 0.0)
    deadlines.began(hop(2, step=4), 0.0)
    deadlines.began(hop(3, step=5), 0.0)
    deadlines.forget_peer(PeerId("b"))
    deadlines.forget_step(4)
    assert deadlines.watched() == [hop(3, step=5)]
    deadlines.done(hop(2, step=4), 100.0)
    assert deadlines.of(0, FORWARD) == pytest.approx(2.6)
    assert [late.hop for late in deadlines.expired(100.0)] == [hop(3, step=5)]
    assert deadlines.due_s() is None


def test_a_hop_has_expired_when_it_is_due_to_the_bit() -> None:
    """The difference of two times may round to less than the deadline that was added."""
    for tenths in range(1, 100):
        deadlines = Deadlines(DeadlineSettings(max_s=1.1))
        deadlines.began(hop(0), tenths / 10)
        due_s = deadlines.due_s()
        assert due_s is not None
        assert len(deadlines.expired(due_s)) == 1
