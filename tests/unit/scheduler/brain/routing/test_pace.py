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
