"""swarm.data.room: what a file says it unpacks to is looked at before it is unpacked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swarm.data.corpus import open_corpus, tokenise
from swarm.data.documents import find_sources, read_texts
from swarm.data.room import page_bytes
from swarm.errors import InvalidData
from tests.support.texts import job, section, texts_of
from tests.support.tokenizer import write_tokenizer

GIB = 1 << 30


def free(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=size_bytes))


def varint(value: int) -> bytes:
    """A whole number as Thrift's compact protocol writes it."""
    value, out = value << 1, b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"use_dictionary": False, "data_page_size": 10_000},
        {"compression": "zstd", "data_page_version": "2.0", "write_page_checksum": True},
    ],
)
def test_the_pages_of_a_column_are_found_and_their_sizes_add_up(tmp_path: Path, written: dict[str, Any]) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"row {row} " * 40 for row in range(9000)], "id": list(range(9000))})
    pq.write_table(table, path, row_group_size=4000, **written)
    metadata = pq.read_metadata(path)
    with path.open("rb") as raw:
        for group in range(metadata.num_row_groups):
            for chunk in (metadata.row_group(group).column(at) for at in range(2)):
                pages = page_bytes(raw, chunk)
                headers = chunk.total_uncompressed_size - sum(pages)
                assert 0 < headers < 6000 + 100 * len(pages)
                assert len(pages) > 1 or not chunk.has_dictionary_page


def test_a_page_of_8_gib_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x" * 100_000]}), path, use_dictionary=False, compression="zstd")
    whole = path.read_bytes()
    with path.open("rb") as raw:
        (size_bytes,) = page_bytes(raw, pq.read_metadata(path).row_group(0).column(0))
    declared = b"\x15" + varint(size_bytes) + b"\x15"  # a whole number, the next field; what it unpacks to
    assert whole.count(declared) == 1
    path.write_bytes(whole.replace(declared, b"\x15" + varint(8 * GIB) + b"\x15"))
    free(monkeypatch, 2 * GIB)
    with pytest.raises(InvalidData, match=rf"{path}, a page behind row 0 takes 8\.0 GiB of memory, and 2\.0 GiB are"):
        texts_of(path)
    path.write_bytes(whole)
    assert texts_of(path) == ["x" * 100_000]


def test_rows_that_are_one_entry_of_a_dictionary_do_not_fill_the_memory(tmp_path: Path) -> None:
    """Eighty rows of 8 MiB that all are one entry of a dictionary: row groups say that they have 8 MiB."""
    row = pa.DictionaryArray.from_arrays(pa.array([0] * 80, pa.int32()), pa.array(["x" * (8 << 20)]))
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": row}), path, store_schema=False)
    assert path.stat().st_size < 1 << 20
    chosen = section(path)
    (source,) = find_sources(chosen)
    arrow = pa.default_memory_pool()
    held = max(arrow.bytes_allocated() for _ in read_texts(source, chosen))
    assert held < 200 << 20


def test_a_text_that_a_tokenizer_has_no_memory_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some words\n" * 100_000)
    spec = job(path, tokenizer=str(write_tokenizer(tmp_path / "tokenizer")))
    corpus = open_corpus(spec)
    free(monkeypatch, 100 << 20)
    with pytest.raises(InvalidData, match=rf"{path}, byte 0 takes 157\.4 MiB of memory, and 100\.0 MiB are free"):
        tokenise(spec, tmp_path / "out", None, corpus)
    free(monkeypatch, 200 << 20)
    tokenise(spec, tmp_path / "out", None, corpus)
