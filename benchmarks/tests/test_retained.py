"""benchmarks.retained: the integral of what was possible, and what counts of what was done."""

from __future__ import annotations

import math
from random import Random

import pytest

from benchmarks.retained import WARM_UP_STEPS, Stay, Stays, possible, window


def test_without_deaths_a_stage_can_do_what_its_replicas_can_do_together() -> None:
    stays = [Stay(stage, -5.0) for stage in (0, 0, 1, 1)]
    assert possible(stays, 2, 0.5, 10.0, 40.0) == 30.0


def test_the_weakest_stage_is_the_measure_at_every_moment() -> None:
    stays = [Stay(0, 0.0), Stay(0, 0.0, 4.0), Stay(1, 0.0, 7.0), Stay(1, 0.0)]
    # two in both stages until 4; then one in stage 0; from 7 on one in both, and another one in stage 0 from 8 on
    assert possible([*stays, Stay(0, 8.0)], 2, 1.0, 0.0, 10.0) == 4 * 2 + 6 * 1
    assert possible([*stays, Stay(0, 8.0), Stay(1, 9.0)], 2, 1.0, 0.0, 10.0) == 4 * 2 + 5 * 1 + 1 * 2


def test_nothing_is_possible_while_a_stage_is_empty() -> None:
    assert possible([Stay(0, 0.0), Stay(1, 0.0, 2.0), Stay(1, 5.0)], 2, 1.0, 0.0, 10.0) == 2.0 + 5.0
    assert possible([Stay(0, 0.0)], 2, 1.0, 0.0, 10.0) == 0.0


def test_the_integral_is_that_of_many_short_moments() -> None:
    rng = Random(3)
    stays = [Stay(rng.randrange(3), begin := rng.uniform(0, 80), begin + rng.uniform(0, 60)) for _ in range(60)]
    moments = [20.0 + (n + 0.5) / 100 for n in range(5000)]
    alive = [
        min(sum(stay.stage == stage and stay.from_s <= at_s < stay.to_s for stay in stays) for stage in range(3))
        for at_s in moments
    ]
    assert possible(stays, 3, 2.0, 20.0, 70.0) == pytest.approx(2.0 * sum(alive) / 100, rel=1e-3)


def test_a_joiner_counts_since_it_was_idle_and_a_mover_where_it_was() -> None:
    stays = Stays()
    stays.idle("a.1", 3.0)
    stays.seen("a.1", 2, 3.4)
    stays.seen("a.1", 2, 5.0)
    stays.seen("a.1", 0, 8.0)
    assert stays.alive(3) == [1, 0, 0]
    stays.ended("a.1", 9.0)
    stays.idle("a.2", 11.0)
    stays.seen("a.2", 1, 11.5)
    assert stays.all() == [Stay(2, 3.0, 8.0), Stay(0, 8.0, 9.0), Stay(1, 11.0, math.inf)]
    assert stays.moves == 1


def test_a_peer_that_never_had_a_stage_never_counts() -> None:
    stays = Stays()
    stays.idle("a.1", 3.0)
    stays.ended("a.1", 4.0)
    assert stays.all() == []


def test_what_counts_goes_from_the_end_of_the_warm_up_to_the_first_commit_after_the_time_is_over() -> None:
    commits_s = [10.0, 20.0, 31.0, 40.0, 52.0]
    assert WARM_UP_STEPS == 2
    found = window(commits_s, 35.0)
    assert found is not None
    assert (found.from_s, found.to_s, found.steps, found.seconds) == (20.0, 40.0, 2, 20.0)
    assert window(commits_s, 53.0) is None
    assert window(commits_s[:2], 5.0) is None  # a window without a step is none
    assert window(commits_s, 5.0) == window(commits_s, 31.0)


def test_steps_of_one_length_give_their_speed_wherever_the_time_is_over() -> None:
    commits_s = [16.5 * n for n in range(1, 50)]
    for until_s in (100.0, 110.0, 333.3, 700.0):
        found = window(commits_s, until_s)
        assert found is not None
        assert found.steps / found.seconds == pytest.approx(1 / 16.5)
