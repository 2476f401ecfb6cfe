"""What a piece of a file unpacks to, by its own words, and whether so much memory is free: looked at before it is read.

Sources: parquet-format (PageHeader) in Thrift's compact protocol; RFC 8878 section 3.1.1 (Zstandard frames).

Not chosen: the size of a whole column chunk, because a chunk of gigabytes is read page by page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import psutil

from swarm.errors import InvalidData
from swarm.text import size

LITTLE_BYTES = 32 << 20  # so much is had without a look
HEADER_BYTES_MAX = 1 << 16  # of a page; it holds the least and the largest value of the page
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_HEAD_BYTES = 17  # magic, flags, the number of a dictionary and the size of the content
_VARINTS, _BINARY, _STRUCT = (4, 5, 6), 8, 12
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}  # two booleans, a byte, a double


def check_room(where: Callable[[], str], needed_bytes: int) -> None:
    """InvalidData unless so much memory is free; `where` names the file and the place in it."""
    if needed_bytes <= LITTLE_BYTES:
        return
    free_bytes = int(psutil.virtual_memory().available)
    if needed_bytes > free_bytes:
        raise InvalidData(
            f"{where()} takes {size(needed_bytes)} of memory, and {size(free_bytes)} are free",
            hint="write it anew in smaller parts, choose data.source so that it is left out, or use a larger machine",
        )


def page_bytes(file: BinaryIO, chunk: Any) -> list[int]:
    """What each page of a column chunk unpacks to, by its header; `chunk` is pyarrow's metadata.

    A dictionary comes first. Headers that cannot be read end the list: the library says what is wrong with them.
    """
    return list(_pages(file, chunk))


def zstd_window_bytes(head: bytes) -> int:
    """How far back a frame of Zstandard refers, by its first ZSTD_HEAD_BYTES; 0 if the frame is not one of those."""
    if head[:4] != ZSTD_MAGIC or len(head) < ZSTD_HEAD_BYTES:
        return 0
    flags = head[4]
    if not flags & 0x20:
        base = 1 << (10 + (head[5] >> 3))
        return base + base // 8 * (head[5] & 7)
    # A single segment: its window is its content.
    at = 5 + (0, 1, 2, 4)[flags & 3]
    length = (1, 2, 4, 8)[flags >> 6]
    return int.from_bytes(head[at : at + length], "little") + (256 if length == 2 else 0)


def _pages(file: BinaryIO, chunk: Any) -> Iterator[int]:
    starts = [chunk.data_page_offset, chunk.dictionary_page_offset if chunk.has_dictionary_page else None]
    at = min(start for start in starts if start is not None)
    end = at + chunk.total_compressed_size
    while at < end:
        file.seek(at)
        head = _Thrift(file.read(HEADER_BYTES_MAX))
        try:
            fields = head.struct()
        except (IndexError, ValueError):
            return
        unpacked, packed = fields.get(2, 0), fields.get(3, 0)
        yield unpacked
        if packed < 0:
            return
        at += head.at + packed


class _Thrift:
    """The whole numbers among the fields of a struct, by field; IndexError or ValueError if it is none."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.at = 0

    def struct(self, depth: int = 0) -> dict[int, int]:
        if depth > 8:
            raise ValueError("nested too deeply")
        numbers: dict[int, int] = {}
        field = 0
        while head := self._byte():
            kind = head & 15
            field = field + (head >> 4) if head >> 4 else self._number()
            number = self._value(kind, depth)
            if number is not None:
                numbers[field] = number
        return numbers

    def _value(self, kind: int, depth: int) -> int | None:
        if kind in _VARINTS:
            return self._number()
        if kind == _BINARY:
            length = self._varint()
            self.at += length
        elif kind == _STRUCT:
            self.struct(depth + 1)
        elif kind in _FIXED:
            self.at += _FIXED[kind]
        else:  # pages have no lists and maps
            raise ValueError(kind)
        return None

    def _number(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128 or shift > 63:
                return value

    def _byte(self) -> int:
        self.at += 1
        return self._raw[self.at - 1]
