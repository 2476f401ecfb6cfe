"""benchmarks.models.unequal: the model is repeatable, keeps no more than there is, and shows what lanes gain."""

from __future__ import annotations

import pytest

from benchmarks.models.unequal import FLEETS, TEN_TIMES_SLOWER, Fleet, kept
from scheduler.brain.routing import policies
from scheduler.planning.play import PlayRules


def test_one_replica_keeps_what_its_step_leaves_it() -> None:
    fleet = Fleet("one", ((1.0,),), 8)
    rules = PlayRules(measured=3)
    rates = [fleet.play(0, rules, seed).run().tokens_per_s for seed in (1, 1, 2)]
    assert 0.96 < rates[0] / fleet.per_s < 1.02
    assert rates[0] == rates[1] != rates[2]


@pytest.mark.parametrize("overlap", [0.0, 0.25])
def test_routes_from_like_to_like_keep_more_of_unequal_replicas(overlap: float) -> None:
    fleet = FLEETS[1]
    alone, alike = (kept(fleet, overlap, alike=way, seeds=2, steps=10) for way in (False, True))
    assert alike > alone + 0.03
    assert policies.UNEQUAL == 1.5, "as it was"


def test_equal_replicas_are_routed_as_before() -> None:
    fleet = Fleet("equal", ((1.0, 1.0),) * 2, 12)
    assert kept(fleet, 0.0, alike=True, seeds=1, steps=6) == kept(fleet, 0.0, alike=False, seeds=1, steps=6)


@pytest.mark.parametrize(("overlap", "least"), [(0.0, 0.75), (0.5, 0.87)])
def test_a_replica_that_is_ten_times_slower_costs_no_more_than_whole_microbatches_do(
    overlap: float, least: float
) -> None:
    """A step of 25 has less than one microbatch for it: it was given some all the same, and all waited for it."""
    assert kept(TEN_TIMES_SLOWER, overlap, alike=True, seeds=2, steps=10) > least
