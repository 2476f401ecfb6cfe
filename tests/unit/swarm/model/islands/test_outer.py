"""swarm.model.islands.outer: the two linear forms between islands."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.job.outer import REPLACE, MergeRule, OuterUpdate
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


def test_advancing_changes_nothing_in_place() -> None:
    state, delta = OuterState(drawn(0), drawn(1)), drawn(2)
    advance(state, delta, OuterUpdate(0.7, 0.9))
    assert all(torch.equal(held, drawn(seed)) for seed, held in enumerate((state.anchor, state.momentum, delta)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_replaced_leave_nothing_behind(bad: float) -> None:
    broken = torch.full(SHAPE, bad)
    assert torch.equal(merged(broken, drawn(0), drawn(1), REPLACE), drawn(1))


def test_an_island_that_rebases_keeps_what_it_has_not_proposed() -> None:
    """With s = 1 its weights move with the anchor."""
    before, after, weights = drawn(0), drawn(1), drawn(2)
    rebased = merged(weights, before, after, MergeRule(1.0, 1.0))
    assert torch.allclose(after - rebased, before - weights, atol=1e-6)


def test_the_forms_have_the_bits_of_numpy() -> None:
    anchor, momentum, delta, weights = (drawn(seed).numpy() for seed in range(4))
    state = advance(OuterState(drawn(0), drawn(1)), drawn(2), OuterUpdate(0.7, 0.9))
    taken = merged(drawn(3), drawn(0), state.anchor, MergeRule(0.3, 0.6))
    # The twin.
    m = np.float32(0.9) * momentum + delta
    theta = anchor - (np.float32(0.7 * 0.9) * m + np.float32(0.7) * delta)
    w = np.float32(0.3) * weights + np.float32(1.0 - 0.3) * theta + np.float32(0.6) * (theta - anchor)
    for ours, theirs in ((state.momentum, m), (state.anchor, theta), (taken, w)):
        assert np.array_equal(ours.numpy(), theirs)


def test_nesterov_is_the_textbook_form() -> None:
    """D = 1, then D = 2, with rate 0.5 and momentum 0.5: worked out by hand from m = bm + D, t -= r(bm + D)."""
    state = OuterState(torch.zeros(1), torch.zeros(1))
    for delta in (1.0, 2.0):
        state = advance(state, torch.tensor([delta]), OuterUpdate(0.5, 0.5))
    assert (state.momentum.item(), state.anchor.item()) == (2.5, -0.75 - 1.625)
