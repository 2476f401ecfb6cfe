"""swarm.model.codec, fp4 and int8: what a value becomes, how many bytes it takes, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.errors import CorruptFrame
from swarm.model.codec import decode, encode, encoded_bytes, round_trip
from tests.support.block_tensors import BLOCK, blocks_of, shapes, tensors

VALUE_BYTES = {"fp4": 0.5, "int8": 1.0}
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


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=BLOCK - 1))
def test_a_larger_value_never_arrives_as_a_smaller_one(values: list[float]) -> None:
    arrived = round_trip(torch.tensor([*sorted(values), 1.0]), "fp4")
    assert bool((arrived.diff() >= 0).all())
    assert {abs(value) for value in arrived.tolist()} <= set(VALUES)


@given(st.floats(-1, 1, width=32))
def test_the_nearest_value_is_taken_and_of_two_the_one_farther_from_zero(value: float) -> None:
    nearest = min(VALUES, key=lambda one: (abs(abs(value) - one), -one))
    assert round_trip(torch.tensor([value, 1.0]), "fp4").tolist() == [math.copysign(nearest, value) or 0.0, 1.0]


@given(tensors())
def test_a_value_moves_by_at_most_a_254th_of_the_largest_of_its_block(tensor: Tensor) -> None:
    arrived = round_trip(tensor, "int8")
    assert arrived.shape == tensor.shape
    largest = blocks_of(tensor).abs().amax(1, keepdim=True)
    # Two divisions and two products of float32 round by 2^-24 of their results each, which are at most the largest, and
    # the smallest results by half of the smallest float32 there is.
    allowed = largest.double() * (1 / 254 + 4 * 2.0**-24) + 2.0**-150
    moved = (blocks_of(arrived).double() - blocks_of(tensor).double()).abs()
    assert bool((moved <= allowed).all())
    assert torch.equal(blocks_of(arrived).abs().amax(1, keepdim=True), largest)


@pytest.mark.parametrize("codec", VALUE_BYTES)
@given(tensors())
def test_what_arrived_travels_on_unchanged(codec: str, tensor: Tensor) -> None:
    """A tensor that is resent, or relayed, does not decay."""
    once = round_trip(tensor, codec)
    assert torch.equal(round_trip(once, codec), once)


@pytest.mark.parametrize("codec", VALUE_BYTES)
@given(tensors(), st.integers(-400, 400).filter(bool))
def test_the_length_is_exact_and_any_other_is_refused(codec: str, tensor: Tensor, off: int) -> None:
    payload, dtype, shape = encode(tensor, codec)
    assert payload.nbytes == encoded_bytes(dtype, shape, codec)
    assert payload.nbytes == math.ceil(tensor.numel() * VALUE_BYTES[codec]) + 4 * math.ceil(tensor.numel() / BLOCK)
    wrong = (bytes(payload) + bytes(max(off, 0)))[: max(payload.nbytes + off, 0)]
    with pytest.raises(CorruptFrame):
        decode(wrong, dtype, shape, codec)


@pytest.mark.parametrize("codec", VALUE_BYTES)
@given(tensors())
def test_equal_tensors_give_equal_bytes(codec: str, tensor: Tensor) -> None:
    strided = torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]
    assert bytes(encode(tensor, codec)[0]) == bytes(encode(strided, codec)[0])


@pytest.mark.parametrize("codec", VALUE_BYTES)
@given(shapes, st.binary(min_size=1, max_size=64))
def test_any_bytes_of_the_right_length_are_a_tensor(codec: str, shape: tuple[int, ...], seed: bytes) -> None:
    """A checksum guards the values; here only nothing may break."""
    size = encoded_bytes(codec, shape, codec)
    arrived = decode((seed * size)[:size], codec, shape, codec)
    assert (arrived.shape, arrived.dtype) == (shape, torch.float32)
