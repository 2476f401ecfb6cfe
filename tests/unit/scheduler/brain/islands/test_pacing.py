"""scheduler.brain.islands.pacing: when leases are cut anew, and how; in virtual time (tests/support/race.py)."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest

from swarm.job.leases import Cut
from tests.support.effort import seeds
from tests.support.race import Race, Speed


def steady(rate: float) -> Speed:
    return lambda _: rate


def slow_between(first_s: float, end_s: float, times: float, rate: float = 4.0) -> Speed:
    return lambda at_s: rate / times if first_s <= at_s < end_s else rate


def noisy(seed: int, rate: float = 4.0) -> Speed:
    dice = Random(seed)
    drawn = [dice.uniform(0.9, 1.1) for _ in range(4096)]
    return lambda at_s: rate * drawn[int(at_s) % len(drawn)]


def unequal(race: Race) -> list[Cut]:
    return [cut for _, cut in race.cuts if cut.leases]


@pytest.mark.parametrize("overlap", [0, 2])
def test_equal_islands_keep_equal_leases_and_one_row_says_so_for_each_period(overlap: int) -> None:
    race = Race([steady(4.0)] * 3, microbatches=24, overlap=overlap)
    assert race.run() == pytest.approx(60 * 2.0)
    assert [cut for _, cut in race.cuts] == [Cut(dict.fromkeys(range(3), step)) for step in (20, 40)]


def test_islands_that_differ_by_a_tenth_from_step_to_step_cut_leases_three_times_a_period_at_most() -> None:
    for seed in seeds(5, 0, 1):
        race = Race([noisy(2 * seed), noisy(2 * seed + 1)], steps=300, every=50)
        spent_s = race.run()
        periods = Counter(cut.first_step // 50 for _, cut in race.cuts)
        assert max(periods.values()) <= 3
        assert spent_s <= 1.02 * 300 * 16 / 8.0


@pytest.mark.parametrize("overlap", [0, 2])
def test_islands_of_unequal_speed_come_to_the_end_of_each_period_together(overlap: int) -> None:
    speeds = (6.9, 5.3, 2.65, 1.2)
    race = Race(list(map(steady, speeds)), steps=80, overlap=overlap)
    assert race.run() <= 1.05 * 80 * 16 / sum(speeds)
    assert {cut.first_step % 20 for _, cut in race.cuts[1:]} == {0}, "from then on only where a period begins"
    assert race.leases.trained(3, 80) < 0.12 * 80 * 16


@pytest.mark.parametrize("at_s", [41.0, 60.5])
def test_microbatches_move_within_two_steps_of_an_island_that_becomes_slow_and_back(at_s: float) -> None:
    race = Race([steady(4.0), slow_between(at_s, at_s + 60, 5)], every=60, steps=120)
    race.run()
    moved = [(now_s, cut) for now_s, cut in race.cuts if cut.leases]
    slow_step_s = 5 * 2.0
    assert at_s < moved[0][0] <= at_s + 2 * slow_step_s
    assert any(at_s + 60 < now_s <= at_s + 60 + 2 * slow_step_s for now_s, _ in moved)
    assert race.now_s <= 1.05 * (120 * 16 + 60 * 3.2) / 8.0
    told = race.told[0][1]
    assert told.startswith("island 1: it would come ")
    assert " s late, and others train " in told
    assert race.pacing.relieved[1] > 80


def test_an_island_that_stands_still_loses_all_but_a_microbatch_of_each_step() -> None:
    race = Race([steady(4.0), slow_between(30.0, 110.0, 1e9)], every=60, steps=60)
    race.run()
    assert race.now_s == pytest.approx(60 * 16 / 8.0 + 80 / 2, rel=0.01), "as if nothing was ever waited for"
    assert min(race.leases.count(1, step) for step in range(60)) == 1


def test_what_a_lost_island_has_not_begun_is_trained_by_the_others_at_once() -> None:
    race = Race([steady(4.0)] * 3, microbatches=24, every=60, lost_s={2: 41.0})
    race.run()
    (_, cut), *_ = race.cuts
    assert (cut.from_step[2], cut.leases[2]) == (21, ()), "it was in its step 20"
    assert sum(race.leases.trained(island, 60) for island in (0, 1)) == 60 * 24 - 21 * 8
    assert "late" not in race.told[0][1]


def test_a_restarted_scheduler_cuts_no_lease_from_before_its_newest_cut() -> None:
    """An island was amid a step when its lease was cut from the next step on, and has not begun that step anew."""
    race = Race([steady(4.0), steady(3.0), slow_between(40.5, 1e9, 9)], microbatches=24, every=60)
    until_s = iter(range(164, 480))
    while not race.cuts or race.runners[1].agreed >= race.cuts[-1][1].from_step[1]:
        race.run(next(until_s) / 4)
    since = race.cuts[-1][1].from_step[1]
    race.begin_pacing()
    for runner in race.runners:
        runner.begun, runner.over_s = runner.agreed, math.inf
    race.pace()
    race.runners[2].lost_s = race.now_s
    race.pace()
    newest = race.cuts[-1][1]
    assert (newest.from_step[1], newest.leases[2]) == (since, ())


def test_a_lost_island_that_may_begin_anew_amid_a_period_keeps_a_microbatch_of_each_step() -> None:
    race = Race([steady(4.0)] * 2, every=20, overlap=3, lost_s={1: 41.0})
    race.run()
    assert {race.leases.count(1, step) for step in range(45, 60)} == {1}
    assert race.leases.trained(0, 60) + race.leases.trained(1, 60) == 60 * 16


def test_a_restarted_scheduler_cuts_nothing_before_it_has_seen_all_islands_train() -> None:
    race = Race([steady(6.0), steady(2.0)], every=60, steps=60)
    race.run(until_s=60.0)
    before = len(race.cuts)
    assert before
    race.begin_pacing()
    race.run()
    assert len(race.cuts) == before, "they end together as they are"


def test_islands_that_share_equally_have_no_leases() -> None:
    race = Race([steady(4.0), steady(1.0)], by_speed=False)
    assert race.run() == pytest.approx(60 * 8.0)
    assert race.cuts == []


def test_nothing_moves_for_a_small_gain() -> None:
    race = Race([steady(4.0), steady(3.9)])
    race.run()
    assert unequal(race) == []
