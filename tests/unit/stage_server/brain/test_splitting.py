"""Whether a replica splits its backwards: by what it measured."""

from __future__ import annotations

import pytest

from stage_server.brain.cell import Compute, Gradients
from stage_server.brain.splitting import PERIOD, WINDOW, Splitting
from swarm.types import Direction, Microbatch

BACKWARD = Compute(Microbatch(0, 0, 0), Direction.BACKWARD, 0, True, 1)
SECONDS = {Gradients.ALL: 2.0, Gradients.INPUTS: 1.1, Gradients.WEIGHTS: 1.1}


def part_of(part: Gradients) -> Compute:
    return Compute(Microbatch(0, 0, 0), Direction.BACKWARD, 0, True, 1, part)


def stepped(splitting: Splitting, step_s: float, *, first: bool = True, orders: int = WINDOW) -> list[bool]:
    """A step of so many backwards that takes `step_s`; a tenth is longer if split. Gives which were split."""
    if first:
        splitting.committed(0.0, 0.0)
    splits = []
    for _ in range(orders):
        splits.append(splitting.next(BACKWARD, 0))
        for part in (Gradients.INPUTS, Gradients.WEIGHTS) if splits[-1] else (Gradients.ALL,):
            splitting.computed(part_of(part), SECONDS[part])
    splitting.committed(step_s if first else 2 * step_s, 0.0)
    return splits


def test_both_ways_are_measured_first_and_again_later() -> None:
    splitting = Splitting(4)
    turns = [False, True] * (WINDOW // 2)
    assert stepped(splitting, 17.0) == turns
    rest = stepped(splitting, 1000.0, first=False, orders=PERIOD)
    assert rest[-WINDOW:] == turns
    assert not any(rest[:-WINDOW])


@pytest.mark.parametrize(("step_s", "pays"), [(16.9, False), (21.0, False), (33.0, False), (34.0, True), (100.0, True)])
def test_a_split_pays_where_the_device_has_gaps_and_never_where_it_is_busy(step_s: float, pays: bool) -> None:
    """A tenth longer: it pays from a half of idle time on, 16.8 s of work in 33.6 s."""
    splitting = Splitting(4)
    stepped(splitting, step_s)
    assert splitting.pays is pays
    assert splitting.next(BACKWARD, 0) is pays


def test_gaps_that_splits_have_filled_do_not_end_splitting() -> None:
    splitting, now_s, pays = Splitting(4), 0.0, []
    splitting.committed(now_s, 0.0)
    for part, seconds in ((Gradients.ALL, 2.0), (Gradients.INPUTS, 1.0), (Gradients.WEIGHTS, 1.05)):
        splitting.computed(part_of(part), seconds)
    for idle in (0.28, 0.15, 0.05, 0.15, 0.28):
        now_s += 100.0
        splitting.committed(now_s, 100.0 * (1.0 - idle) - 4.05 * (not pays))
        pays.append(splitting.pays)
    assert pays == [True, True, False, False, True]


def test_what_is_owed_is_bounded_and_only_whole_backwards_are_split() -> None:
    splitting = Splitting(2)
    stepped(splitting, 100.0)
    assert [splitting.next(BACKWARD, owed) for owed in (0, 1, 2, 3)] == [True, True, False, False]
    assert not splitting.next(part_of(Gradients.WEIGHTS), 0)
    assert not splitting.next(Compute(Microbatch(0, 0, 0), Direction.FORWARD, 0, False, 1), 0)
    assert not any(stepped(Splitting(0), 100.0)), "without memory for one"
