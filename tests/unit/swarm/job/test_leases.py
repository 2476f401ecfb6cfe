"""swarm.job.leases: which microbatches each island trains in which inner step."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.job.course import IslandCourse
from swarm.job.leases import Cut, Leases, _Lease, fill

SPEEDS = (1 / 0.58, 1 / 0.75, 1 / 1.51, 1 / 3.33)


def course(leases: Leases, island: int, steps: int, every: int) -> IslandCourse:
    return IslandCourse(steps, every, leases.islands, island, leases)


def trained(leases: Leases, steps: int, every: int) -> list[list[list[int]]]:
    """The numbers that each island trains in each step, as stage servers and one process ask for them."""
    ways = [course(leases, island, steps, every) for island in range(leases.islands)]
    return [[list(leases.numbers(way.at(step).portion)) for step in range(steps)] for way in ways]


@pytest.mark.parametrize(("steps", "every"), [(7, 3), (6, 3), (2, 5), (1, 1)])
def test_leases_begin_with_the_numbers_of_equal_shares(steps: int, every: int) -> None:
    leases = Leases(2, 8, steps, every)
    for island, made in enumerate(trained(leases, steps, every)):
        plain = [IslandCourse(steps, every, 2, island).at(step).portion for step in range(steps)]
        assert made == [list(range(4 * portion, 4 * (portion + 1))) for portion in plain]
        assert [leases.trained(island, step) for step in range(steps + 1)] == [4 * step for step in range(steps + 1)]


def test_tails_are_laid_end_to_end_and_cut_anew() -> None:
    leases = Leases(2, 4, 8, 4)
    cut = leases.anew({0: 1, 1: 2}, {0: 8, 1: 2})
    assert cut == Cut({0: 1, 1: 2}, {0: ((2, 8), (12, 14)), 1: ((14, 16),)})
    leases.cut(cut)
    assert [leases.count(0, step) for step in range(5)] == [2, 2, 3, 3, 2]
    assert trained(leases, 8, 4)[0][:4] == [[0, 1], [2, 3], [4, 5, 6], [7, 12, 13]]
    assert trained(leases, 8, 4)[1][:4] == [[8, 9], [10, 11], [14], [15]]
    again = leases.anew({0: 3, 1: 3}, {0: 1, 1: 3})
    assert again == Cut({0: 3, 1: 3}, {0: ((7, 8),), 1: ((12, 14), (15, 16))})
    assert [leases.trained(island, 8) for island in (0, 1)] == [18, 14]
    assert (leases.tail(0, 3), leases.tail(1, 0)) == (3, 8), "of the lease that it had at the step"


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 7), st.integers(1, 12))
def test_however_leases_are_cut_each_number_is_trained_once_and_each_step_has_some(
    data: st.DataObject, islands: int, each: int, every: int, steps: int
) -> None:
    leases = Leases(islands, islands * each, steps, every)
    for start in data.draw(st.permutations(range(0, steps, every))):
        period, first = leases.period(start), dict.fromkeys(range(islands), start)
        for _ in range(data.draw(st.integers(0, 3))):
            first = {n: data.draw(st.integers(step, period.stop - 1)) for n, step in first.items()}
            left = {n: leases.tail(n, step) for n, step in first.items()}
            takers = {n: (0.0, data.draw(st.floats(0.01, 100.0)), period.stop - step, 1) for n, step in first.items()}
            cut = leases.anew(first, fill(sum(left.values()), takers, islands * each))
            assert leases.fits(cut)
            leases.cut(cut)
            check_totals(leases, steps)
    made = trained(leases, steps, every)
    assert sorted(number for of in made for step in of for number in step) == list(range(islands * each * steps))
    for island, of in enumerate(made):
        sizes = [len(step) for step in of]
        assert min(sizes) >= 1
        assert max(sizes) <= islands * each
        assert sizes == [leases.count(island, step) for step in range(steps)]


def check_totals(leases: Leases, steps: int) -> None:
    for island in range(leases.islands):
        sums = accumulate((leases.count(island, step) for step in range(steps)), initial=0)
        assert [leases.trained(island, step) for step in range(steps + 1)] == list(sums)


def test_what_an_island_has_trained_is_known_without_going_through_all_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views ask for it, and a job may have 100,000 periods: each question took half a second."""
    leases, asked = Leases(2, 4, 400, 2), list[int]()
    for start in range(0, 400, 2):
        leases.cut(leases.anew({0: start, 1: start}, {0: 5, 1: 3}))
    until = _Lease.until

    def counted(lease: _Lease, step: int) -> int:
        asked.append(step)
        return until(lease, step)

    monkeypatch.setattr(_Lease, "until", counted)
    assert [leases.trained(island, 399) for island in (0, 1)] == [5 * 199 + 2, 3 * 199 + 1]
    assert asked == [399, 399]


FITS = Cut({0: 1, 1: 2}, {0: ((2, 8), (12, 14)), 1: ((14, 16),)})


@pytest.mark.parametrize(
    "cut",
    [
        replace(FITS, leases={}, from_step={}),
        replace(FITS, from_step={0: 1}),  # a lease from nowhere
        replace(FITS, from_step={0: 1, 1: 2, 2: 2}),  # there is no such island
        replace(FITS, from_step={0: 1, 2: 2}, leases={0: FITS.leases[0], 2: FITS.leases[1]}),
        replace(FITS, from_step={0: 1, 1: 4}),  # of another period
        replace(FITS, from_step={0: 1, 1: 9}),  # of none
        replace(FITS, from_step={0: 1, 1: -1}),
        replace(FITS, leases={0: ((2, 8), (12, 15)), 1: ((14, 16),)}),  # 14 twice
        replace(FITS, leases={0: ((2, 8), (13, 14)), 1: ((14, 16),)}),  # 12 never
        replace(FITS, leases={0: (), 1: ((2, 8), (12, 16))}),  # more than its steps can have
        replace(FITS, leases={0: ((2, 8), (14, 12)), 1: ((14, 16),)}),
        replace(FITS, leases={0: FITS.leases[0], 1: ((14, 20), (20, 16))}),  # 16 to 19 besides
        Cut({0: -3, 1: -3}, {0: ((-14, -8), (-6, -2)), 1: ((-2, 0),)}),  # of the period before the first
        Cut({0: -4, 1: -4}),
    ],
)
def test_leases_that_are_not_the_tails_in_other_parts_do_not_fit(cut: Cut) -> None:
    leases = Leases(2, 4, 8, 4)
    assert leases.fits(FITS)
    assert not leases.fits(cut)
    leases.cut(Cut({0: 2, 1: 2}, {0: ((4, 8),), 1: ((12, 16),)}))
    assert not leases.fits(FITS), "it is older"


def test_a_step_begins_once_it_is_known_for_good_what_it_trains() -> None:
    leases = Leases(2, 4, 8, 4)
    assert leases.may_begin(0, 7)
    leases.closed = {0: 4, 1: 3}
    assert [[leases.may_begin(island, step) for step in (2, 3, 4)] for island in (0, 1)] == [
        [True, True, False],
        [True, False, False],
    ]
    leases.cut(Cut({0: 2, 1: 2}, {0: ((4, 8), (12, 16)), 1: ()}))
    assert not leases.may_begin(1, 2), "it has nothing"
    assert leases.decided == 4
    leases.cut(Cut({0: 4, 1: 4}))
    assert (leases.decided, leases.count(0, 4)) == (8, 2), "they stay equal"


@pytest.mark.parametrize(
    ("total", "islands", "parts"),
    [
        (160, [(0.0, speed, 10, 1) for speed in SPEEDS], [69, 53, 26, 12]),
        (16, [(0.0, speed, 1, 1) for speed in SPEEDS], [7, 6, 2, 1]),
        (100, [(0.0, 1.0, 20, 1), (30.0, 1.0, 20, 1)], [65, 35]),
        (100, [(0.0, 1.0, 50, 1), (300.0, 1.0, 50, 1)], [50, 50]),  # one in each step at least
        (100, [(0.0, 1.0, 50, 1), (300.0, 1.0, 50, 0)], [100, 0]),
        (100, [(0.0, 99.0, 5, 1), (0.0, 1.0, 20, 1)], [80, 20]),  # no more than its steps can have
        (100, [(0.0, 99.0, 5, 1), (0.0, 1.0, 25, 1)], [75, 25]),
    ],
)
def test_islands_end_together_whenever_they_are_free(
    total: int, islands: list[tuple[float, float, int, int]], parts: list[int]
) -> None:
    assert list(fill(total, dict(enumerate(islands)), 16).values()) == parts


@given(
    st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.01, 100.0), st.integers(1, 9)), min_size=1, max_size=6),
    st.floats(0.0, 1.0),
)
def test_of_the_best_parts_no_island_is_done_later_than_another_would_be_with_one_more(
    islands: list[tuple[float, float, int]], part: float
) -> None:
    most = 7
    total = round(sum(steps for *_, steps in islands) * (1 + part * (most - 1)))
    parts = fill(total, {n: (*of, 1) for n, of in enumerate(islands)}, most)
    assert sum(parts.values()) == total
    assert all(steps <= parts[n] <= steps * most for n, (*_, steps) in enumerate(islands))
    of = [(parts[n], *each) for n, each in enumerate(islands)]
    latest_s = max((at_s + size / rate for size, at_s, rate, steps in of if size > steps), default=0.0)
    first_s = min((at_s + (size + 1) / rate for size, at_s, rate, n in of if size < n * most), default=latest_s)
    assert latest_s <= first_s * (1 + 1e-6) + 1e-6
