"""The header of a safetensors file, which says where each tensor lies; nothing in it is trusted.

    | 8 bytes: length N, little-endian | N bytes of JSON: name -> dtype, shape, offsets | tensors, without gaps |

Standard library only, so that the client checks a model before it uploads it, and a stage server before it asks for a
byte of its tensors. Pickled weights have no header and are never opened.

A header is read value by value (swarm/long_json.py): the first entry too many ends it, and other threads have their
turn in between. It still takes up to a second, so it is no work for an event loop.

Source: the format's description, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import merge
from math import prod
from pathlib import Path
from typing import Any, Final, cast

from swarm.errors import InvalidModel
from swarm.hf.own_files import check_no_pointer, open_own
from swarm.long_json import Pairs, read_long

LENGTH_BYTES: Final = 8
HEADER_BYTES_MAX: Final = 8 << 20  # of JSON, which takes many times as much memory; files of today have 0.3 MiB
ENTRIES_MAX: Final = 1 << 15  # a stage of 1,024 layers has some 12,000; to free more at once holds up other threads
VALUES_MAX: Final = 1 << 18  # of a header; a tensor has about six
DIMENSIONS_MAX: Final = 16
NAME_CHARACTERS_MAX: Final = 500
NUMBER_MAX: Final = (1 << 63) - 1
SORTED_AT_ONCE: Final = 4096  # no other thread runs meanwhile
ITEM_BYTES: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_DAMAGED_HINT: Final = "the file is damaged: copy or download it again"
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
    check_no_pointer(path, opening)
    length = int.from_bytes(opening, "little")
    if length > HEADER_BYTES_MAX or LENGTH_BYTES + length > size_bytes:
        raise InvalidModel(
            f"{path} is no safetensors file: its header would have {length} bytes of {size_bytes}",
            hint=f"copy or download it again; if it holds pickled weights, {CONVERT}",
        )
    return length


def parse_header(path: str, size_bytes: int, header: bytes) -> dict[str, StoredTensor]:
    """The tensors of a file by name, in the order of their bytes; `header` is the JSON alone.

    InvalidModel names file and tensor: no JSON, a name twice, too many tensors, an unknown dtype, offsets outside of
    the file, tensors that overlap or leave gaps, or a file that ends early.
    """
    begin = LENGTH_BYTES + len(header)
    tensors = [_tensor(path, name, entry, begin) for name, entry in _entries(path, header)]
    in_order: dict[str, StoredTensor] = {}
    end = begin
    for tensor in _in_order(tensors):
        if tensor.stop > size_bytes:
            raise InvalidModel(
                f"{path} ends at byte {size_bytes}, before tensor {tensor.name} does at {tensor.stop}",
                hint="the file is cut short: copy or download it again",
            )
        if tensor.start != end:
            what = f"tensor {tensor.name} of {path} begins at byte {tensor.start}, expected was {end}"
            raise InvalidModel(what, hint=_DAMAGED_HINT)
        end = tensor.stop
        in_order[tensor.name] = tensor
    if end != size_bytes:
        raise InvalidModel(f"{path} has {size_bytes} bytes, its tensors end at {end}", hint=_DAMAGED_HINT)
    return in_order


def read_header(path: Path, name: str) -> dict[str, StoredTensor]:
    """The tensors of the local file `path`, called `name` in errors and results; it has to belong to its folder."""
    try:
        with open_own(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            length = header_bytes(name, size_bytes, file.read(LENGTH_BYTES))
            return parse_header(name, size_bytes, file.read(length))
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error


def _entries(path: str, header: bytes) -> Iterable[tuple[str, Any]]:
    """Name and description of each tensor."""
    refused = f"{path} is no safetensors file: its header"
    tensors = 0

    def count(table: Pairs) -> None:
        nonlocal tensors
        tensors += any(key == "dtype" for key, _ in table)
        if tensors > ENTRIES_MAX:
            raise InvalidModel(f"{path} names more than {ENTRIES_MAX} tensors", hint="split it into several files")

    if not header.lstrip(b" \t\n\r").startswith(b"{"):
        raise InvalidModel(f"{refused} is no table of tensors", hint=CONVERT)
    try:
        entries = read_long(header, VALUES_MAX, count)
    except ValueError as error:
        raise InvalidModel(f"{refused} is no JSON: {error}", hint=CONVERT) from None
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise InvalidModel(f"{refused} has __metadata__ that is no text", hint=CONVERT)
    return cast(dict[str, Any], entries).items()


def _tensor(path: str, name: str, entry: Any, begin: int) -> StoredTensor:
    if not name.isprintable() or len(name) > NAME_CHARACTERS_MAX:
        raise InvalidModel(f"{path} holds a tensor with the impossible name {name[:60]!r}")
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]} if not any(
            isinstance(more, dict) for more in entry.values()
        ):
            pass
        case _:
            called = name[:NAME_CHARACTERS_MAX]
            raise InvalidModel(f"tensor {called} of {path} is not described by dtype, shape and offsets")
    if dtype not in ITEM_BYTES:
        raise InvalidModel(f"tensor {name} of {path} has the unknown dtype {dtype[:20]!r}", hint=CONVERT)
    if len(shape) > DIMENSIONS_MAX or not all(_is_count(size) for size in shape):
        raise InvalidModel(f"tensor {name} of {path} has an impossible shape of {len(shape)} dimensions")
    if not _is_count(start) or not _is_count(stop):
        raise InvalidModel(f"tensor {name} of {path} has offsets that no file has")
    size_bytes = prod(shape) * ITEM_BYTES[dtype]
    if stop - start != size_bytes:
        raise InvalidModel(
            f"tensor {name} of {path}, {dtype} {shape}, has {size_bytes} bytes, "
            f"its offsets {start} to {stop} say {stop - start}"
        )
    return StoredTensor(path, name, dtype, tuple(shape), begin + start, begin + stop)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= NUMBER_MAX


def _in_order(tensors: Sequence[StoredTensor]) -> Iterable[StoredTensor]:
    """By their bytes, sorted in portions."""

    def place(tensor: StoredTensor) -> tuple[int, int]:
        return tensor.start, tensor.stop

    portions = [
        sorted(tensors[first : first + SORTED_AT_ONCE], key=place) for first in range(0, len(tensors), SORTED_AT_ONCE)
    ]
    return merge(*portions, key=place)
