"""Weights in another precision, without torch: float32 in, float32, float16 or bfloat16 out.

Every conversion rounds to nearest, ties to even, as torch does. A value outside the range of float16 is refused, where
torch would make it infinite.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from swarm.errors import InvalidModel
from swarm.hf.safetensors_header import StoredTensor, read_header

Dtype: TypeAlias = Literal["keep", "float32", "bfloat16", "float16"]
ELEMENTS_AT_ONCE = 4 << 20
_HEADER_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FLOATS = ("F32", "BF16", "F16")


def convert_folder(folder: Path, dtype: Dtype) -> None:
    """Rewrite the safetensors files of a model folder, its index and config.json, in place.

    InvalidModel if a file is none, or a weight does not fit the range of `dtype`.
    """
    if dtype == "keep":
        return
    total_bytes = sum(convert_file(path, dtype) for path in sorted(folder.glob("*.safetensors")))
    _change_json(folder / "config.json", lambda values: values | {"dtype": dtype})
    _change_json(
        folder / "model.safetensors.index.json",
        lambda values: values | {"metadata": {**values.get("metadata", {}), "total_size": total_bytes}},
    )


def convert_file(path: Path, dtype: Dtype) -> int:
    """Rewrite one safetensors file; returns the bytes of its tensors."""
    tensors = read_header(path, path.name)
    wanted = _HEADER_NAMES[dtype]
    item_bytes = 4 if wanted == "F32" else 2
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors.values():
        if tensor.dtype not in _FLOATS:
            raise InvalidModel(f"tensor {tensor.name} of {path.name} is {tensor.dtype}, which is not converted")
        count = (tensor.stop - tensor.start) // (4 if tensor.dtype == "F32" else 2)
        header[tensor.name] = {
            "dtype": wanted,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + count * item_bytes],
        }
        offset += count * item_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    part = path.with_name(f".{path.name}.part")
    with path.open("rb") as source, part.open("xb") as target:
        target.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            _convert(source, target, tensor, dtype)
    part.replace(path)
    return offset


def to_dtype(values: npt.NDArray[np.float32], dtype: Dtype) -> bytes:
    """The little-endian bytes of float32 values in another precision; OverflowError if one leaves its range."""
    match dtype:
        case "bfloat16":
            bits = values.astype("<f4").view("<u4")
            # Half of the dropped part, less one where the kept part is even: ties go to even.
            rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype("<u4")) >> 16
            rounded = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
            out = rounded.astype("<u2")
            infinite = (out & 0x7FFF) == 0x7F80
        case "float16":
            with np.errstate(over="ignore"):
                half = values.astype("<f2")
            out, infinite = half.view("<u2"), np.isinf(half)
        case _:
            return values.astype("<f4").tobytes()
    if bool(np.any(infinite & np.isfinite(values))):
        raise OverflowError(f"{float(np.max(np.abs(values))):g} is too large for {dtype}")
    return out.tobytes()


def _convert(source: BinaryIO, target: BinaryIO, tensor: StoredTensor, dtype: Dtype) -> None:
    item_bytes = 4 if tensor.dtype == "F32" else 2
    source.seek(tensor.start)
    left = tensor.stop - tensor.start
    while left:
        raw = source.read(min(left, ELEMENTS_AT_ONCE * item_bytes))
        if not raw:
            raise InvalidModel(f"{tensor.path} ends within tensor {tensor.name}")
        left -= len(raw)
        try:
            target.write(to_dtype(_floats(raw, tensor.dtype), dtype))
        except OverflowError as error:
            raise InvalidModel(
                f"tensor {tensor.name} does not fit: {error}", hint="pull with --dtype bfloat16 or keep"
            ) from None


def _floats(raw: bytes, dtype: str) -> npt.NDArray[np.float32]:
    match dtype:
        case "F32":
            return np.frombuffer(raw, "<f4")
        case "F16":
            return np.frombuffer(raw, "<f2").astype("<f4")
        case _:
            return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")


def _change_json(path: Path, change: Any) -> None:
    if not path.exists():
        return
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{path.name} is no JSON: {error}") from None
    path.write_text(json.dumps(change(values), indent=2, sort_keys=True) + "\n")
