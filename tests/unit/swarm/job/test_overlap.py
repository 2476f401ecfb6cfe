"""The claim: the slower links are beside computing, the more microbatches of a step are late, and never above half."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swarm.job.overlap import UNMEASURED, FleetSpeed, late_microbatches

seconds = st.floats(0.0, 1e300)


def test_without_a_measurement_a_pipeline_idles_for_as_many_as_it_has_stages() -> None:
    assert late_microbatches(4, 2, 64).microbatches == 8
    assert late_microbatches(4, 2, 64, travel_s=1.0).microbatches == 8, "how long computing takes is not known"
    assert late_microbatches(4, 2, 64, compute_s=1.0).microbatches == 8, "how long tensors travel is not known"
    assert late_microbatches(4, 2, 10).microbatches == 5


def test_a_tensor_that_travels_as_long_as_it_is_computed_costs_two_microbatches_for_each_boundary() -> None:
    chosen = late_microbatches(4, 2, 64, travel_s=0.1, compute_s=0.1)
    assert (chosen.microbatches, chosen.for_links) == (8 + 2 * 3 * 2, 12)
    assert chosen.links_text() == ("12 microbatches more overlap because of the links, on which a tensor travels 0.1 s")
    near = late_microbatches(4, 2, 64, travel_s=0.001, compute_s=0.1)
    assert (near.microbatches, near.links_text()) == (8, ""), "less than half of a microbatch"
    assert late_microbatches(1, 2, 64, travel_s=1.0, compute_s=0.1).microbatches == 2, "it has no links"


def test_a_way_to_the_scheduler_and_back_counts_once() -> None:
    far = late_microbatches(2, 1, 64, travel_s=0.1, compute_s=0.1, receipt_s=0.2)
    assert far.microbatches == 2 + 2 + 2
    assert late_microbatches(1, 1, 64, travel_s=0.1, compute_s=0.1, receipt_s=0.2).microbatches == 1 + 2
    alone = late_microbatches(1, 1, 64, travel_s=9.0, compute_s=0.1, receipt_s=0.2)
    assert alone.links_text().endswith("travels 0.1 s"), "no boundary tensor does"


def test_half_of_a_microbatch_counts_as_a_whole_one() -> None:
    assert late_microbatches(2, 1, 64, travel_s=0.021, compute_s=0.08, receipt_s=0.02).microbatches == 3
    assert late_microbatches(2, 1, 64, travel_s=0.009, compute_s=0.08, receipt_s=0.02).microbatches == 2


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 4096), st.lists(seconds, min_size=2).map(sorted), seconds)
def test_slower_links_never_make_fewer_late_and_never_more_than_half(
    stages: int, replicas: int, microbatches: int, travels_s: list[float], compute_s: float
) -> None:
    chosen = [late_microbatches(stages, replicas, microbatches, travel_s, compute_s) for travel_s in travels_s]
    for one, other in pairwise(chosen):
        assert one.microbatches <= other.microbatches <= microbatches // 2
    near = late_microbatches(stages, replicas, microbatches).microbatches
    assert all(near + choice.for_links == choice.microbatches for choice in chosen)


def test_rates_that_are_next_to_nothing_say_nothing() -> None:
    """A stage server may claim any: both times were infinite, and no job could be submitted."""
    slow = FleetSpeed(multiply_adds_per_s=5e-324, link_bytes_per_s=5e-324, receipt_s=1.0)
    chosen = late_microbatches(4, 2, 64, slow.travel_s(1e6), slow.compute_s(1e8))
    assert chosen == late_microbatches(4, 2, 64, slow.travel_s(1e6))


def test_a_tensor_travels_for_half_of_the_time_until_its_receipt_or_as_long_as_its_bytes_take() -> None:
    far = FleetSpeed(multiply_adds_per_s=1e9, link_bytes_per_s=1e6, receipt_s=0.2)
    assert (far.travel_s(1e4), far.travel_s(1e6)) == (0.1, 1.0)
    assert far.compute_s(1e8) == 0.1
    assert UNMEASURED.travel_s(1e6) == UNMEASURED.compute_s(1e8) == 0.0
