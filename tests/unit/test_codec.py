"""swarm.codec: tensors to bytes and back."""

from __future__ import annotations

import pytest
import torch

from swarm.codec import CODECS, decode, decode_slice, encode, encode_slice, encoded_bytes, round_trip
from swarm.errors import CorruptFrame


@pytest.mark.parametrize("codec", CODECS)
def test_a_tensor_arrives_as_its_cast(codec: str) -> None:
    tensor = torch.randn(2, 3, 5)
    payload, dtype, shape = encode(tensor, codec)
    assert payload.nbytes == encoded_bytes(dtype, shape)
    arrived = decode(bytes(payload), dtype, shape, codec)
    assert arrived.dtype == torch.float32
    assert torch.equal(arrived, tensor.to(CODECS[codec].restore(CODECS[codec].shrink(tensor)).dtype)) == (
        codec == "none"
    )
    assert torch.equal(arrived, CODECS[codec].shrink(tensor).float())
    assert torch.equal(round_trip(arrived, codec), arrived)


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_decoded_is_aligned_writable_memory_of_its_own(codec: str) -> None:
    payload, dtype, shape = encode(torch.ones(4, 4), codec)
    buffer = bytearray(b"x" + bytes(payload))
    arrived = decode(memoryview(buffer)[1:], dtype, shape, codec)
    assert arrived.data_ptr() % 64 == 0
    buffer[:] = bytes(len(buffer))
    arrived += 1
    assert torch.equal(arrived, torch.full((4, 4), 2.0))


def test_a_tensor_that_is_not_contiguous_is_sent_in_its_order() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(round_trip(tensor, "none"), tensor)


def test_payload_cannot_be_written() -> None:
    payload, _, _ = encode(torch.ones(2), "none")
    assert payload.readonly


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_travel_unchanged(dtype: torch.dtype) -> None:
    whole = torch.randn(10, dtype=dtype)
    payload, name = encode_slice(whole[3:7])
    assert torch.equal(decode_slice(payload, name, 4), whole[3:7])


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
    ],
)
def test_a_frame_whose_parts_disagree_is_refused(
    payload: bytes, dtype: str, shape: tuple[int, ...], codec: str
) -> None:
    with pytest.raises(CorruptFrame):
        decode(payload, dtype, shape, codec)


def test_a_slice_of_another_dtype_or_length_is_refused() -> None:
    with pytest.raises(CorruptFrame):
        decode_slice(bytes(8), "bfloat16", 4)
    with pytest.raises(CorruptFrame):
        decode_slice(bytes(8), "float32", 3)
