"""When a stage server is quarantined."""

from __future__ import annotations

import pytest

from scheduler.brain.fleet.quarantine import KEPT_MAX, Strike, TrustRecord

DAY_S = 24 * 3600.0


@pytest.mark.parametrize(
    ("strikes", "since_unix_s"),
    [
        ([(5.0, True)], 5.0),
        ([(5.0, False)], 0.0),
        ([(5.0, False), (5.0 + DAY_S - 1.0, False)], 4.0 + DAY_S),
        ([(5.0, False), (5.0 + DAY_S, False)], 0.0),
        ([(5.0, True), (6.0, True)], 5.0),  # since the first
        ([(5.0, True), (9.0 * DAY_S, False)], 5.0),  # it does not end by itself
    ],
)
def test_one_proven_strike_or_two_within_a_day_are_enough(
    strikes: list[tuple[float, bool]], since_unix_s: float
) -> None:
    record = TrustRecord()
    for unix_s, is_proven in strikes:
        record = record.struck(Strike(unix_s, "y was wrong", is_proven, 7))
    assert (record.since_unix_s, record.is_quarantined) == (since_unix_s, since_unix_s > 0.0)


def test_a_record_tells_the_newest_evidence_and_does_not_grow_for_ever() -> None:
    assert TrustRecord().told == ""
    record = TrustRecord()
    for number in range(2 * KEPT_MAX):
        record = record.struck(Strike(float(number), f"evidence {number}", True, number))
    assert len(record.strikes) == KEPT_MAX
    assert record.told == "evidence 31; 16 strikes, proven by a third; 31 hops of it checked in that job"
