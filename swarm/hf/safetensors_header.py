"""The header of a safetensors file, which says where each tensor lies; nothing in it is trusted.

    | 8 bytes: length N, little-endian | N bytes of JSON: name -> dtype, shape, offsets | tensors, without gaps |

Standard library only, so that the client checks a model before it uploads it, and a stage server before it asks for a
byte of its tensors. Pickled weights have no header and are never opened.

Source: the format's description, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from swarm.errors import InvalidModel
from swarm.limits import PARAMETERS_MAX

LENGTH_BYTES: Final = 8
HEADER_BYTES_MAX: Final = 8 << 20  # of JSON, which takes many times as much memory; files of today have 0.3 MiB
ENTRIES_MAX: Final = PARAMETERS_MAX
DIMENSIONS_MAX: Final = 16
NAME_CHARACTERS_MAX: Final = 500
ITEM_BYTES: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
CONVERT: Final = "save it again with: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: bytes [start, stop) of the file `path`."""

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header_bytes(path: str, size_bytes: int, opening: bytes) -> int:
    """Length of the header that the first 8 bytes of a file announce; InvalidModel if the file cannot hold it."""
    if size_bytes < LENGTH_BYTES or len(opening) != LENGTH_BYTES:
        raise InvalidModel(f"{path} has {size_bytes} bytes and is no safetensors file", hint=CONVERT)
    length = int.from_bytes(opening, "little")
    if length > HEADER_BYTES_MAX or LENGTH_BYTES + length > size_bytes:
        raise InvalidModel(
            f"{path} is no safetensors file: its header would have {length} bytes of {size_bytes}",
            hint=f"copy or download it again; if it holds pickled weights, {CONVERT}",
        )
    return length


def parse_header(path: str, size_bytes: int, header: bytes) -> dict[str, StoredTensor]:
    """The tensors of a file by name, in the order of their bytes; `header` is the JSON alone.

    InvalidModel names file and tensor: no JSON, a name twice, an unknown dtype, offsets outside of the file, tensors
    that overlap or leave gaps, or a file that ends early.
    """
    try:
        entries = json.loads(header, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{path} is no safetensors file: its header is no JSON", hint=CONVERT) from error
    if not isinstance(entries, dict):
        raise InvalidModel(f"{path} is no safetensors file: its header is no table of tensors", hint=CONVERT)
    if len(entries) > ENTRIES_MAX:
        what = f"{path} names {len(entries)} tensors, more than {ENTRIES_MAX}"
        raise InvalidModel(what, hint="split it into several files")
    begin = LENGTH_BYTES + len(header)
    found = [_tensor(path, name, entry, begin) for name, entry in entries.items() if name != "__metadata__"]
    found.sort(key=lambda tensor: (tensor.start, tensor.stop))
    end = begin
    for tensor in found:
        if tensor.stop > size_bytes:
            raise InvalidModel(
                f"{path} ends at byte {size_bytes}, before tensor {tensor.name} does at {tensor.stop}",
                hint="the file is cut short: copy or download it again",
            )
        if tensor.start != end:
            raise InvalidModel(f"tensor {tensor.name} of {path} begins at byte {tensor.start}, expected was {end}")
        end = tensor.stop
    if end != size_bytes:
        raise InvalidModel(f"{path} has {size_bytes} bytes, its tensors end at {end}")
    return {tensor.name: tensor for tensor in found}


def read_header(path: Path, name: str) -> dict[str, StoredTensor]:
    """The tensors of the local file `path`, called `name` in errors and results."""
    try:
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            length = header_bytes(name, size_bytes, file.read(LENGTH_BYTES))
            return parse_header(name, size_bytes, file.read(length))
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error


def _unique(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidModel(f"{path} names {twice!r} twice in its header")
    return entries


def _tensor(path: str, name: str, entry: Any, begin: int) -> StoredTensor:
    if not name.isprintable() or len(name) > NAME_CHARACTERS_MAX:
        raise InvalidModel(f"{path} holds a tensor with the impossible name {name[:NAME_CHARACTERS_MAX]!r}")
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise InvalidModel(f"tensor {name} of {path} is not described by dtype, shape and offsets")
    if dtype not in ITEM_BYTES:
        raise InvalidModel(f"tensor {name} of {path} has the unknown dtype {dtype[:20]!r}")
    if len(shape) > DIMENSIONS_MAX or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidModel(f"tensor {name} of {path} has the impossible shape {str(shape)[:100]}")
    if start < 0 or stop - start != prod(shape) * ITEM_BYTES[dtype]:
        raise InvalidModel(
            f"tensor {name} of {path}, {dtype} {shape}, has {prod(shape) * ITEM_BYTES[dtype]} bytes, "
            f"its offsets {start} to {stop} say {stop - start}"
        )
    return StoredTensor(path, name, dtype, tuple(shape), begin + start, begin + stop)
