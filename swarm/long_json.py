"""Long JSON of others: manifests, indexes and headers, of which an honest one may have megabytes.

It is read value by value in Python, so other threads have their turn in between, and heartbeats go on. How many values
there can be is counted first, as a table or a list of millions also takes long to be forgotten.

Not chosen: json.loads, because it lets no other thread run meanwhile, which is 0.1 s for 8 MiB. Nor a lower bound for
the bytes, because the index of a model of 10,000 layers has 8 MiB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import JSONArray, JSONObject, scanstring  # type: ignore[attr-defined]  # the stubs leave them out
from typing import Any, TypeAlias, cast

Pairs: TypeAlias = list[tuple[str, Any]]
"""The names of a table with their values, in order."""

VALUES_MAX = 1 << 17  # a name with its value counts as one; a checkpoint of 10,000 files has 30,000
NAME_SHOWN = 100  # characters
_CONSTANTS = {"null": None, "true": True, "false": False}
_PLAIN = re.compile(r"null|true|false|(-?(?:0|[1-9][0-9]{0,99}))(\.[0-9]{1,99})?([eE][-+]?[0-9]{1,9})?")


def read_long(content: bytes, values_max: int = VALUES_MAX, look: Callable[[Pairs], None] = lambda _: None) -> Any:
    """The value of a text in JSON; ValueError for none, for a name twice in a table, and for too many values.

    `look` sees each table when its end is reached, and may end the reading with an error of its own.
    """
    if content.count(b",") + content.count(b"\\") >= values_max:
        raise ValueError(f"it has more than {values_max} values or escapes")

    def table(pairs: Pairs) -> dict[str, Any]:
        look(pairs)
        return _unique(pairs)

    def value(text: str, at: int) -> tuple[Any, int]:
        """The value that begins there, and where it ends; StopIteration, which the library expects, for none."""
        match text[at : at + 1]:
            case '"':
                return cast(tuple[str, int], scanstring(text, at + 1, True))
            case "{":
                return cast(tuple[Any, int], JSONObject((text, at + 1), True, value, None, table))
            case "[":
                return cast(tuple[Any, int], JSONArray((text, at + 1), value))
        return _plain(text, at)

    decoder = cast(Any, json.JSONDecoder())
    decoder.scan_once = value
    try:
        return decoder.decode(content.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _plain(text: str, at: int) -> tuple[Any, int]:
    """A number, a truth value or null."""
    found = _PLAIN.match(text, at)
    if found is None:
        raise StopIteration(at)
    whole, fraction, exponent = found.groups()
    if whole is None:
        return _CONSTANTS[found[0]], found.end()
    return (float(found[0]) if fraction or exponent else int(whole)), found.end()


def _unique(pairs: Pairs) -> dict[str, Any]:
    values: dict[str, Any] = {}
    pairs.reverse()
    while pairs:  # one by one, and forgotten meanwhile: other threads have their turn here too
        key, value = pairs.pop()
        if key in values:
            raise ValueError(f"it names {key[:NAME_SHOWN]!r} twice")
        values[key] = value
    return values
