"""swarm.model.codec: tensors to bytes and back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from swarm.errors import CorruptFrame
from swarm.model.codec import (
    CODECS,
    INT8_TILE,
    SLICE_CODECS,
    arrived,
    decode,
    decode_slice,
    encode,
    encode_slice,
    encoded_bytes,
    overflows,
    round_trip,
    slice_bytes,
)

CASTS = {"none": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("codec", CASTS)
def test_a_tensor_arrives_as_its_cast(codec: str) -> None:
    tensor = torch.randn(2, 3, 5)
    payload, dtype, shape = encode(tensor, codec)
    assert payload.nbytes == encoded_bytes(dtype, shape, codec) == 30 * CASTS[codec].itemsize
    arrived = decode(bytes(payload), dtype, shape, codec)
    assert arrived.dtype == torch.float32
    assert torch.equal(arrived, tensor.to(CASTS[codec]).float())
    assert torch.equal(round_trip(arrived, codec), arrived)


def test_int8_sends_values_then_scales() -> None:
    tensor = torch.cat([torch.tensor([-1.0, 0.5, 0.25, 0.0]), torch.zeros(252), torch.tensor([254.0, 1.0, 3.0])])
    payload, dtype, shape = encode(tensor, "int8")
    assert (dtype, shape) == ("int8", (259,))
    assert payload.nbytes == encoded_bytes("int8", (259,), "int8") == 259 + 2 * 4
    # 0.5 is 63.5 steps and 3.0 is 1.5 steps: halves go to the even neighbour; 1.0 is half a step.
    assert np.frombuffer(payload[:4], np.int8).tolist() == [-127, 64, 32, 0]
    assert np.frombuffer(payload[256:259], np.int8).tolist() == [127, 0, 2]
    assert np.frombuffer(payload[259:], np.float32).tolist() == [1.0, 254.0]


def test_fp4_sends_two_values_in_a_byte_then_scales() -> None:
    tensor = torch.cat([torch.tensor([-4.0, 2.0, 1.5, 0.02]), torch.zeros(252), torch.tensor([3.0])])
    payload, dtype, shape = encode(tensor, "fp4")
    assert (dtype, shape) == ("fp4", (257,))
    assert payload.nbytes == encoded_bytes("fp4", (257,), "fp4") == 129 + 2 * 4
    # Exponents 7, 6, then 6 again (0.375 of the scale is half of the way from 2^-2 to 2^-1), then 0; a sign is 8.
    assert payload[:2].tolist() == [15 + (6 << 4), 6]
    assert payload[128] == 7
    assert np.frombuffer(payload[129:], np.float32).tolist() == [4.0, 3.0]
    assert round_trip(tensor, "fp4")[:4].tolist() == [-4.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize("codec", ["int8", "fp4"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_blocks_carry_what_is_not_finite_and_no_other_does(value: float, codec: str) -> None:
    tensor = torch.randn(3, 256)
    tensor[1, 77] = value
    arrived = round_trip(tensor, codec)
    assert arrived[1].isnan().all()
    assert arrived[0].isfinite().all()
    assert arrived[2].isfinite().all()


def test_int8_of_several_tiles_is_that_of_its_parts() -> None:
    whole = torch.randn(INT8_TILE + 256 * 5 + 3, generator=torch.Generator().manual_seed(0))
    parts = [round_trip(part, "int8") for part in (whole[: 256 * 9], whole[256 * 9 : INT8_TILE], whole[INT8_TILE:])]
    assert torch.equal(round_trip(whole, "int8"), torch.cat(parts))


def test_int8_keeps_gaussian_values_within_a_percent() -> None:
    tensor = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    error = (round_trip(tensor, "int8") - tensor).square().mean().sqrt() / tensor.square().mean().sqrt()
    assert 0.005 < float(error) < 0.01


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_decoded_is_aligned_writable_memory_of_its_own(codec: str) -> None:
    payload, dtype, shape = encode(torch.ones(4, 4), codec)
    assert payload.readonly
    buffer = bytearray(b"x" + bytes(payload))
    arrived = decode(memoryview(buffer)[1:], dtype, shape, codec)
    assert arrived.data_ptr() % 64 == 0
    buffer[:] = bytes(len(buffer))
    arrived += 1
    assert torch.equal(arrived, torch.full((4, 4), 2.0))


def test_a_tensor_that_is_not_contiguous_is_sent_in_its_order() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(round_trip(tensor, "none"), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_travel_unchanged(dtype: torch.dtype) -> None:
    whole = torch.randn(10, dtype=dtype)
    payload, name = encode_slice(whole[3:7])
    assert payload.nbytes == slice_bytes(name, 4)
    assert torch.equal(decode_slice(payload, name, 4), whole[3:7])


@pytest.mark.parametrize("codec", SLICE_CODECS)
def test_a_slice_says_in_its_dtype_how_it_was_encoded(codec: str) -> None:
    part = torch.randn(1000)[3:303]  # not whole blocks
    payload, name = encode_slice(part, codec)
    assert name == codec
    assert payload.nbytes == slice_bytes(name, 300)
    assert torch.equal(decode_slice(payload, name, 300), round_trip(part, codec))


@pytest.mark.parametrize(
    ("payload", "dtype", "shape", "codec"),
    [
        (bytes(24), "float32", (2, 3), "int3"),
        (bytes(24), "float32", (2, 3), "bfloat16"),
        (bytes(24), "int64", (3,), "none"),
        (bytes(23), "float32", (2, 3), "none"),
        (bytes(25), "float32", (2, 3), "none"),
        (b"", "float32", (), "none"),
        (b"", "float32", (0,), "none"),
        (b"", "float32", (-1, 2), "none"),
        (bytes(4), "float32", (1,) * 65, "none"),
        (bytes(8), "float32", (1 << 40, 1 << 40), "none"),
        (bytes(9), "int8", (6,), "int8"),
        (bytes(11), "int8", (6,), "int8"),
        (bytes(6), "int8", (6,), "int8"),
        (bytes(261), "int8", (257,), "int8"),
        (bytes(24), "float32", (6,), "int8"),
        (bytes(10), "int8", (6,), "none"),
        (b"", "int8", (0,), "int8"),
    ],
)
def test_a_frame_whose_parts_disagree_is_refused(
    payload: bytes, dtype: str, shape: tuple[int, ...], codec: str
) -> None:
    with pytest.raises(CorruptFrame):
        decode(payload, dtype, shape, codec)


def test_a_slice_of_another_dtype_or_length_is_refused() -> None:
    with pytest.raises(CorruptFrame):
        decode_slice(bytes(8), "float16", 4)
    with pytest.raises(CorruptFrame):
        decode_slice(bytes(7), "bfloat16", 4)
    with pytest.raises(CorruptFrame):
        decode_slice(bytes(4), "int8", 4)
    with pytest.raises(CorruptFrame):
        decode_slice(bytes(8), "float32", 3)


def test_values_that_only_the_codec_makes_infinite_are_told_from_others() -> None:
    """A large activation became infinite in float16, and people were told to look for NaN in their weights."""
    for value in (0.0, 1.0, 65504.0, 65519.9, 65520.0, -65520.0, 1e30, math.inf, math.nan):
        for codec, cast in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
            tensor = torch.tensor([[1.0, value]])
            is_beyond = bool(tensor.isfinite().all() and not tensor.to(cast).isfinite().all())
            assert bool(overflows(tensor, codec)) == is_beyond, (value, codec)
    assert overflows(torch.tensor([1e30]), "int8") is overflows(torch.tensor([1e30]), "none") is None


def test_what_arrives_for_a_gpu_is_kept_though_no_memory_can_be_pinned() -> None:
    """The cell had the tensor already when that failed, so it was lost. Without a GPU nothing can be pinned."""
    tensor = torch.arange(5.0)
    there = arrived(*encode(tensor, "none"), "none", torch.device("cuda"))
    assert torch.equal(there.payload.view(torch.float32), tensor)
