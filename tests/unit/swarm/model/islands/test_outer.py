"""swarm.model.islands.outer: the two linear forms between islands."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.job.outer import REPLACE, MergeRule, OuterUpdate, delayed_nesterov, nesterov
from swarm.model.codec import round_trip
from swarm.model.islands.outer import OuterState, advance, compose, merged, proposal

SHAPE = (5, 67)


def drawn(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def test_a_proposal_is_how_far_the_weights_are_behind_the_anchor_as_its_receivers_have_it() -> None:
    anchor, weights = drawn(0), drawn(1)
    assert torch.equal(proposal(anchor, weights, "none"), anchor - weights)
    assert torch.equal(proposal(anchor, weights, "fp4"), round_trip(anchor - weights, "fp4"))


def test_the_mean_is_summed_in_float64_and_rounded_once() -> None:
    proposals = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    assert compose(proposals, [1.0, 1.0, 1.0]).tolist() == [1.0]
    assert compose([drawn(0), drawn(1)], [0.25, 0.75]).dtype == torch.float32


def test_momentum_starts_at_zero_and_the_anchor_at_the_weights() -> None:
    weights = drawn(0)
    state = OuterState.of(weights)
    weights.zero_()
    assert torch.equal(state.anchor, drawn(0)), "it is a copy"
    assert not state.momentum.any()
    assert state.buffer is None


def test_advancing_changes_nothing_in_place() -> None:
    state, delta = OuterState(drawn(0), drawn(1), drawn(2)), drawn(3)
    advance(state, delta, OuterUpdate(0.9, 1.0, 0.5, 0.6, 0.7, 0.0))
    assert all(
        torch.equal(held, drawn(seed)) for seed, held in enumerate((state.anchor, state.momentum, state.buffer, delta))
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_replaced_leave_nothing_behind(bad: float) -> None:
    broken = torch.full(SHAPE, bad)
    assert torch.equal(merged(broken, drawn(0), drawn(1), REPLACE), drawn(1))


def test_an_island_that_rebases_keeps_what_it_has_not_proposed() -> None:
    """With s = 1 its weights move with the anchor."""
    before, after, weights = drawn(0), drawn(1), drawn(2)
    rebased = merged(weights, before, after, MergeRule(1.0, 1.0))
    assert torch.allclose(after - rebased, before - weights, atol=1e-6)


@pytest.mark.parametrize("islands", [1, 2, 5])
def test_delayed_nesterov_with_a_proposal_of_each_island_between_momentum_steps_is_diloco(islands: int) -> None:
    rate, beta = 0.7, 0.9
    together, one_by_one = OuterState.of(drawn(0)), OuterState.of(drawn(0), collects=True)
    for turn in range(4):
        proposals = [drawn(10 * turn + island) for island in range(1, islands + 1)]
        together = advance(together, compose(proposals, [1.0 / islands] * islands), nesterov(rate, beta))
        for at, one in enumerate(proposals):
            one_by_one = advance(one_by_one, one, delayed_nesterov(turn * islands + at, rate, beta, islands))
        assert torch.allclose(one_by_one.anchor, together.anchor, atol=2e-6)
        assert torch.allclose(one_by_one.momentum, together.momentum, atol=2e-6)


def test_the_forms_have_the_bits_of_numpy() -> None:
    anchor, momentum, buffer, delta, weights = (drawn(seed).numpy() for seed in range(5))
    u, (k, s) = OuterUpdate(0.9, 0.3, 0.25, 0.63, 0.7, 0.5), (np.float32(0.3), np.float32(0.6))
    a, d, e, x, y, z = (np.float32(value) for value in (u.a, u.d, u.e, u.x, u.y, u.z))
    state = advance(OuterState(*map(torch.from_numpy, (anchor, momentum, buffer))), torch.from_numpy(delta), u)
    taken = merged(drawn(4), drawn(0), state.anchor, MergeRule(0.3, 0.6))
    # The twin.
    b = buffer + delta
    m = a * momentum + d * delta + e * b
    theta = anchor - (x * m + y * delta)
    w = k * weights + np.float32(1.0 - 0.3) * theta + s * (theta - anchor)
    for ours, theirs in ((state.buffer, z * b), (state.momentum, m), (state.anchor, theta), (taken, w)):
        assert ours is not None
        assert np.array_equal(ours.numpy(), theirs)
