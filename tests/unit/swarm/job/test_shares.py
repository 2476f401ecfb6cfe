"""swarm.job.shares: which microbatches of a step each island trains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.job.shares import Shares, next_shares

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


def test_shares_follow_measured_speeds() -> None:
    found = next_shares(range(4), (8, 8, 8, 8), seconds((8, 8, 8, 8)), 32)
    assert found == (14, 11, 5, 2)
    slowest = {shares: max(seconds(shares).values()) for shares in (found, (8, 8, 8, 8))}
    assert slowest[found] < 0.4 * slowest[8, 8, 8, 8]
    assert next_shares(range(4), found, seconds(found), 32) == found, "they stay"


def test_a_small_gain_changes_nothing() -> None:
    assert next_shares(range(2), (10, 10), {0: 1.0, 1: 1.04}, 20) == (10, 10)
    assert next_shares(range(2), (10, 10), {0: 1.0, 1: 1.3}, 20) == (11, 9)


def test_a_lost_island_has_no_share_and_a_new_one_counts_as_the_others() -> None:
    assert next_shares([0, 2], (4, 4, 4), {0: 1.0, 1: 1.0, 2: 2.0}, 12) == (8, 0, 4)
    assert next_shares([0, 1, 2], (8, 0, 4), {0: 2.0, 2: 2.0}, 12) == (6, 4, 2)
    assert next_shares([0, 1], (6, 10), {0: 1.0}, 16) == (8, 8), "it was lost and is back, and is not faster for that"
    assert next_shares([0, 1], (6, 6), {}, 12) == (6, 6), "nothing was measured"
    assert next_shares([0, 1], (8, 4), {}, 12) == (8, 4)
    assert next_shares([1], (6, 6), {}, 12) == (0, 12)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 100.0)), min_size=1, max_size=6), st.integers(0, 60))
def test_all_is_trained_and_everybody_gets_some(measured: list[tuple[int, float]], more: int) -> None:
    now = tuple(share for share, _ in measured)
    total = sum(now) + (more if more % 2 else 0)
    found = next_shares(range(len(now)), now, {n: took_s for n, (_, took_s) in enumerate(measured)}, total)
    assert sum(found) == total
    assert min(found) >= 1


@pytest.mark.parametrize("pace", [0.02, 0.5])
def test_they_settle_where_each_step_has_a_cost_of_its_own(pace: float) -> None:
    """A pipeline fills and drains in each step, whatever an island's share."""
    shares: tuple[int, ...] = (16, 16)
    for _ in range(12):
        took_s = {0: 1.0 + pace * shares[0], 1: 1.0 + 4 * pace * shares[1]}
        shares = next_shares(range(2), shares, took_s, 32)
    took_s = {0: 1.0 + pace * shares[0], 1: 1.0 + 4 * pace * shares[1]}
    assert max(took_s.values()) <= 1.15 * min(took_s.values()) or min(shares) == 1
