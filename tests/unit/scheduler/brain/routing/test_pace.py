"""How fast a replica is believed to be."""

from __future__ import annotations

import pytest

from scheduler.brain.routing.pace import UNKNOWN_S, Pace
from swarm.types import PeerId

A, B = PeerId("a"), PeerId("b")


def test_the_newest_sample_weighs_three_tenths() -> None:
    pace = Pace()
    pace.observe(A, 1.0)
    assert pace.of(A) == 1.0
    pace.observe(A, 2.0)
    assert pace.of(A) == pytest.approx(1.3)
    pace.observe(A, 2.0)
    assert pace.of(A) == pytest.approx(1.51)


def test_an_unmeasured_replica_is_believed_to_be_as_fast_as_the_best_of_its_stage() -> None:
    pace = Pace()
    assert pace.of(A, [A, B]) == UNKNOWN_S
    pace.observe(B, 4.0)
    pace.observe(PeerId("elsewhere"), 0.5)
    assert pace.of(A, [A, B]) == 4.0
    assert not pace.is_known(A)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_duration_is_ignored(seconds: float) -> None:
    pace = Pace()
    pace.observe(A, 2.0)
    pace.observe(A, seconds)
    assert pace.of(A) == 2.0


def test_a_forgotten_replica_is_measured_anew() -> None:
    pace = Pace()
    pace.observe(A, 9.0)
    pace.forget(A)
    pace.forget(A)
    pace.observe(A, 1.0)
    assert pace.of(A) == 1.0


def slow_and_fast() -> Pace:
    """A takes five seconds, B half a second."""
    pace = Pace()
    pace.observe(A, 5.0)
    pace.observe(B, 0.5)
    return pace


def test_a_slow_replica_is_tried_after_thirty_times_what_it_takes() -> None:
    """Ten times slower and tried every few seconds, one replica of four cost a step half its speed."""
    pace = slow_and_fast()
    assert pace.relax([A], [A, B], 10.0) == []
    assert pace.is_relaxing
    assert pace.relax([A], [A, B], 159.9) == []
    assert pace.relax([A], [A, B], 160.0) == [A]
    assert pace.of(A) == 0.5, "or others would be taken all the same"


def test_work_in_between_begins_the_wait_anew() -> None:
    pace = slow_and_fast()
    pace.relax([A], [A, B], 0.0)
    pace.relax([B], [A, B], 100.0)
    assert not pace.is_relaxing
    assert pace.relax([A], [A, B], 160.0) == []
    assert pace.relax([A], [A, B], 310.0) == [A]


@pytest.mark.parametrize("seconds", [5.0, 0.5])
def test_a_trial_counts_more_than_what_was_believed(seconds: float) -> None:
    pace = slow_and_fast()
    pace.relax([A], [A, B], 0.0)
    pace.relax([A], [A, B], 150.0)
    pace.observe(A, seconds)
    assert pace.of(A) == seconds
    pace.observe(A, 1.0)
    assert pace.of(A) == pytest.approx(0.3 + 0.7 * seconds), "only the first"


def test_a_replica_that_computes_like_others_is_tried_soon_after_it_kept_them_waiting() -> None:
    pace = slow_and_fast()
    pace.observe(A, 0.5)
    pace.waited(A, 60.0)
    assert pace.relax([A], [A, B], 0.0) == [A]
    assert pace.relax([A], [A, B], 5.0) == [A]
