"""Exact sums: no order of arrival and no grouping by replica changes a bit."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.model.exact_sums import accumulate, contribution_limit, in_range, mean_of_parts

values = st.floats(min_value=-(2.0**20), max_value=2.0**20, width=32)
contributions = st.lists(st.lists(values, min_size=3, max_size=3), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(contributions, st.randoms(use_true_random=False), st.integers(1, 4), st.integers(16, 30))
def test_order_and_replicas_do_not_change_the_mean(
    rows: list[list[float]], rng: random.Random, replicas: int, bits: int
) -> None:
    gradients = [torch.tensor(row, dtype=torch.float32) for row in rows]
    limit = contribution_limit(len(rows))
    gradients = [gradient for gradient in gradients if in_range([gradient], bits, limit)]

    one = torch.zeros(3, dtype=torch.float64)
    for gradient in gradients:
        accumulate(one, gradient, bits)
    expected = mean_of_parts([one], 1000, bits)

    rng.shuffle(gradients)
    parts = [torch.zeros(3, dtype=torch.float64) for _ in range(replicas)]
    for gradient in gradients:
        accumulate(rng.choice(parts), gradient, bits)
    rng.shuffle(parts)
    assert torch.equal(mean_of_parts(parts, 1000, bits), expected)


@settings(max_examples=200, deadline=None)
@given(contributions)
def test_sums_equal_sums_of_python_integers(rows: list[list[float]]) -> None:
    total = torch.zeros(3, dtype=torch.float64)
    exact = [0, 0, 0]
    for row in rows:
        accumulate(total, torch.tensor(row, dtype=torch.float32), 24)
        exact = [old + round(value * 2**24) for old, value in zip(exact, row, strict=True)]
    assert [int(value) for value in total.tolist()] == exact
