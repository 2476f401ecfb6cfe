"""swarm.job.shares: which microbatches of a step each island trains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import swarm.job.shares as shares_module
from swarm.job.shares import Shares, divides, next_shares

SPEEDS = (1 / 0.58, 1 / 0.75, 1 / 1.51, 1 / 3.33)


def seconds(shares: tuple[int, ...], speeds: tuple[float, ...] = SPEEDS) -> dict[int, float]:
    return {island: share / speed for island, (share, speed) in enumerate(zip(shares, speeds, strict=True)) if share}


def test_shares_are_equal_until_others_begin() -> None:
    shares = Shares(2, 8)
    shares.begin(4, (6, 2))
    assert [shares.at(step) for step in (0, 3, 4, 9)] == [(4, 4), (4, 4), (6, 2), (6, 2)]
    assert (shares.range_of(2 * 3 + 1), shares.range_of(2 * 4 + 1)) == (range(28, 32), range(38, 40))
    shares.begin(4, (8, 0))
    assert shares.at(4) == (8, 0), "the newest of one step"
    assert shares.range_of(9) == range(40, 40)
    assert [shares.trained(island, 6) for island in (0, 1)] == [4 * 4 + 2 * 8, 4 * 4]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=6))
def test_portions_tile_the_data(changes: list[tuple[int, int]]) -> None:
    shares, step = Shares(2, 12), 0
    for later, share in changes:
        step += later
        shares.begin(step, (share, 12 - share))
    trained = [number for portion in range(2 * (step + 3)) for number in shares.range_of(portion)]
    assert trained == list(range(12 * (step + 3)))
    assert sum(shares.trained(island, step + 3) for island in (0, 1)) == len(trained)


@st.composite
def cycles(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Shares, the steps of their cycle, and the microbatches of a step."""
    cycle, quotas = draw(st.integers(1, 30)), draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    shares = [quota and cycle * quota + draw(st.integers(0, cycle - 1)) for quota in quotas]
    microbatches = len(shares) * max(1, -(-sum(shares) // (cycle * len(shares))))  # a number that divides equally too
    shares[draw(st.sampled_from([at for at, share in enumerate(shares) if share] or [0]))] += (
        cycle * microbatches - sum(shares)
    )
    return tuple(shares), cycle, microbatches


@given(cycles(), st.integers(0, 9), st.integers(1, 70))
def test_in_each_step_an_island_trains_its_part_rounded_and_in_a_cycle_all_of_its_share(
    made: tuple[tuple[int, ...], int, int], begin: int, steps: int
) -> None:
    """In between it is ahead or behind by a quarter of the cycle's steps at most."""
    of, cycle, microbatches = made
    assert divides(of, microbatches)
    shares = Shares(len(of), microbatches)
    shares.begin(begin, of)
    total = [shares.trained(island, begin) for island in range(len(of))]
    for step in range(begin, begin + steps):
        trained = shares.at(step)
        assert trained == shares.at(step + cycle)
        assert sum(trained) == microbatches
        total = [before + more for before, more in zip(total, trained, strict=True)]
        for island, share in enumerate(of):
            assert trained[island] in (share // cycle, -(-share // cycle))
            assert shares.trained(island, step + 1) == total[island]
            mean = shares.trained(island, begin) + share * (step + 1 - begin) / cycle
            assert abs(total[island] - mean) <= (cycle / 4 if (step + 1 - begin) % cycle else 0)
    portions = [shares.range_of(portion) for portion in range((begin + steps) * len(of))][begin * len(of) :]
    numbers = [number for portion in portions for number in portion]
    assert numbers == list(range(begin * microbatches, (begin + steps) * microbatches))


def test_shares_that_stay_begin_a_cycle_anew_only_where_one_ends() -> None:
    shares = Shares(2, 4)
    shares.begin(2, (7, 5))
    assert [shares.at(step) for step in range(2, 6)] == [(2, 2), (2, 2), (3, 1), (2, 2)]
    shares.begin(8, (7, 5))
    assert shares.at(10) == (3, 1)
    shares.begin(9, (7, 5))
    assert [shares.at(step) for step in range(8, 12)] == [(2, 2), (2, 2), (2, 2), (3, 1)]
    assert [shares.trained(island, 12) for island in (0, 1)] == [2 * 2 + 14 + 2 + 7, 2 * 2 + 10 + 2 + 5]


def test_what_divides_no_steps_is_not_shares() -> None:
    """Each island that is there trains in each step, as a step of an island without microbatches cannot be made."""
    assert all(divides(shares, 8) for shares in ((6, 2), (8, 0), (13, 3), (61, 0, 19)))
    assert not any(divides(shares, 8) for shares in ((6, 3), (0, 0), (15, 1), (79, 1), (9, -1), (-4, -4), ()))


def test_shares_follow_measured_speeds() -> None:
    found = next_shares(range(4), (8, 8, 8, 8), seconds((8, 8, 8, 8)), 32, 1)
    assert found == (14, 11, 5, 2)
    slowest = {shares: max(seconds(shares).values()) for shares in (found, (8, 8, 8, 8))}
    assert slowest[found] < 0.4 * slowest[8, 8, 8, 8]
    assert next_shares(range(4), found, seconds(found), 32, 1) == found, "they stay"


def test_in_a_period_shares_are_as_the_speeds_within_one_microbatch() -> None:
    found = next_shares(range(4), (4, 4, 4, 4), seconds((4, 4, 4, 4)), 16, 10)
    assert found == (69, 53, 26, 12)
    fastest_s = 160 / sum(SPEEDS)
    assert all(abs(share - speed * fastest_s) <= 1 for share, speed in zip(found, SPEEDS, strict=True))
    assert next_shares(range(4), found, seconds(found), 16, 10) == found, "they stay"
    assert next_shares(range(2), (8, 8), {0: 1.0, 1: 3.0}, 16, 10) == (12, 4), "as in each step, if they come out even"
    assert next_shares(range(2), (8, 8), {0: 1.0, 1: 99.0}, 16, 10) == (15, 1), "one of each step at least"
    assert next_shares([0], (69, 91), {0: 1.0, 1: 1.0}, 16, 10) == (16, 0)


def test_shares_that_stay_are_judged_by_the_steps_up_to_the_next_exchange() -> None:
    """The last period is shorter than the others, and a cycle of theirs does not end in it."""
    shares = Shares(2, 4)
    shares.begin(0, (25, 15))
    assert [shares.trained(island, 5) for island in (0, 1)] == [10, 10]
    assert next_shares(range(2), (25, 15), {0: 1.0, 1: 1.0}, 4, 10) == (25, 15)
    assert next_shares(range(2), (25, 15), {0: 1.0, 1: 1.0}, 4, 5) == (13, 7), "else one would train 10, not 7"


def test_a_small_gain_changes_nothing() -> None:
    assert next_shares(range(2), (10, 10), {0: 1.0, 1: 1.04}, 20, 1) == (10, 10)
    assert next_shares(range(2), (10, 10), {0: 1.0, 1: 1.3}, 20, 1) == (11, 9)
    assert next_shares(range(2), (10, 10), {0: 1.0, 1: 1.04}, 20, 50) == (10, 10)


def test_a_lost_island_has_no_share_and_a_new_one_counts_as_the_others() -> None:
    assert next_shares([0, 2], (4, 4, 4), {0: 1.0, 1: 1.0, 2: 2.0}, 12, 1) == (8, 0, 4)
    assert next_shares([0, 1, 2], (8, 0, 4), {0: 2.0, 2: 2.0}, 12, 1) == (6, 4, 2)
    assert next_shares([0, 1], (6, 10), {0: 1.0}, 16, 1) == (8, 8), "it was lost, is back, and is not faster for that"
    assert next_shares([0, 1], (6, 6), {}, 12, 1) == (6, 6), "nothing was measured"
    assert next_shares([0, 1], (8, 4), {}, 12, 1) == (8, 4)
    assert next_shares([1], (6, 6), {}, 12, 1) == (0, 12)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 100.0)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 5, 10, 200]),
)
def test_all_is_trained_and_everybody_gets_some(measured: list[tuple[int, float]], steps: int) -> None:
    now = tuple(share for share, _ in measured)
    total = sum(now)
    found = next_shares(range(len(now)), now, {n: took_s for n, (_, took_s) in enumerate(measured)}, total, steps)
    assert divides(found, total)
    assert min(found) >= sum(found) // total >= 1
    assert steps % (sum(found) // total) == 0 or found == now


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6), st.integers(1, 40), st.integers(0, 200))
def test_of_the_best_shares_nobody_is_done_later_than_who_would_be_done_first_with_one_more(
    weights: list[float], least: int, more: int
) -> None:
    parts = shares_module._divided(len(weights) * least + more, weights, least)
    assert sum(parts) == len(weights) * least + more
    assert min(parts) >= least
    latest = max((part / weight for part, weight in zip(parts, weights, strict=True) if part > least), default=0.0)
    first = min((part + 1) / weight for part, weight in zip(parts, weights, strict=True))
    assert latest <= first * (1 + 1e-9)


@pytest.mark.parametrize("pace", [0.02, 0.5])
def test_they_settle_where_each_step_has_a_cost_of_its_own(pace: float) -> None:
    """A pipeline fills and drains in each step, whatever an island's share."""
    shares: tuple[int, ...] = (16, 16)
    for _ in range(12):
        took_s = {0: 1.0 + pace * shares[0], 1: 1.0 + 4 * pace * shares[1]}
        shares = next_shares(range(2), shares, took_s, 32, 1)
    took_s = {0: 1.0 + pace * shares[0], 1: 1.0 + 4 * pace * shares[1]}
    assert max(took_s.values()) <= 1.15 * min(took_s.values()) or min(shares) == 1
