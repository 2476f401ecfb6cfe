"""What a relay carries: no faster than its rate, and no more for a job than its share."""

from __future__ import annotations

import pytest

from swarm.errors import NoWay, UsageError
from swarm.relay.budget import BURST_S, budget_of
from swarm.types import JobId

JOB, OTHER = JobId("job"), JobId("other")


def test_what_is_taken_goes_no_faster_than_the_rate_whoever_takes_it() -> None:
    budget, now_s, gone = budget_of("8Mbit", ""), 100.0, 0
    for number in range(1000):
        now_s += budget.take((JOB, OTHER)[number % 2], 64 << 10, now_s)
        gone += 64 << 10
        assert gone <= 1e6 * (now_s - 100.0 + BURST_S) + 1e-3
    assert gone == pytest.approx(1e6 * (now_s - 100.0 + BURST_S))


def test_a_pause_is_not_made_up_for() -> None:
    budget = budget_of("8Mbit", "")
    budget.take(JOB, 1_000_000, 0.0)
    assert budget.take(JOB, 1_000_000, 3600.0) == pytest.approx(1.0 - BURST_S)
    assert [budget_of("", "").take(JOB, 1 << 40, 0.0) for _ in range(3)] == [0.0] * 3, "without limits nothing waits"


def test_a_job_that_had_its_share_gets_no_more_and_others_do() -> None:
    budget = budget_of("", "1KiB")
    budget.take(JOB, 600, 0.0)
    budget.take(JOB, 600, 0.0)
    with pytest.raises(NoWay, match=r"1\.0 KiB"):
        budget.check(JOB)
    with pytest.raises(NoWay):
        budget.take(JOB, 1, 1e9)
    budget.take(OTHER, 60, 0.0)


@pytest.mark.parametrize(
    ("rate", "share"),
    [("fast", ""), ("200", ""), ("0.5Mbit", ""), ("-1Gbit", ""), ("", "2TB"), ("", "0GiB"), ("", "x")],
)
def test_what_is_no_limit_is_refused_with_an_example(rate: str, share: str) -> None:
    with pytest.raises(UsageError) as refused:
        budget_of(rate, share)
    assert "for example" in refused.value.hint
