"""swarm.model.codec, int8: how far a value may move, how many bytes it takes, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.errors import CorruptFrame
from swarm.model.codec import INT8_BLOCK, decode, encode, encoded_bytes, round_trip
from tests.support.block_tensors import blocks_of, shapes, tensors


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


@given(tensors())
def test_what_arrived_travels_on_unchanged(tensor: Tensor) -> None:
    """A tensor that is resent, or relayed, does not decay."""
    once = round_trip(tensor, "int8")
    assert torch.equal(round_trip(once, "int8"), once)


@given(tensors(), st.integers(-400, 400).filter(bool))
def test_the_length_is_exact_and_any_other_is_refused(tensor: Tensor, off: int) -> None:
    payload, dtype, shape = encode(tensor, "int8")
    elements = tensor.numel()
    assert payload.nbytes == encoded_bytes(dtype, shape, "int8") == elements + 4 * math.ceil(elements / INT8_BLOCK)
    wrong = (bytes(payload) + bytes(max(off, 0)))[: max(payload.nbytes + off, 0)]
    with pytest.raises(CorruptFrame):
        decode(wrong, dtype, shape, "int8")


@given(tensors())
def test_equal_tensors_give_equal_bytes(tensor: Tensor) -> None:
    strided = torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]
    assert bytes(encode(tensor, "int8")[0]) == bytes(encode(strided, "int8")[0])


@given(shapes, st.binary(max_size=64), st.sampled_from([">", "<"]))
def test_any_bytes_of_the_right_length_are_a_tensor(shape: tuple[int, ...], seed: bytes, order: str) -> None:
    """A checksum guards the values; here only nothing may break."""
    size = encoded_bytes("int8", shape, "int8")
    payload = (seed + order.encode()) * size
    arrived = decode(payload[:size], "int8", shape, "int8")
    assert arrived.shape == shape
    assert arrived.dtype == torch.float32
