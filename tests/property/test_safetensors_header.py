"""Whatever a file's bytes are: its header is read as the library reads it, or refused with InvalidModel."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from swarm.errors import InvalidModel
from swarm.hf.safetensors_header import ENTRIES_MAX, HEADER_BYTES_MAX, header_bytes, parse_header, read_header
from tests.support.long_headers import LONG, entry
from tests.support.turns import UNITS_MAX, cost_s, held_up_units, unit

DTYPES = st.sampled_from(["float32", "float16", "int64", "uint8", "bool"])
SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(st.from_regex(r"[a-z.]{1,12}", fullmatch=True), st.tuples(DTYPES, SHAPES), max_size=5)
WITH_A_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def content(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    return bytes(save({name: np.ones(shape, dtype=dtype) for name, (dtype, shape) in tensors.items()}))


@WITH_A_FILE
@given(TENSORS)
def test_what_the_library_writes_is_found_where_it_lies(tmp_path: Path, tensors: Any) -> None:
    raw = content(tensors)
    (tmp_path / "x").write_bytes(raw)
    header = read_header(tmp_path / "x", "x")
    assert header.keys() == tensors.keys()
    for name, (dtype, shape) in tensors.items():
        found = header[name]
        assert list(found.shape) == shape
        assert raw[found.start : found.stop] == np.ones(shape, dtype=dtype).tobytes()


@WITH_A_FILE
@given(TENSORS, st.data())
def test_a_damaged_file_is_refused_or_the_library_takes_it_too(tmp_path: Path, tensors: Any, data: Any) -> None:
    raw = bytearray(content(tensors))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(raw) - 1))
        raw[position] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    try:
        header = read_header(path, "x")
    except InvalidModel:
        return
    try:
        with safe_open(path, "numpy") as file:
            names = set(file.keys())
    except SafetensorError:
        return  # stricter than we are, about what no stage reads
    assert header.keys() <= names


@WITH_A_FILE
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=12,
    )
)
def test_any_json_is_a_header_or_refused(tmp_path: Path, value: Any) -> None:
    text = json.dumps(value).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
    is_header = isinstance(value, dict) and value.keys() <= {"__metadata__"}
    with nullcontext() if is_header else pytest.raises(InvalidModel):
        assert read_header(tmp_path / "x", "x") == {}


def file(*names: str, **said: object) -> bytes:
    """A file of such tensors, all in the same place, of which this is said."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | said
    header = ",".join(f'"{name}":{json.dumps(entry)}' for name in names or "a").join("{}").encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (file()[:-3], "ends at byte .*, before tensor a"),
        (file() + b"x", "its tensors end at"),
        (file()[:20], "its header would have"),
        (b"\xff" * 8 + file(), "its header would have"),
        (b"\1" + bytes(7) + b"x", "header is no table of tensors"),
        (file("a", "a"), "names 'a' twice"),
        (file("a", "b"), "begins at byte"),
        (file("\\ud800"), "impossible name"),
        (file(data_offsets=[1 << 40, (1 << 40) + 8]), "before tensor a does"),
        (file(data_offsets=[-8, 0]), "tensor a"),
        (file(data_offsets=["0", "8"]), "has offsets that no file has"),
        (file(shape=[3]), "tensor a .* has 12 bytes"),
        (file(shape=[-1, -2]), "impossible shape"),
        (file(shape="2"), "is not described"),
        (file(dtype="F7"), "unknown dtype 'F7'"),
    ],
)
def test_a_false_header_is_refused_with_what_is_false(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InvalidModel, match=words):
        read_header(tmp_path / "x", "x")


def test_a_header_that_announces_more_than_8_mib_is_not_read() -> None:
    assert HEADER_BYTES_MAX == 8 << 20
    size_bytes = 1 << 30
    assert header_bytes("f", size_bytes, HEADER_BYTES_MAX.to_bytes(8, "little")) == HEADER_BYTES_MAX
    with pytest.raises(InvalidModel, match="its header would have"):
        header_bytes("f", size_bytes, (HEADER_BYTES_MAX + 1).to_bytes(8, "little"))


def test_a_header_of_too_many_tensors_is_refused() -> None:
    """Half a million empty tensors took most of a gigabyte."""
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    most, more = (json.dumps(dict.fromkeys(range(ENTRIES_MAX + extra), empty)).encode() for extra in (0, 1))
    assert len(parse_header("f", 8 + len(most), most)) == ENTRIES_MAX
    with pytest.raises(InvalidModel, match=f"names more than {ENTRIES_MAX} tensors"):
        parse_header("f", 8 + len(more), more)


@pytest.mark.parametrize("kind", LONG)
def test_the_longest_header_takes_no_more_time_whatever_it_says(kind: str) -> None:
    """A header of 6 MiB that had one name twice was searched for it for an hour: each name among all others."""
    header = LONG[kind]
    assert HEADER_BYTES_MAX * 3 // 4 < len(header) <= HEADER_BYTES_MAX
    units = cost_s(lambda: parsed(header), tries=1) / cost_s(unit)
    assert units < 5000, f"{units:.0f}"


@pytest.mark.parametrize("kind", ["in another order", "other texts", "a long text", "a text without end", "spaces"])
def test_other_threads_have_their_turn_while_the_longest_header_is_parsed(kind: str) -> None:
    """json.loads of a header held up every other thread, such as the one that sends heartbeats."""
    kept: list[object] = []  # or the caller's freeing of it counts
    units = held_up_units(lambda: kept.append(parsed(LONG[kind])))
    assert units < UNITS_MAX, f"{units:.0f}"


def parsed(header: bytes) -> object:
    """The tensors of a header; or the refusal, which is a text for people."""
    try:
        return parse_header("f", 8 + len(header) + ENTRIES_MAX, header)
    except InvalidModel as error:
        return error.message


def test_the_first_entry_too_many_ends_the_reading() -> None:
    """What stands behind it is not looked at, so it may be anything."""
    begin = b"{" + b",".join(b'"%d":%b' % (at, entry(0)) for at in range(ENTRIES_MAX + 1))
    assert parsed(begin + b"\0 no JSON") == f"f names more than {ENTRIES_MAX} tensors"


@pytest.mark.parametrize(
    "said",
    [
        b'"shape":[true],"data_offsets":[0,1]',
        b'"shape":[1],"data_offsets":[false,true]',
        b'"shape":[1],"data_offsets":[0,1e0]',
        b'"shape":[' + b"9" * 1500 + b'],"data_offsets":[0,1]',
        b'"shape":[' + b",".join([b"9" * 100] * 16) + b'],"data_offsets":[0,1]',
        b'"shape":[1],"data_offsets":[0,' + b"9" * 1500 + b"]",
        b'"shape":[' + b"[" * 900 + b"]" * 900 + b'],"data_offsets":[0,1]',
        b'"shape":[1],"shape":[1],"data_offsets":[0,1]',
        b'"shape":[1],"data_offsets":[0,1],"more":{"a":{}}',
    ],
)
def test_no_number_and_no_nesting_of_an_entry_is_a_fault_of_ours(said: bytes) -> None:
    """The product of sixteen sizes had more digits than Python turns into text, so it was refused with a traceback."""
    header = b'{"a":{"dtype":"U8",' + said + b"}}"
    with pytest.raises(InvalidModel):
        parse_header("f", 8 + len(header) + 1, header)


def test_the_same_header_is_read_with_spaces_escapes_and_keys_in_another_order() -> None:
    plain = b'{"__metadata__":{"format":"pt","b":"\\"}"},"\xc3\xa9":' + entry(1) + b"}"
    spaced = (
        b' {\n "__metadata__" : { "format" : "pt" , "b" : "\\"}" } ,\t"\\u00e9" :'
        b' { "data_offsets" : [ 0 , 1 ] , "dtype" : "U8" , "shape" : [ 1 ] } }   '
    )
    assert list(parse_header("f", 8 + len(plain) + 1, plain)) == ["é"]
    assert list(parse_header("f", 8 + len(spaced) + 1, spaced)) == ["é"]
