"""swarm.model.exact_sums: exact sums. Order is in tests/property/test_exact_sums.py."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from swarm.model import exact_sums
from swarm.model.exact_sums import accumulate, contribution_limit, in_range, mean_of_parts, squared_norms
from tests.support.peak import peak_bytes


def test_a_sum_holds_the_rounded_multiples() -> None:
    total = torch.zeros(4, dtype=torch.float64)
    accumulate(total, torch.tensor([0.25, 0.1249, -3.0, 0.0]), 2)
    assert total.tolist() == [1.0, 0.0, -12.0, 0.0]


@pytest.mark.parametrize("bits", [16, 30, 40])
def test_multiples_in_float32_are_those_in_float64(bits: int) -> None:
    edges = torch.tensor([0.5, 1.5, 2.5, 0.49999997, 0.0, 1e-45, 1e-38, 2.0**22 + 0.5, 2.0**24 + 2, 2.0**53]) / 2**bits
    gradient = torch.cat([edges, -edges, torch.randn(1000), torch.randn(1000) / 2**bits])
    before = torch.randint(-(2**40), 2**40, (2020,)).double()
    total = before.clone()
    accumulate(total, gradient, bits)
    assert torch.equal(total, before + (gradient.double() * 2**bits).round())


def test_tiles_cover_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = torch.randn(1000)
    whole, tiled = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    accumulate(whole, gradient, 30)
    monkeypatch.setattr(exact_sums, "TILE_ELEMENTS", 7)
    accumulate(tiled, gradient, 30)
    assert torch.equal(whole, tiled)


def test_range_is_the_share_that_no_sum_of_all_contributions_can_leave() -> None:
    limit = contribution_limit(8)
    assert limit * 8 <= 2**53 < (limit + 1) * 8
    edge = torch.tensor([limit / 2**16])
    assert float(edge) * 2**16 == limit
    assert in_range([edge], 16, limit)
    assert in_range([-edge], 16, limit)
    assert not in_range([torch.nextafter(edge, torch.tensor(torch.inf))], 16, limit)


@pytest.mark.parametrize("elements", [1, 3, 1000])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.71, 0.99, 1.0, 1.0000001, 1.01, 1.4, 1.42, 2.0])
def test_sums_of_squares_let_in_only_what_is_in_range(elements: int, share: float) -> None:
    gradient = torch.full((elements,), share * 1000 / 2**30)
    fits = bool((gradient.double() * 2**30).round().abs().amax() <= 1000)
    assert bool(in_range([torch.zeros(5), gradient], 30, 1000)) is fits
    gradient[1:] = 0
    assert bool(in_range([gradient, torch.zeros(5)], 30, 1000)) is fits


@pytest.mark.parametrize("bits", [None, 30])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_out_of_range(bits: int | None, bad: float) -> None:
    gradient = torch.zeros(100)
    assert in_range([gradient], bits, 1)
    gradient[57] = bad
    assert not in_range([gradient], bits, 2**53)


def test_a_large_gradient_is_finite_although_its_square_is_not() -> None:
    assert in_range([torch.tensor([1e30, -3e38])], None, 0)
    assert not in_range([torch.ones(3), torch.tensor([1e30, torch.nan])], None, 0)


def test_sums_stay_exact_up_to_the_limit_of_float64() -> None:
    limit = contribution_limit(3)
    total = torch.zeros(1, dtype=torch.float64)
    for _ in range(3):
        total += float(limit)
    assert int(total) == 3 * limit


def test_mean_divides_once_by_all_tokens() -> None:
    parts = [torch.tensor([3.0, 8.0], dtype=torch.float64), torch.tensor([5.0, -8.0], dtype=torch.float64)]
    assert mean_of_parts(parts, 2, 2).tolist() == [1.0, 0.0]
    assert mean_of_parts([part.float() for part in parts], 2, None).tolist() == [4.0, 0.0]
    assert parts[0].tolist() == [3.0, 8.0]


@pytest.mark.parametrize("bits", [None, 30])
def test_means_of_slices_are_slices_of_the_mean(bits: int | None) -> None:
    dtype = exact_sums.sum_dtype(bits)
    parts = [(torch.randn(1003) * 1e9).round().to(dtype) for _ in range(3)]
    whole = mean_of_parts(parts, 4096, bits)
    cuts = [0, 1, 130, 517, 1003]
    slices = [mean_of_parts([p[a:b] for p in parts], 4096, bits) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(slices), whole)


@pytest.mark.parametrize("bits", [None, 30])
def test_a_mean_of_many_tiles_is_that_of_all_at_once(bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [(torch.randn(1000) * 1e9).round().to(exact_sums.sum_dtype(bits)) for _ in range(3)]
    whole = mean_of_parts(parts, 4096, bits)
    monkeypatch.setattr(exact_sums, "TILE_ELEMENTS", 7)
    assert torch.equal(mean_of_parts(parts, 4096, bits), whole)


@pytest.mark.parametrize("tokens", [3, 2048, 2**24 - 1, 2**24 + 1, 2**30 + 3])
def test_the_mean_of_one_part_has_the_bits_of_a_division_in_float64(tokens: int) -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 18,)).to(torch.int32)  # of all magnitudes, subnormal ones too
    part = bits.view(torch.float32)
    mean = mean_of_parts([part], tokens, None)
    assert torch.equal(mean.view(torch.int32), (part.double() / tokens).float().view(torch.int32))


@pytest.mark.parametrize("bits", [None, 30])
def test_to_average_takes_little_more_memory_than_the_mean(bits: int | None) -> None:
    """A float64 copy of the whole sum was made: 8 bytes for each parameter of a stage, in every round."""
    parts = [torch.ones(1 << 24, dtype=exact_sums.sum_dtype(bits)) for _ in range(2)]
    mean_bytes = 4 * parts[0].numel()
    assert 0.9 * mean_bytes < peak_bytes(lambda: mean_of_parts(parts, 4096, bits)) < 1.3 * mean_bytes


def test_a_squared_norm_takes_the_memory_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """malloc kept the float64 copy of each block apart: 8 bytes for each parameter of a stage, for ever."""
    monkeypatch.setattr(exact_sums, "NORM_BLOCK_ELEMENTS", 1 << 13)  # without `tune_malloc` larger ones are mapped
    tensor = torch.ones(1 << 25)
    assert peak_bytes(lambda: squared_norms([tensor])) < 0.1 * 8 * tensor.numel()


@pytest.mark.parametrize("elements", [1, 2, 3, 1000, 300_001])
def test_squared_norm_is_right_and_ignores_the_number_of_threads(elements: int) -> None:
    tensor = torch.randn(elements)
    before = torch.get_num_threads()
    try:
        norms = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norms.update(squared_norms([tensor]))
    finally:
        torch.set_num_threads(before)
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(float(tensor.double().square().sum()), rel=1e-12)


@pytest.mark.parametrize("elements", [1, 3, 1000, 131_071, 300_001])
def test_squares_are_added_along_a_tree_of_halves(elements: int) -> None:
    def total(squares: list[float]) -> float:
        half = len(squares) // 2
        if not half:
            return squares[0]
        folded = [low + high for low, high in zip(squares[:half], squares[half : 2 * half], strict=True)]
        folded[0] += squares[-1] if len(squares) % 2 else 0.0
        return total(folded)

    tensor = torch.randn(elements)
    squares, block = tensor.double().square().tolist(), exact_sums.NORM_BLOCK_ELEMENTS
    expected = 0.0
    for start in range(0, elements, block):
        expected += total(squares[start : start + block])
    assert squared_norms([tensor]) == [expected]
