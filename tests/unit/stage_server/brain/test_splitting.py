"""Whether a replica splits its backwards: by what it measured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, repeat

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stage_server.brain.cell import Compute, Gradients
from stage_server.brain.splitting import GAIN, PERIODS, WINDOW, Splitting
from swarm.types import Direction, Microbatch

SECONDS = {Gradients.ALL: 2.0, Gradients.INPUTS: 1.1, Gradients.WEIGHTS: 1.1}
TURNS = [False, True] * (WINDOW // 2)


def steady(part: Gradients) -> float:
    return SECONDS[part]


def backward(index: int, part: Gradients = Gradients.ALL) -> Compute:
    return Compute(Microbatch(0, 0, index), Direction.BACKWARD, 0, True, 1, part)


class Replica:
    """A replica that does what its `Splitting` says, with a clock."""

    def __init__(self, seconds: Callable[[Gradients], float] = steady) -> None:
        self.splitting = Splitting(4)
        self.seconds = seconds
        self.count, self.now_s, self.busy_s = 0, 0.0, 0.0
        self.splitting.committed(0.0)

    def step(self, orders: int, idle: float) -> list[bool]:
        """A step of so many backwards that idles for a share; gives which were split."""
        splits, busy_s = [], 0.0
        for _ in range(orders):
            splits.append(self.splitting.next(backward(self.count), 0))
            for part in (Gradients.INPUTS, Gradients.WEIGHTS) if splits[-1] else (Gradients.ALL,):
                self.splitting.computed(backward(self.count, part), seconds := self.seconds(part))
                busy_s += seconds
            self.count += 1
        self.now_s += busy_s / (1.0 - idle)
        self.splitting.committed(self.now_s)
        return splits


@pytest.mark.parametrize("idle", [0.0, 0.5])
def test_both_ways_are_measured_first_and_then_ever_more_rarely(idle: float) -> None:
    replica, (least, most) = Replica(), PERIODS
    splits = [split for _ in range(most // 2) for split in replica.step(8, idle)]
    windows = [at for at in range(len(splits)) if splits[at : at + WINDOW] == TURNS]
    third = 2 * (2 * WINDOW + least)
    assert windows[:3] == [0, WINDOW + least, third], "later as many lie between as came before"
    assert windows[-1] - windows[-2] == WINDOW + most
    tried = len(windows) * WINDOW // 2
    assert splits.count(idle == 0.0) == tried, "with gaps all others are split, and without gaps none"


@pytest.mark.parametrize(("idle", "pays"), [(0.0, False), (0.16, False), (0.17, True), (0.9, True)])
def test_a_split_pays_where_the_device_has_gaps_and_never_where_it_is_busy(idle: float, pays: bool) -> None:
    """A tenth longer: it pays from a sixth of idle time on."""
    replica = Replica()
    replica.step(WINDOW, idle)
    assert replica.splitting.pays is pays
    assert replica.splitting.next(backward(WINDOW), 0) is pays


FIVE = st.lists(st.floats(0.1, 10.0), min_size=WINDOW // 2, max_size=WINDOW // 2)
SHARES = st.floats(0.0, 0.95)


def judged(once: list[float], inputs: list[float], weights: list[float], idle: float) -> bool:
    """Whether splits pay after a window with these times, in any order."""
    left = {part: cycle(times) for part, times in zip(Gradients, (once, inputs, weights), strict=True)}
    replica = Replica(lambda part: next(left[part]))
    replica.step(WINDOW, idle)
    return replica.splitting.pays


@given(FIVE, FIVE, FIVE, SHARES, st.floats(1.0, 3.0), SHARES)
def test_slower_parts_and_less_idle_time_never_begin_to_pay(
    once: list[float], inputs: list[float], weights: list[float], idle: float, slower: float, less: float
) -> None:
    if not judged(once, inputs, weights, idle):
        assert not judged(once, [slower * each for each in inputs], weights, idle)
        assert not judged([each / slower for each in once], inputs, weights, idle)
        assert not judged(once, inputs, weights, min(less, idle))


@given(st.permutations([1.0, 1.0, 1.2, 1.44, 1.7]), st.floats(1.0, 1.2), SHARES)
def test_scatter_is_a_cost_so_a_steady_device_fills_small_gaps_and_a_shared_one_none(
    scatter: list[float], most: float, idle: float
) -> None:
    """Both parts take as long as one call, times what scatters: here up to 1.7, or up to `most`."""
    assume(abs(GAIN * idle - (most - 1.0)) > 1e-6)
    halves = [each / 2 for each in scatter]
    assert not judged(scatter, halves, halves, min(idle, 0.7))
    times = [min(each, most) for each in scatter]
    halves = [each / 2 for each in times]
    assert judged(times, halves, halves, idle) is (most <= 1.0 + GAIN * idle)


@pytest.mark.parametrize("first", [3.0, 50.0], ids=["slow at first", "as if it hung"])
def test_a_bad_first_window_ends_splitting_until_the_next_one_only(first: float) -> None:
    replica = Replica(lambda part: first * steady(part) if part is not Gradients.ALL else steady(part))
    assert replica.step(WINDOW, 0.5) == [False, True, *repeat(False, WINDOW - 2)], "it fits in no gap: tried once"
    assert not replica.splitting.pays
    replica.seconds = steady
    assert replica.step(PERIODS[0] + WINDOW, 0.5) == [*repeat(False, PERIODS[0]), *TURNS]
    assert replica.splitting.pays


def test_one_slow_computation_of_each_kind_says_nothing() -> None:
    slow = set(Gradients)

    def seconds(part: Gradients) -> float:
        is_first = part in slow
        slow.discard(part)
        return steady(part) * (20.0 if is_first else 1.0)

    replica = Replica(seconds)
    replica.step(WINDOW, 0.3)
    assert replica.splitting.pays


def test_checks_and_evaluations_keep_a_device_busy() -> None:
    replica = Replica()
    replica.step(WINDOW, 0.0)
    replica.splitting.worked(40.0)
    replica.now_s += 42.0
    replica.splitting.committed(replica.now_s)
    assert not replica.splitting.pays
    replica.splitting.worked(21.0)
    replica.splitting.committed(replica.now_s + 42.0)
    assert replica.splitting.pays


def test_gaps_that_splits_have_filled_do_not_end_splitting() -> None:
    replica, pays = Replica(), []
    for idle in (0.28, 0.15, 0.1, 0.05, 0.16, 0.28):
        replica.step(WINDOW, idle)
        pays.append(replica.splitting.pays)
    assert pays == [True, True, True, False, False, True]


def test_what_is_owed_is_bounded_and_only_whole_backwards_are_split() -> None:
    splitting = Splitting(2)
    assert [splitting.next(backward(index), owed) for index, owed in enumerate((0, 1, 0, 2, 0, 3))] == [
        False, True, False, False, False, False,
    ]  # fmt: skip
    assert not splitting.next(backward(6, Gradients.WEIGHTS), 0)
    assert not splitting.next(Compute(Microbatch(0, 0, 0), Direction.FORWARD, 0, False, 1), 0)
    assert not any(Splitting(0).next(backward(index), 0) for index in range(WINDOW)), "without memory for one"
