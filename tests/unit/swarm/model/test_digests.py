"""swarm.model.digests: digests that every device and every order gives alike, and that tell states apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.model import digests
from swarm.model.digests import ROW, digest_of

CPU = torch.device("cpu")
SIZES = (1, 3, ROW - 1, ROW, ROW + 1, 5 * ROW + 17)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def values(elements: int, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def of(tensor: Tensor) -> str:
    return digest_of([("w", tensor)])


def by_hand(tensor: Tensor) -> int:
    """The digest of one tensor from its definition, in Python's whole numbers."""

    def mix(number: int) -> int:
        return ((number ^ (number >> 32)) * digests._SECOND) % 2**64

    bits = tensor.view(torch.int32).tolist()
    # The last row is never whole: it may be empty.
    rows = [bits[start : start + ROW] for start in range(0, len(bits) + 1, ROW)]
    total = 0
    for at, row in enumerate(rows):
        factors = ((mix(place * digests._FIRST % 2**64) << 15) + 2 * place + 1 for place in range(len(row)))
        total += mix(sum(bit * factor for bit, factor in zip(row, factors, strict=True)) % 2**64) * (
            (at * digests._SECOND << 1) + 1
        )
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("elements", SIZES)
def test_a_digest_follows_its_definition(elements: int) -> None:
    tensor = values(elements)
    assert digests._digests_here([tensor]) == digests._digests_there([tensor], CPU) == [by_hand(tensor)]


def test_digests_of_many_tensors_are_those_of_each() -> None:
    tensors = [values(elements, seed) for seed, elements in enumerate((0, *SIZES, 2 * ROW, 0))]
    assert digests._digests_here(tensors) == digests._digests_there(tensors, CPU)


def test_a_digest_does_not_depend_on_threads_groups_of_rows_or_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(9 * ROW + 5)
    expected, number = of(tensor), by_hand(tensor)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 3, 1 << 10):
            monkeypatch.setattr(digests, "ROWS_ELSEWHERE", rows)
            assert (of(tensor), *digests._digests_there([tensor], CPU)) == (expected, number)
    strided = torch.stack([tensor, values(tensor.numel(), seed=1)], dim=1)[:, 0]
    assert not strided.is_contiguous()
    assert of(strided) == expected


@given(elements=st.sampled_from(SIZES), place=st.integers(0), bit=st.integers(0, 31), seed=st.integers(0, 3))
def test_every_changed_bit_changes_the_digest(elements: int, place: int, bit: int, seed: int) -> None:
    tensor = values(elements, seed)
    changed = tensor.clone()
    changed.view(torch.int32)[place % elements] ^= torch.tensor(1).int() << bit
    assert of(changed) != of(tensor)
    assert digests._digests_there([changed], CPU) == digests._digests_here([changed])


@given(first=st.integers(0, 3 * ROW), second=st.integers(0, 3 * ROW), one=st.integers(0, 31), other=st.integers(0, 31))
def test_two_elements_that_trade_places_change_the_digest(first: int, second: int, one: int, other: int) -> None:
    """Whatever the elements; also those that differ in their highest bit only, such as 0.0 and -0.0."""
    bits = torch.zeros(3 * ROW + 1, dtype=torch.int32)
    bits[first], bits[second] = torch.tensor([1, 1]).int() << torch.tensor([one, other]).int()
    swapped = bits.clone()
    swapped[first], swapped[second] = bits[second].clone(), bits[first].clone()
    differ = not torch.equal(bits, swapped)
    assert (of(bits.view(torch.float32)) != of(swapped.view(torch.float32))) == differ


@given(first=st.integers(0, 3 * ROW), second=st.integers(0, 3 * ROW), seed=st.integers(0, 3))
def test_two_signs_that_flip_change_the_digest(first: int, second: int, seed: int) -> None:
    tensor = values(3 * ROW + 1, seed)
    flipped = tensor.clone()
    flipped[first] *= -1.0
    flipped[second] *= -1.0
    assert (of(flipped) != of(tensor)) == (first != second)


def test_whole_rows_that_trade_places_change_the_digest() -> None:
    tensor = values(4 * ROW).view(4, ROW)
    seen = {of(tensor[list(order)].view(-1)) for order in ((0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2), (3, 2, 1, 0))}
    assert len(seen) == 4


def test_names_shapes_types_order_and_number_of_tensors_are_part_of_the_digest() -> None:
    a, b = values(6), values(6, seed=1)
    states: list[list[tuple[str, Tensor]]] = [
        [("a", a), ("b", b)],
        [("a", b), ("b", a)],
        [("b", b), ("a", a)],
        [("a", a), ("c", b)],
        [("a", a)],
        [("a", a.view(2, 3)), ("b", b)],
        [("a", a.view(3, 2)), ("b", b)],
        [("a", a.view(torch.int32)), ("b", b)],
        [("a", a), ("b", b), ("c", torch.zeros(()))],
        [("a", a), ("b", b), ("c", torch.zeros(1))],
        [],
    ]
    assert len({digest_of(state) for state in states}) == len(states)


def test_zeros_and_negative_zeros_and_nans_of_other_bits_are_told_apart() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    seen = {of(torch.tensor([number])) for number in (0.0, -0.0, 1e-45, 1.0)} | {of(nan.view(1)) for nan in nans[:2]}
    assert len(seen) == 6
