"""swarm.reference.asynchronous: islands that exchange when each is ready."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.job.partition import resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.model.stage import Stage
from swarm.reference.asynchronous import AsyncOuterSteps, Leases, VirtualClock
from swarm.reference.trainer import build_stages, train_local
from tests.support.one_process import CPU, batches_of, drift, farthest, spec_of, weights

SPEEDS = (1 / 0.58, 1 / 0.75, 1 / 1.51, 1 / 3.33)  # of the paper


@given(st.integers(1, 40), st.integers(1, 12), st.lists(st.sampled_from([0.3, 0.5, 1.0, 2.5]), min_size=1, max_size=5))
def test_every_portion_is_trained_once_and_every_lease_ends(steps: int, every: int, speeds: list[float]) -> None:
    moments = list(VirtualClock(steps * len(speeds), every, speeds).moments())
    turns = [turn for moment in moments for turn in moment]
    assert sorted(turn.inner.portion for turn in turns) == list(range(steps * len(speeds)))
    assert all(one[0].time_s < other[0].time_s for one, other in pairwise(moments))
    for island in range(len(speeds)):
        own = [turn for turn in turns if turn.island == island]
        assert not own or own[-1].ends_lease
        assert all(turn.inner.rate_step < steps + every for turn in own)
        times = [turn.time_s for turn in own]
        assert times == pytest.approx([(n + 1) / speeds[island] for n in range(len(own))]), "it never waits"


def test_leases_are_as_long_as_islands_are_fast_so_all_come_at_about_the_same_time() -> None:
    leases = Leases(10_000, 50, SPEEDS)
    granted = leases.grant(range(4))
    assert [one.steps for one in granted.values()] == [50, 38, 19, 8]
    assert [one.first_portion for one in granted.values()] == [0, 50, 88, 107]
    assert {one.rate_step for one in granted.values()} == {0}
    later = leases.grant([2])[2]
    assert (later.first_portion, later.rate_step) == (115, 28), "the fourth part of what was leased before"


def test_what_is_left_in_the_end_is_divided() -> None:
    leases = Leases(10, 5, (1.0, 1.0, 1.0))
    assert [one.steps for one in leases.grant([0, 1, 2]).values()] == [3, 3, 4]
    assert leases.grant([1]) == {}


def both(islands: int, stages: int = 1, **changes: object) -> tuple[JobSpec, JobSpec]:
    outer = {"every_steps": 2, "learning_rate": 0.7, "momentum": 0.9, "compression": "none", **changes}
    return spec_of("diloco", islands, stages=stages, **outer), spec_of("async_dn", islands, stages=stages, **outer)


@pytest.mark.parametrize("islands", [1, 2, 4])
def test_islands_of_equal_speed_are_diloco(islands: int) -> None:
    """All come at one moment, so the outer versions between two momentum steps have one proposal of each."""
    together, one_by_one = (train_local(spec, batches_of(spec)) for spec in both(islands))
    assert farthest(weights(together.stages), weights(one_by_one.stages)) <= 2e-6
    assert one_by_one.losses == pytest.approx(together.losses, abs=1e-5)
    assert [one.version for one in one_by_one.evaluations] == [one.version for one in together.evaluations]
    assert one_by_one.time_s == 6


def test_without_momentum_every_proposal_moves_the_outer_weights_by_its_share() -> None:
    spec = spec_of("async_dn", 2, every_steps=2, compression="none", learning_rate=0.5, momentum=0.0, buffer=1)
    islands = [build_stages(spec, CPU) for _ in range(2)]
    start = weights(islands[0])
    drift(islands)
    one, other = map(weights, islands)
    outer = AsyncOuterSteps(spec, islands)
    assert outer.exchange([1]) == []
    moved = {name: start[name] - 0.5 * (start[name] - other[name]) for name in start}
    assert farthest(weights(islands[1]), moved) <= 1e-6
    assert farthest(weights(islands[0]), one) == 0.0, "who is under way is left alone"
    assert outer.exchange([0]) == []
    both_moved = {name: moved[name] - 0.5 * (start[name] - one[name]) for name in start}
    assert farthest(weights(islands[0]), both_moved) <= 1e-6, "it proposes how far it came from where it began"
    outer.close()
    assert farthest(weights(islands[0]), weights(islands[1])) == 0.0


@pytest.mark.parametrize("tied", [False, True])
def test_the_cut_changes_no_bit(tied: bool) -> None:
    speeds, ends = (1.0, 0.4), []
    for stages in (1, 3):
        spec = spec_of("async_dn", stages=stages, tied=tied, every_steps=3, compression="int8")
        ends.append(train_local(spec, batches_of(spec), speeds=speeds))
    one, three = ends
    assert (one.losses, one.evaluations, one.sha256, one.time_s) == (
        three.losses, three.evaluations, three.sha256, three.time_s,
    )  # fmt: skip


def test_a_slow_island_holds_up_nobody() -> None:
    spec = spec_of("async_dn", 2, steps=20, every_steps=4)
    ended = train_local(spec, batches_of(spec), speeds=(1.0, 0.25))
    assert len(ended.losses) == 20
    assert ended.time_s <= 40 / 1.25 + 4, "both train until all portions are trained"
    assert ended.evaluations[-1].version == 20
    assert all(one.time_s <= ended.time_s for one in ended.evaluations)


def test_a_proposal_that_is_not_finite_is_dropped_and_its_island_goes_on_from_the_outer_weights() -> None:
    spec = spec_of("async_dn", 2)
    islands = [build_stages(spec, CPU) for _ in range(2)]
    start = weights(islands[0])
    drift(islands)
    broken: Stage = islands[0][0]
    next(iter(broken.weights.newest().values())).data.fill_(math.nan)
    outer = AsyncOuterSteps(spec, islands)
    assert outer.exchange([0]) == [0]
    assert farthest(weights(islands[0]), start) == 0.0
    assert outer.exchange([1]) == []
    assert all(bool(torch.isfinite(one).all()) for one in weights(islands[1]).values())


def test_the_buffer_is_as_long_as_there_are_islands_unless_the_job_says_otherwise() -> None:
    assert spec_of("async_dn", 4).outer.buffer == 4
    values = spec_of("async_dn", 4).model_dump()
    assert resolve(parse_job(values), vocabulary_size=257, stages_if_auto=1).outer.buffer == 4
    assert spec_of("async_dn", 4, buffer=1).outer.buffer == 1
