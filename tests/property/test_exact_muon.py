"""Exact Muon: any finite matrix has the bits of whole numbers in Python, and no order of addition changes one."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.model.exact_muon import COEFFICIENTS, GRID, ITERATIONS, NORM_MIN, make_orthogonal
from tests.support.other_products import OtherProducts

Rows = list[list[int]]

everyday = st.floats(-1.0, 1.0, width=32)
# Of all magnitudes: zeros of both signs, subnormal numbers, the largest ones.
any_finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    elements = draw(st.sampled_from([everyday, any_finite]))
    values = draw(st.lists(elements, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values, dtype=torch.float64).view(rows, columns)


def orthogonal(matrix: Tensor) -> Tensor:
    made = matrix.clone()
    make_orthogonal(made)
    return made


def bits(matrix: Tensor) -> list[int]:
    found: list[int] = matrix.contiguous().view(torch.int64).flatten().tolist()
    return found


def sum_of_squares(values: list[float]) -> float:
    """Halves are added until one number is left."""
    squares = [value * value for value in values]
    while len(squares) > 1:
        half = len(squares) // 2
        folded = [low + high for low, high in zip(squares[:half], squares[half : 2 * half], strict=True)]
        folded[0] += squares[-1] if len(squares) % 2 else 0.0
        squares = folded
    return squares[0]


def product(left: Rows, right: Rows) -> list[list[float]]:
    """In multiples of 2^-25. Each sum is a whole number, and no part of it may pass 2^53."""
    found = []
    for row in left:
        terms = [[x * y for x, y in zip(row, column, strict=True)] for column in zip(*right, strict=True)]
        assert max(sum(map(abs, some)) for some in terms) <= 2**53
        found.append([float(sum(some)) / GRID for some in terms])
    return found


def transposed(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


def twin(matrix: Tensor) -> list[float]:
    """What make_orthogonal does, element by element."""
    a, b, c = COEFFICIENTS
    norm = max(math.sqrt(sum_of_squares(matrix.flatten().tolist())), NORM_MIN)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = [[round(value / norm * GRID) for value in row] for row in (matrix.T if is_tall else matrix).tolist()]
    for _ in range(ITERATIONS):
        gram = [[round(value) for value in row] for row in product(x, transposed(x))]
        squared = product(gram, gram)
        polynomial = [
            [round(two * c + one * b) for two, one in zip(*rows, strict=True)]
            for rows in zip(squared, gram, strict=True)
        ]
        moved = product(polynomial, x)
        x = [[round(old * a + by) for old, by in zip(*rows, strict=True)] for rows in zip(x, moved, strict=True)]
    return [value / GRID for row in (transposed(x) if is_tall else x) for value in row]


@settings(max_examples=300, deadline=None)
@given(matrices())
def test_a_matrix_has_the_bits_of_whole_numbers_in_python(matrix: Tensor) -> None:
    assert orthogonal(matrix).flatten().tolist() == twin(matrix)


@settings(max_examples=200, deadline=None)
@given(matrices(), st.integers(0, 1000))
def test_no_order_of_addition_changes_a_bit(matrix: Tensor, seed: int) -> None:
    expected = orthogonal(matrix)
    with OtherProducts(seed) as other:
        found = orthogonal(matrix)
    assert other.products == 3 * ITERATIONS
    assert bits(found) == bits(expected)
