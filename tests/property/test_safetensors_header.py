"""Whatever a file's bytes are: its header is read as the library reads it, or refused with InvalidModel."""

from __future__ import annotations

import json
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

DTYPES = st.sampled_from(["float32", "float16", "int64", "uint8", "bool"])
SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(st.from_regex(r"[a-z.]{1,12}", fullmatch=True), st.tuples(DTYPES, SHAPES), max_size=5)
WITH_A_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def content(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    return bytes(save({name: np.ones(shape, dtype=dtype) for name, (dtype, shape) in tensors.items()}))


@WITH_A_FILE
@given(TENSORS)
def test_what_the_library_writes_is_found_where_it_lies(tmp_path: Path, tensors: Any) -> None:
    path = tmp_path / "x.safetensors"
    raw = content(tensors)
    path.write_bytes(raw)
    header = read_header(path, "x")
    assert {name: list(found.shape) for name, found in header.items()} == {
        name: shape for name, (_, shape) in tensors.items()
    }
    for name, found in header.items():
        assert raw[found.start : found.stop] == np.ones(tensors[name][1], dtype=tensors[name][0]).tobytes()


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
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    if value == {} or (isinstance(value, dict) and value.keys() <= {"__metadata__"}):
        assert read_header(path, "x") == {}
    else:
        with pytest.raises(InvalidModel):
            read_header(path, "x")


def test_a_header_that_announces_more_than_8_mib_is_not_read() -> None:
    assert HEADER_BYTES_MAX == 8 << 20
    size_bytes = 1 << 30
    assert header_bytes("f", size_bytes, HEADER_BYTES_MAX.to_bytes(8, "little")) == HEADER_BYTES_MAX
    with pytest.raises(InvalidModel, match="its header would have"):
        header_bytes("f", size_bytes, (HEADER_BYTES_MAX + 1).to_bytes(8, "little"))


def test_a_header_of_too_many_tensors_is_refused() -> None:
    """Half a million empty tensors took most of a gigabyte."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    for count in (ENTRIES_MAX, ENTRIES_MAX + 1):
        header = json.dumps({str(number): entry for number in range(count)}).encode()
        if count <= ENTRIES_MAX:
            assert len(parse_header("f", 8 + len(header), header)) == count
        else:
            with pytest.raises(InvalidModel, match=f"names {count} tensors, more than {ENTRIES_MAX}"):
                parse_header("f", 8 + len(header), header)
