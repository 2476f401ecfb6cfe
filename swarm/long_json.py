"""Long JSON of others: manifests and indexes, of which an honest one may have megabytes.

It is read value by value in Python, so other threads have their turn in between, and heartbeats go on. How many values
there can be is counted first, as a table or a list of millions also takes long to be forgotten.

Not chosen: json.loads, because it lets no other thread run meanwhile, which is 0.1 s for 8 MiB. Nor a lower bound for
the bytes, because the index of a model of 10,000 layers has 8 MiB.
"""

from __future__ import annotations

import json
import re
from json.decoder import JSONArray, JSONObject, scanstring  # type: ignore[attr-defined]  # the stubs leave them out
from typing import Any, cast

VALUES_MAX = 1 << 17  # a name with its value counts as one; a checkpoint of 10,000 files has 30,000
_PIECE = 4096
_CONSTANTS = {"null": None, "true": True, "false": False}
_PLAIN = re.compile(r"null|true|false|(-?(?:0|[1-9][0-9]{0,99}))(\.[0-9]{1,99})?([eE][-+]?[0-9]{1,9})?")


def read_long(content: bytes) -> Any:
    """The value of a text in JSON; ValueError for none, for a name twice in a table, and for too many values."""
    if content.count(b",") + content.count(b"\\") >= VALUES_MAX:
        raise ValueError(f"it has more than {VALUES_MAX} values or escapes")
    decoder = cast(Any, json.JSONDecoder())
    decoder.scan_once = _value
    try:
        return decoder.decode(content.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _value(text: str, at: int) -> tuple[Any, int]:
    """The value that begins there, and where it ends; StopIteration, which the library expects, for none."""
    match text[at : at + 1]:
        case '"':
            return cast(tuple[str, int], scanstring(text, at + 1, True))
        case "{":
            return cast(tuple[Any, int], JSONObject((text, at + 1), True, _value, None, _unique))
        case "[":
            return cast(tuple[Any, int], JSONArray((text, at + 1), _value))
    found = _PLAIN.match(text, at)
    if found is None:
        raise StopIteration(at)
    whole, fraction, exponent = found.groups()
    if whole is None:
        return _CONSTANTS[found[0]], found.end()
    return (float(found[0]) if fraction or exponent else int(whole)), found.end()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    count = len(pairs)
    pairs.reverse()
    while pairs:  # piece by piece, and forgotten meanwhile: other threads have their turn here too
        values.update(reversed(pairs[-_PIECE:]))
        del pairs[-_PIECE:]
    if len(values) != count:
        raise ValueError("a key comes twice in its JSON")
    return values
