"""How many fields a message has, counted before protobuf makes anything of it.

A message of 4 MiB may have two million empty elements. protobuf reads them in one go, and lets no other thread of
Python run meanwhile. Here the fields are passed over one by one, and the first one too many ends it.

Source: https://protobuf.dev/programming-guides/encoding/; groups, which no message of ours has, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor

from swarm.errors import CorruptFrame
from swarm.limits import MESSAGE_ASIDE_BYTES

STREAMED_FIELDS_MAX: Final = 1 << 13  # of a long message that is read on the event loop: 1,024 rows of a relay
REQUEST_FIELDS_MAX: Final = 1 << 17  # of a long request: 16,384 hashes that are asked for, shards and files of a job
EVENT_FIELDS_MAX: Final = 1 << 20  # of a long event: 65,536 cells
_VARINT_BYTES_MAX: Final = 10


def check_fields(data: bytes | memoryview, kind: Descriptor, most: int) -> None:
    """CorruptFrame if a long message of this kind has more than `most` fields, its parts included.

    Also if it cannot be a message.
    """
    if len(data) < MESSAGE_ASIDE_BYTES:
        return
    count, waiting = 0, [(memoryview(data), kind)]
    while waiting:
        view, kind = waiting.pop()
        inner, at, end = _messages(kind), 0, len(view)
        while at < end:
            count += 1
            if count > most:
                raise CorruptFrame(f"a message of {len(data)} bytes has more than {most} fields")
            key, at = _varint(view, at)
            match key & 7:
                case 0:  # a number
                    _, at = _varint(view, at)
                case 1:  # 64 bits
                    at += 8
                case 2:  # a message, text, bytes, or numbers that are packed
                    length, at = _varint(view, at)
                    if length and (part := inner.get(key >> 3)) is not None:
                        waiting.append((view[at : at + length], part))
                    at += length
                case 5:  # 32 bits
                    at += 4
                case other:
                    raise CorruptFrame(f"a message has a field of wire type {other}")
        if at > end:
            raise CorruptFrame(f"a message of {len(data)} bytes ends inside a field")


@cache
def _messages(kind: Descriptor) -> Mapping[int, Descriptor]:
    """The fields that are messages themselves, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    if at < len(view) and view[at] < 0x80:
        return view[at], at + 1
    value = shift = 0
    for byte in view[at : at + _VARINT_BYTES_MAX]:
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise CorruptFrame("a message has a number without end")
