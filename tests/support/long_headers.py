"""Headers of safetensors files of the greatest length: what an honest model has, and what takes longest to refuse."""

from __future__ import annotations

from swarm.hf.safetensors_header import ENTRIES_MAX, HEADER_BYTES_MAX


def entry(count: int, start: int = 0) -> bytes:
    return b'{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}' % (count, start, start + count)


def honest(order: list[int]) -> bytes:
    return b"{" + b",".join(b'"model.layers.%d.%b.weight":%b' % (at, b"x" * 160, entry(1, at)) for at in order) + b"}"


def filled(begin: bytes, again: bytes, end: bytes = b"") -> bytes:
    """A header of the greatest length that repeats something."""
    return begin + again * ((HEADER_BYTES_MAX - len(begin) - len(end)) // len(again)) + end


ORDER = list(range(ENTRIES_MAX))
LONG = {
    "all tensors": honest(ORDER),
    "in another order": honest([at * 40_503 % ENTRIES_MAX for at in ORDER]),
    "one of them twice": honest([*ORDER[:-1], 0]),
    "the last twice": honest([*ORDER[:-1], ENTRIES_MAX - 2]),
    "nothing but a name": filled(b"{", b'"z":0,', b'"z":0}'),
    "one tensor": filled(b"{", b'"z":' + entry(0) + b",", b'"z":' + entry(0) + b"}"),
    "many tensors": b"{" + b",".join(b'"%d":%b' % (at, entry(0)) for at in range(140_000)) + b"}",
    "empty entries": filled(b"{", b'"":{},', b'"":{}}'),
    "other texts": b'{"__metadata__":{' + b",".join(b'"%d":""' % at for at in range(600_000)) + b"}}",
    "one other text": filled(b'{"__metadata__":{', b'"a":"",', b'"a":""}}'),
    "a long text": filled(b'{"__metadata__":{"a":"', b"x", b'"}}'),
    "a long text of escapes": filled(b'{"__metadata__":{"a":"', b"\\n", b'"}}'),
    "a text without end": filled(b'{"__metadata__":{"a":"', b"\\\\"),
    "numbers for a text": filled(b'{"__metadata__":{"a":[', b"0,", b"0]}}"),
    "a list": filled(b"[", b"0,", b"0]"),
    "lists in lists": filled(b"", b"["),
    "lists in an entry": filled(b'{"a":{"dtype":"U8","shape":', b"["),
    "tables in tables": filled(b"", b'{"a":'),
    "a long name": filled(b'{"', b"a", b'":0}'),
    "a long name of escapes": filled(b'{"', b"\\u0061", b'":0}'),
    "a name without end": filled(b'{"', b"\\\\"),
    "spaces": filled(b"{", b" ", b"}"),
    "spaces in an entry": filled(b'{"a":{', b" ", b"}}"),
    "large numbers": filled(b'{"a":{"dtype":"U8","shape":[', b"9", b'],"data_offsets":[0,0]}}'),
    "no UTF-8": filled(b"{", b"\xff"),
}
