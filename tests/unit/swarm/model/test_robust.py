"""A clipped mean: the plain one while nothing strays, near the honest one whatever a minority sends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.model.exact_sums import mean_of_parts
from swarm.model.robust import BLOCK_ELEMENTS, RADIUS, Share, clipped_mean

ELEMENTS, TOKENS = 3000, 640
TRUE = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(99))


def honest(counts: list[int], seed: int = 0, true: Tensor = TRUE) -> list[Tensor]:
    """Sums over so many microbatches, each of which is the true gradient with noise five times as large."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.stack([true + 5.0 * torch.randn(true.numel(), generator=draw) for _ in range(count)]).sum(0)
        for count in counts
    ]


def shares(counts: list[int], stage: int = 0) -> list[Share]:
    return [Share(stage, count) for count in counts]


def clipped(parts: list[Tensor], counts: list[int]) -> Tensor:
    return clipped_mean(parts, shares(counts), TOKENS)


@pytest.mark.parametrize("counts", [[4, 4, 4, 4], [1, 2, 9, 4, 16], [5], [3, 2], [6, 0, 3, 2, 1]])
def test_the_mean_of_honest_parts_is_the_plain_one_to_the_bit(counts: list[int]) -> None:
    """Also if one has done sixteen times as much as another, and so strays a quarter as far."""
    parts = honest([count or 1 for count in counts])
    parts = [part if count else torch.zeros_like(part) for part, count in zip(parts, counts, strict=True)]
    for seed in range(3):
        assert torch.equal(clipped(parts, counts), mean_of_parts(parts, TOKENS, None)), seed


POISON: dict[str, Callable[[Tensor], Tensor]] = {
    "a thousand times as large, and against": lambda part: part * -1000.0,
    "near the largest float": lambda part: part.sign() * 3e38,
    "noise": lambda part: 1e5 * torch.randn(part.shape, generator=torch.Generator().manual_seed(5)),
    "a constant": lambda part: torch.full_like(part, 1e5),
    "not a number": lambda part: part * float("nan"),
    "one infinite element": lambda part: torch.cat([part[1:], torch.tensor([float("inf")])]),
}


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(("counts", "liars"), [([4, 4, 4, 4], [2]), ([2, 9, 4, 3, 6], [1, 3]), ([40, 4, 4, 4], [0])])
def test_a_minority_moves_the_mean_by_a_few_radii_at_most(poison: str, counts: list[int], liars: list[int]) -> None:
    """Also if a liar has most of the microbatches, as it seems fast."""
    parts = honest(counts, seed=3)
    for liar in liars:
        parts[liar] = POISON[poison](parts[liar])
    mean = clipped(parts, counts) * TOKENS / sum(counts)
    noise = 5.0 * ELEMENTS**0.5 / min(counts) ** 0.5
    assert mean.isfinite().all()
    assert (mean - TRUE).norm() < 2.0 * RADIUS * noise
    plain = mean_of_parts(parts, TOKENS, None) * TOKENS / sum(counts)
    assert not (plain - TRUE).norm() < 4.0 * RADIUS * noise, "without clipping it is spoilt"


def test_who_does_nearly_all_microbatches_does_not_lead_the_centre_away() -> None:
    """Each of its steps would be short, as its radius is small; but there are many of them."""
    counts = [400, 4, 4, 4]
    parts = [torch.full((ELEMENTS,), 1e7), *honest(counts[1:])]
    mean = clipped(parts, counts) * TOKENS / sum(counts)
    assert (mean - TRUE).norm() < 2.0 * 5.0 * ELEMENTS**0.5 / 4**0.5


def test_a_part_of_no_microbatch_counts_for_nothing() -> None:
    parts = honest([4, 4, 4])
    assert torch.equal(clipped([*parts, parts[0] * 1e6], [4, 4, 4, 0]), mean_of_parts(parts, TOKENS, None))


def test_a_mean_of_which_most_parts_are_not_finite_is_not_finite() -> None:
    """The step is then skipped: nobody can say what the gradient was."""
    nothing = torch.full((ELEMENTS,), float("nan"))
    assert not clipped([nothing, nothing, *honest([4, 4])], [4, 4, 4, 4]).isfinite().all()
    assert clipped([nothing, *honest([4, 4])], [4, 4, 4]).isfinite().all()


def test_the_two_uses_of_a_tied_weight_are_not_compared_with_each_other() -> None:
    """As embedding its gradient is small, as head large: all of the second would be clipped."""
    small, large = honest([4, 4, 4], 1), honest([4, 4, 4], 2, TRUE * 1e4)
    of = shares([4, 4, 4], 0) + shares([4, 4, 4], 1)
    assert torch.equal(clipped_mean(small + large, of, TOKENS), mean_of_parts(small + large, TOKENS, None))
    poisoned = [small[0] * 1e9, *small[1:], *large]
    error = clipped_mean(poisoned, of, TOKENS) - mean_of_parts(small + large, TOKENS, None)
    assert error.norm() * TOKENS / 12 < RADIUS * 5.0 * ELEMENTS**0.5


@given(st.integers(1, 6), st.integers(0, 2**16))
def test_where_blocks_end_does_not_matter_and_neither_does_a_common_factor(count: int, seed: int) -> None:
    wide = BLOCK_ELEMENTS + 77
    counts = [1 + (seed + number) % 3 for number in range(count + 2)]
    parts = honest(counts, seed, torch.zeros(wide))
    parts[0] = parts[0] * 300.0
    mean = clipped(parts, counts)
    assert torch.equal(clipped([part * 4.0 for part in parts], counts), mean * 4.0)
    assert torch.equal(mean, clipped(parts, counts))
