"""scheduler.brain.islands.standstill: without which islands the others go on."""

from __future__ import annotations

import pytest

from scheduler.brain.islands.standstill import doubts, largest_group

ALL = {0: 4, 1: 4, 2: 4, 3: 4}


@pytest.mark.parametrize(
    ("apart", "sizes", "stay"),
    [
        ([], ALL, (0, 1, 2, 3)),
        ([(0, 3), (1, 3), (2, 3)], ALL, (0, 1, 2)),
        ([(0, 2), (0, 3), (1, 2), (1, 3)], ALL, (0, 1)),
        ([(0, 2), (0, 3), (1, 2), (1, 3)], ALL | {3: 5}, (2, 3)),
        ([(0, 1)], {0: 4, 1: 4}, (0,)),
        ([(0, 1)], {0: 4, 1: 5}, (1,)),
        ([(0, 1), (1, 2)], {0: 1, 1: 9, 2: 1}, (0, 2)),
        ([(0, 1), (0, 2), (1, 2)], {0: 4, 1: 4, 2: 4}, (0,)),
    ],
)
def test_the_largest_group_that_is_together_goes_on(
    apart: list[tuple[int, int]], sizes: dict[int, int], stay: tuple[int, ...]
) -> None:
    assert largest_group(sizes, [frozenset(pair) for pair in apart]) == stay


@pytest.mark.parametrize(
    ("apart", "before", "stay"),
    [
        ([(0, 1)], [], (0, 2, 3)),
        ([(0, 1)], [(0, 4)], (1, 2, 3)),
        ([(0, 2)], [(0, 1), (0, 1)], (1, 2, 3)),
        ([(0, 1)], [(0, 1)], (0, 2, 3)),
        ([(0, 2), (0, 3), (1, 2), (1, 3)], [(1, 4)], (2, 3)),
        ([(0,)], [(1, 2)], (1, 2, 3)),
    ],
)
def test_of_equal_groups_the_one_goes_on_that_seldom_lacked_another(
    apart: list[tuple[int, ...]], before: list[tuple[int, ...]], stay: tuple[int, ...]
) -> None:
    pairs = [frozenset(pair) for pair in apart]
    assert largest_group(ALL, pairs, doubts({*pairs, *map(frozenset, before)})) == stay
