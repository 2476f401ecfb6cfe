"""A value of a job file that has the wrong type or size, in the words of a job file."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_core import ErrorDetails

SHOWN_CHARACTERS_MAX = 200  # of a value that is refused
# What pydantic calls by the words of Python.
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text in quotation marks",
    "tuple_type": "a list",
    "model_type": "a section",
    "dict_type": "a table",
    "string_pattern_mismatch": "1 to 40 of a-z, 0-9 and -",  # only `name` has a pattern
}


def misfit(key: str, faults: Sequence[ErrorDetails]) -> tuple[str, str]:
    """What the value of this key should be, and a hint if there is one; several faults are alternatives."""
    expected = [_KINDS.get(fault["type"]) or fault["msg"].removeprefix("Input should be ") for fault in faults]
    if (given := repr(faults[0]["input"]))[SHOWN_CHARACTERS_MAX:]:
        given = f"{given[:SHOWN_CHARACTERS_MAX]}…"
    if expected[0] == faults[0]["msg"]:  # such as "Tuple should have at most 2 items"
        return f"{key} = {given}: {expected[0][0].lower()}{expected[0][1:]}", ""
    hint = "write a number of seconds, without a unit" if key.endswith("_s") and "a number" in expected else ""
    return f"{key} = {given}: should be {' or '.join(dict.fromkeys(expected))}", hint
