"""Buckets, as tables of times."""

from __future__ import annotations

import pytest

from swarm.limits import Bucket, Buckets


@pytest.mark.parametrize(
    ("times_s", "passed"),
    [
        ([5.0] * 5, [True, True, True, False, False]),
        ([5.0, 5.0, 5.0, 5.4, 5.5, 5.6], [True, True, True, False, True, False]),
        ([0.0, 0.0, 0.0, 9.0, 9.0, 9.0, 9.0], [True] * 6 + [False]),
        ([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0], [True] * 7),
    ],
    ids=["at once", "then at the rate", "as many again after a pause", "slower than the rate"],
)
def test_a_bucket_lets_so_many_pass_at_once_and_then_as_many_as_its_rate(
    times_s: list[float], passed: list[bool]
) -> None:
    bucket, buckets = Bucket(2.0, 3), Buckets(2.0, 3, 1)
    assert [bucket.take(now_s) for now_s in times_s] == passed
    assert [buckets.take("ann", now_s) for now_s in times_s] == passed


def test_one_caller_takes_nothing_from_another() -> None:
    buckets = Buckets(1.0, 2, 10)
    assert [buckets.take("ann", 0.0) for _ in range(3)] == [True, True, False]
    assert (buckets.wait_s("ann", 0.25), buckets.wait_s("bob", 0.25)) == (0.75, 0.0)
    assert buckets.take("bob", 0.0)


def test_there_are_buckets_for_so_many_callers_and_the_one_that_is_silent_for_longest_goes() -> None:
    """The table that was full was emptied, so all who had taken too much might begin anew."""
    buckets = Buckets(1.0, 1, 3)
    for caller in ("ann", "bob", "eve"):
        assert buckets.take(caller, 0.0)
    assert not buckets.take("ann", 0.0)
    for number in range(1000):
        buckets.wait_s(number, 0.0)  # to be looked at leaves nothing behind
    assert buckets.take("new", 0.0)
    assert [buckets.take(caller, 0.0) for caller in ("ann", "eve", "bob")] == [False, False, True]
    for number in range(1000):
        buckets.take(number, 0.0)
    assert len(buckets._buckets) == 3
