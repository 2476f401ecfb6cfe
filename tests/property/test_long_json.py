"""Whatever long JSON says: it is read as the library reads it, or refused, and other threads have their turn."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.long_json import VALUES_MAX, read_long
from tests.support.effort import others
from tests.support.turns import UNITS_MAX, held_up_units

BYTES_MAX = 8 << 20
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def filled(begin: bytes, again: bytes, end: bytes, count: int = BYTES_MAX) -> bytes:
    """A text of the greatest length, or with so many of something and spaces behind them."""
    text = begin + again * min(count, (BYTES_MAX - len(begin) - len(end)) // len(again)) + end
    return text + b" " * (BYTES_MAX - len(text))


def index(layers: int) -> bytes:
    """The index of a deep model, as `save_pretrained` writes it."""
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
    parts += ("mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
    names = {
        f"model.layers.{layer}.{part}.weight": f"model-{layer % 512:05d}-of-00512.safetensors"
        for layer in range(layers)
        for part in parts
    }
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": names}, indent=2, sort_keys=True).encode()


LONG = {
    "the index of 10,000 layers": index(10_000),
    "lists": filled(b"[", b"[],", b"[]]", VALUES_MAX - 1),
    "tables": filled(b"[", b'{"a":1},', b"1]", VALUES_MAX // 8),
    "empty tables, too many": filled(b"[", b"{},", b"1]"),
    "one table": b"{%b}" % b",".join(b'"%d":"%b"' % (at, b"x" * 48) for at in range(VALUES_MAX)),
    "numbers": filled(b"[", b"1,", b"1]"),
    "long numbers": filled(b"[", b"1" * 4300 + b",", b"1]"),
    "fractions": filled(b"[", b"0.%b," % (b"1" * 80), b"1]", VALUES_MAX // 8),
    "a long fraction": filled(b"[0.", b"1", b"]"),
    "a long text": filled(b'["', b"a", b'"]'),
    "a long text of escapes": filled(b'["', b"\\n", b'"]'),
    "a text without end": filled(b'["', b"\\\\", b""),
    "lists in lists": filled(b"", b"[", b""),
    "tables in tables": filled(b"", b'{"a":', b""),
    "spaces": filled(b"[", b" ", b"]"),
    "no UTF-8": filled(b"[", b"\xff", b"]"),
}


@pytest.mark.parametrize("what", ["lists", *others(*(what for what in LONG if what != "lists"))])
def test_long_json_holds_no_other_thread_up(what: str) -> None:
    """A list of millions held up all threads of a scheduler for 0.1 s in json.loads, and as long to be forgotten."""

    def read() -> None:
        with suppress(ValueError):
            found = read_long(LONG[what])
            del found

    units = held_up_units(read)
    assert units <= UNITS_MAX, f"{units:.0f} units"


@given(JSON)
def test_all_that_the_library_writes_is_read_as_it_was(value: Any) -> None:
    assert read_long(json.dumps(value).encode()) == value
    assert read_long(json.dumps(value, ensure_ascii=False, indent=2).encode()) == value


@given(st.binary(max_size=20) | st.text(alphabet='[]{}",:0123456789.eE+-truefalsn \\u', max_size=20).map(str.encode))
def test_what_is_no_json_for_the_library_is_none_here(content: bytes) -> None:
    try:
        value = read_long(content)
    except ValueError:
        return
    assert repr(value) == repr(json.loads(content))


def test_the_index_of_the_deepest_model_is_read() -> None:
    assert read_long(index(10_000)) == json.loads(index(10_000))


def test_a_name_twice_and_tables_without_end_are_refused() -> None:
    with pytest.raises(ValueError, match="names 'b' twice"):
        read_long(b'{"a": [{"b": 1, "b": 2}]}')
    with pytest.raises(ValueError, match="nested too deeply"):
        read_long(b"[" * 100_000)
    with pytest.raises(ValueError, match=f"more than {VALUES_MAX} values"):
        read_long(b"[" + b"1," * VALUES_MAX + b"1]")
