"""swarm.model.islands.outer: the two linear forms between islands."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.job.outer import REPLACE, MergeRule, OuterPlan, OuterUpdate, Rhythm
from swarm.model.codec import round_trip
from swarm.model.islands.outer import OuterState, advance, compose, merged, proposal, significant

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


def test_a_large_proposal_is_added_tile_by_tile_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole copy in float64 took 8 bytes for each number of a unit, beside the sum."""
    monkeypatch.setattr("swarm.model.islands.outer.TILE", 7)
    held, shares = (
        [torch.randn(5, 11, generator=torch.Generator().manual_seed(seed)) for seed in range(3)],
        (0.2, 0.3, 0.5),
    )
    whole = sum((one.double() * share for one, share in zip(held, shares, strict=True)), torch.zeros(5, 11).double())
    assert torch.equal(compose(held, shares), whole.float())


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


# Gaia ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_number_is_significant_above_a_share_of_its_outer_weight_or_of_the_usual_size_where_that_is_0(
    share: float,
) -> None:
    anchor, behind = drawn(0), 0.3 * drawn(1)
    anchor[:, ::3] = 0.0
    anchor[1, 1], behind[1, 1] = 2.0, 2.0 * share  # just as large: not significant
    usual = np.float32(math.sqrt(float(anchor.double().square().sum()) / anchor.numel()))
    expected = [
        float(one) if abs(np.float32(one)) > (abs(np.float32(of)) if of else usual) * np.float32(share) else 0.0
        for one, of in zip(behind.view(-1).tolist(), anchor.view(-1).tolist(), strict=True)
    ]
    found = significant(behind, anchor, share)
    assert found.view(-1).tolist() == expected
    assert found[1, 1] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_significant(bad: float) -> None:
    found = significant(torch.tensor([bad, 0.1]), torch.tensor([1.0, 1.0]), 1.0)
    assert not found[0].isfinite()
    assert found[1] == 0.0


@given(st.data())
def test_what_islands_make_is_in_the_outer_weights_once_or_still_to_be_sent(data: st.DataObject) -> None:
    """Numbers are counts here, so nothing is rounded; tokens are such that means are exact too."""
    tokens = data.draw(st.sampled_from([(1, 1), (1, 3), (1, 1, 2)]))
    shares = [count / sum(tokens) for count in tokens]
    every = data.draw(st.integers(1, 4))
    overlap, steps = data.draw(st.integers(0, every - 1)), data.draw(st.integers(1, 6))
    plan = OuterPlan(Rhythm(steps, every, 1, overlap), 0.0, OuterUpdate(1.0, 0.0), data.draw(st.floats(0.0, 1.0)))
    counts = st.lists(st.integers(-8, 8), min_size=4, max_size=4).map(lambda found: 64.0 * torch.tensor(found))
    state = OuterState.of(start := data.draw(counts))
    weights, made = [start.clone() for _ in tokens], [torch.zeros(4) for _ in tokens]
    sent, held = [torch.zeros(4) for _ in tokens], list[Tensor]()
    for step in range(steps):
        for island in range(len(tokens)):
            more = data.draw(counts)
            weights[island], made[island] = weights[island] + more, made[island] + more
        if plan.rhythm.captures(step):
            share = plan.significant_from(step + 1)
            held = [significant(state.anchor - weight, state.anchor, share) for weight in weights]
        if plan.rhythm.merges(step):
            before, rule = state, plan.rule(step)
            state = advance(before, compose(held, shares), plan.update)
            islands = zip(weights, held, strict=True)
            weights = [merged(one, before.anchor, state.anchor, rule, own) for one, own in islands]
            sent = [one - own for one, own in zip(sent, held, strict=True)]
        for one, of, out in zip(weights, made, sent, strict=True):
            assert torch.equal(of, out + one - state.anchor)
    total = torch.stack([share * one for share, one in zip(shares, made, strict=True)]).sum(dim=0)
    assert torch.equal(state.anchor, start + total)
    assert all(torch.equal(weight, state.anchor) for weight in weights)
