"""How often one person may submit."""

from __future__ import annotations

import pytest

from scheduler.brain.members.submits import Submits
from swarm.errors import QuotaReached

ANN, BOB = "submitter/ann", "admin/bob"


def test_one_person_submits_a_hundred_jobs_and_then_one_a_minute() -> None:
    """A job that was cancelled at once was free for its submitter, and cost the scheduler memory for ever."""
    submits = Submits()
    for _ in range(100):
        submits.check(ANN, 7.0)
        submits.take(ANN, 7.0)
    with pytest.raises(QuotaReached, match="100 jobs in a short time, and may submit 60 an hour") as caught:
        submits.take(ANN, 37.0)
    assert caught.value.hint == "the next one may come in 30.0 s"
    with pytest.raises(QuotaReached):
        submits.check(ANN, 66.0)
    submits.take(BOB, 66.0)
    submits.take(ANN, 67.5)
    with pytest.raises(QuotaReached):
        submits.take(ANN, 68.0)
    allowed = 0
    for second in range(68, 68 + 10 * 3600):
        try:
            submits.take(ANN, float(second))
        except QuotaReached:
            continue
        allowed += 1
    assert allowed in (599, 600)


def test_a_person_has_so_many_at_once_again_after_a_pause() -> None:
    submits = Submits()
    for now_s in (0.0, 100 * 60.0 + 1):
        for _ in range(100):
            submits.take(ANN, now_s)
        with pytest.raises(QuotaReached):
            submits.take(ANN, now_s)


def test_over_plaintext_nobody_is_known_and_nothing_is_counted() -> None:
    submits = Submits()
    for _ in range(1000):
        submits.take("", 0.0)
    submits.check("", 0.0)
