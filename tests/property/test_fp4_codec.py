"""swarm.model.codec, fp4: which values there are, which one is taken, how many bytes it takes, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.errors import CorruptFrame
from swarm.model.codec import FP4_BLOCK, decode, encode, encoded_bytes, round_trip
from tests.support.block_tensors import blocks_of, tensors

VALUES = (0.0, *(2.0**-power for power in range(7)))


@given(tensors())
def test_a_value_moves_by_at_most_a_third_of_itself_or_a_128th_of_the_largest_of_its_block(tensor: Tensor) -> None:
    arrived = round_trip(tensor, "fp4")
    assert arrived.shape == tensor.shape
    given_, got = blocks_of(tensor), blocks_of(arrived)
    largest = given_.abs().amax(1, keepdim=True)
    # A little for float32 arithmetic, and half of the smallest float32 there is.
    allowed = torch.maximum(given_.abs() / 3, largest / 128) * (1 + 1e-5) + 2.0**-150
    assert bool(((got - given_).abs() <= allowed).all())
    assert torch.equal(got.abs().amax(1, keepdim=True), largest)


@given(tensors())
def test_what_arrived_travels_on_unchanged(tensor: Tensor) -> None:
    once = round_trip(tensor, "fp4")
    assert torch.equal(round_trip(once, "fp4"), once)


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=FP4_BLOCK - 1))
def test_a_larger_value_never_arrives_as_a_smaller_one(values: list[float]) -> None:
    arrived = round_trip(torch.tensor([*sorted(values), 1.0]), "fp4")
    assert bool((arrived.diff() >= 0).all())
    assert {abs(value) for value in arrived.tolist()} <= set(VALUES)


@given(st.floats(-1, 1, width=32))
def test_the_nearest_value_is_taken_and_of_two_the_one_farther_from_zero(value: float) -> None:
    nearest = min(VALUES, key=lambda one: (abs(abs(value) - one), -one))
    assert round_trip(torch.tensor([value, 1.0]), "fp4").tolist() == [math.copysign(nearest, value) or 0.0, 1.0]


@given(tensors(), st.integers(-400, 400).filter(bool))
def test_the_length_is_exact_and_any_other_is_refused(tensor: Tensor, off: int) -> None:
    payload, dtype, shape = encode(tensor, "fp4")
    elements = tensor.numel()
    assert payload.nbytes == encoded_bytes(dtype, shape, "fp4")
    assert payload.nbytes == math.ceil(elements / 2) + 4 * math.ceil(elements / FP4_BLOCK)
    wrong = (bytes(payload) + bytes(max(off, 0)))[: max(payload.nbytes + off, 0)]
    with pytest.raises(CorruptFrame):
        decode(wrong, dtype, shape, "fp4")


@given(st.integers(1, 600), st.binary(min_size=1, max_size=64))
def test_any_bytes_of_the_right_length_are_a_tensor(elements: int, seed: bytes) -> None:
    size = encoded_bytes("fp4", (elements,), "fp4")
    arrived = decode((seed * size)[:size], "fp4", (elements,), "fp4")
    assert (arrived.shape, arrived.dtype) == ((elements,), torch.float32)
