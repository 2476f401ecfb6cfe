"""What a file is: by its name, by its first bytes, and by what the job says."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swarm.data.documents import find_sources, read_texts
from swarm.errors import InvalidData
from swarm.job.spec import DataSection

LINES = b'{"text": "first"}\n{"text": "second"}\n'
TEXTS = ["first", "second"]


def zst(raw: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(raw, asbytes=True))


def packed(write: Callable[[io.BytesIO], Any]) -> bytes:
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


def parquet() -> bytes:
    return packed(lambda sink: pq.write_table(pa.table({"text": TEXTS}), sink))


def zipped() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as file:
        file.writestr("a.txt", "text")
    return sink.getvalue()


def tarred() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.txt"))
    return sink.getvalue()


def database() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table texts (text)")
    return connection.serialize()


def named(value: object) -> str | None:
    """No bytes in the name of a test: what packs them may write the time into them, and workers must agree on names."""
    return "bytes" if isinstance(value, bytes) else None


def texts_of(source: object, **values: Any) -> list[str]:
    section = DataSection.model_validate({"source": str(source), **values})
    return [piece.text for found in find_sources(section) for piece in read_texts(found, section)]


@pytest.mark.parametrize(
    ("name", "content", "values", "texts"),
    [
        ("a.json", LINES, {}, TEXTS),
        ("A.JSON", LINES, {}, TEXTS),
        ("a.json", b"\xef\xbb\xbf\n " + LINES, {}, TEXTS),
        ("a.json.gz", gzip.compress(LINES), {}, TEXTS),
        ("a.json.zst", zst(LINES), {}, TEXTS),
        ("a.txt.gz", gzip.compress(b"a text"), {}, ["a text"]),
        ("a.txt.zst", zst("naïve 🙂".encode()), {}, ["naïve 🙂"]),
        ("a.md.gz", gzip.compress(b"\xef\xbb\xbfa text"), {}, ["a text"]),
        ("a.gz", gzip.compress(b"a text"), {}, ["a text"]),
        ("a.gz", gzip.compress(LINES), {"format": "jsonl"}, TEXTS),
        ("a.txt", LINES, {"format": "jsonl"}, TEXTS),
        ("a.txt", LINES, {"format": "text"}, [LINES.decode()]),
        ("a.json", LINES, {"format": "text"}, [LINES.decode()]),
        ("a.txt", b"\xef\xbb\xbfa text", {}, ["a text"]),
        ("a.txt", b"\xef\xbb\xbf", {}, [""]),
        ("a.txt", b"a \xef\xbb\xbftext", {}, ["a \ufefftext"]),
        ("a.txt", b"{not JSON}\n", {}, ["{not JSON}\n"]),
        ("a.py", b"{\n  'a': 1\n}\n", {}, ["{\n  'a': 1\n}\n"]),
        ("a.txt", b"[1, 2]\n", {}, ["[1, 2]\n"]),
        ("a.txt", b"BZh is no archive", {}, ["BZh is no archive"]),
        ("a.txt", b"PAR1 is a word", {}, ["PAR1 is a word"]),
        ("a.txt", b"a\0b", {"format": "text"}, ["a\0b"]),
        ("a.data", parquet(), {"format": "parquet"}, TEXTS),
    ],
    ids=named,
)
def test_a_file_is_read_as_what_it_is(
    tmp_path: Path, name: str, content: bytes, values: dict[str, str], texts: list[str]
) -> None:
    """A suffix that was not known was plain text: models were trained on the syntax of JSON."""
    (tmp_path / name).write_bytes(content)
    assert texts_of(tmp_path / name, **values) == texts


@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        ("a.json", b'[{"text": "a"}]', "is a JSON array", "one object per line"),
        ("a.json", b'\xef\xbb\xbf  [\n{"text": "a"}\n]', "is a JSON array", "one object per line"),
        ("a.json.gz", gzip.compress(b'[{"text": "a"}]'), "is a JSON array", "one object per line"),
        ("a.jsonl", b'[\n{"text": "a"}]', "is a JSON array", "one object per line"),
        ("a.json", b'{\n  "text": "a"\n}', "line 1 is not JSON", "one JSON object"),
        ("a.txt", LINES, "begins with a JSON object", 'data.format = "jsonl"'),
        ("a", b"\xef\xbb\xbf\n" + LINES, "begins with a JSON object", 'data.format = "jsonl"'),
        ("a.txt.gz", gzip.compress(LINES), "begins with a JSON object", 'data.format = "jsonl"'),
        ("a.txt", gzip.compress(b"a"), "is compressed with gzip, not text", ".gz"),
        ("a.jsonl", gzip.compress(LINES), "is compressed with gzip, not text", ".gz"),
        ("a.txt", zst(b"a"), "is compressed with zstd, not text", ".zst"),
        ("a.txt.gz", gzip.compress(gzip.compress(b"a")), "unpacks to what is compressed with gzip", ".gz"),
        ("a.txt.xz", lzma.compress(b"a"), "is compressed with xz", "xz -d"),
        ("a.json.bz2", bz2.compress(LINES), "is compressed with bzip2", "bzip2 -d"),
        ("a.docx", zipped(), "is a zip archive", "unzip"),
        ("a.tar.gz", gzip.compress(tarred()), "unpacks to what is a tar archive", "tar -xf"),
        ("a.data", parquet(), "is a Parquet file", 'data.format = "parquet"'),
        ("a.parquet.gz", gzip.compress(parquet()), "is compressed, and only text and JSON lines may be", "gzip -d"),
        ("a.bin.zst", zst(b"\0\1"), "is compressed, and only text and JSON lines may be", "zstd -d"),
        ("a.db", database(), "is an SQLite database", "UTF-8"),
        ("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(99), "is an HDF5 file", "UTF-8"),
        ("a.pdf", b"%PDF-1.7\n", "is a PDF", "UTF-8"),
        ("a.npy", packed(lambda sink: np.save(sink, np.arange(9))), "is an array of NumPy", "tofile"),
        ("a.txt", "\ufeffa".encode("utf-16-le"), "is UTF-16 text", "iconv"),
        (
            "a.txt",
            "two words".encode("utf-16-le"),
            r"is binary \(it holds bytes of 0\), not text",
            'data.format = "text"',
        ),
        ("a.jsonl", LINES.decode().encode("utf-16-le"), r"is binary \(it holds bytes of 0\), not text", "UTF-8"),
    ],
    ids=named,
)
def test_what_is_no_text_is_named(tmp_path: Path, name: str, content: bytes, message: str, hint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidData, match=message) as caught:
        texts_of(tmp_path / name)
    assert str(tmp_path / name) in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("head", "size_text"),
    [
        (b"\x28\xb5\x2f\xfd\x00\x90" + bytes(20), "256.0 MiB"),  # a window descriptor
        (b"\x28\xb5\x2f\xfd\x04\xa9" + bytes(20), "2.2 GiB"),
        (b"\x28\xb5\x2f\xfd\xa0" + (200 << 20).to_bytes(4, "little") + bytes(20), "200.0 MiB"),  # a single segment
    ],
    ids=named,
)
def test_a_window_that_the_library_does_not_unpack_is_named(tmp_path: Path, head: bytes, size_text: str) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(head)
    with pytest.raises(InvalidData, match=rf"{path} has a window of {size_text}, more than 128\.0 MiB") as caught:
        texts_of(path)
    assert "zstd -d --long=31" in caught.value.hint


def test_a_frame_behind_the_first_with_such_a_window_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zst(LINES) + b"\x28\xb5\x2f\xfd\x00\x90" + bytes(20))
    with pytest.raises(InvalidData, match=rf"{path} has a frame whose window is over 128 MiB") as caught:
        texts_of(path)
    assert "zstd -d --long=31" in caught.value.hint


@pytest.mark.parametrize(
    ("names", "source", "found"),
    [
        (["[2024] crawl/a.txt"], "[2024] crawl/a.txt", ["[2024] crawl/a.txt"]),
        (["[2024] crawl/a.txt", "2 crawl/a.txt"], "[2024] crawl/*.txt", ["[2024] crawl/a.txt"]),
        (["what?.txt", "what1.txt"], "what?.txt", ["what?.txt"]),
        (["a*b.txt", "axb.txt"], "a*b.txt", ["a*b.txt"]),
        (["a, b.txt", "a"], "a, b.txt", ["a, b.txt"]),
        (["a[1].txt", "b.txt"], "a[1].txt, b.txt", ["a[1].txt", "b.txt"]),
        (["a1.txt", "a2.txt", "a3.txt"], "a[12].txt", ["a1.txt", "a2.txt"]),
        (["x/[y]/deep/a.txt"], "x/**/*.txt", ["x/[y]/deep/a.txt"]),
        (["[y]/deep/a.txt"], "[y]/**/*.txt", ["[y]/deep/a.txt"]),
    ],
)
def test_what_is_there_by_that_very_name_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], source: str, found: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("text")
    assert [str(one.path) for one in find_sources(DataSection(source=source))] == found
    if "," not in source:
        whole = find_sources(DataSection(source=os.path.join(tmp_path, source)))
        assert [str(one.path) for one in whole] == [str(tmp_path / name) for name in found]


@pytest.mark.parametrize(("source", "is_relative"), [("none/*.txt", True), ("/none/a.txt", False), ("~/none", False)])
def test_only_a_relative_path_is_said_to_be_one(source: str, is_relative: bool) -> None:
    with pytest.raises(InvalidData, match="matches no file") as caught:
        find_sources(DataSection(source=source))
    assert ("relative" in caught.value.hint) is is_relative
