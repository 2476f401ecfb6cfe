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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swarm.data.documents import find_sources, read_ids
from swarm.errors import InvalidData
from tests.support.texts import (
    POINTER,
    Plant,
    a_link_to_itself,
    a_link_to_nothing,
    a_pipe,
    section,
    texts_of,
)

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
        ("a.txt", b"{}{}", {}, ["{}{}"]),
        ("a.csv", b"id,text\n1,a\n", {"format": "text"}, ["id,text\n1,a\n"]),
        ("a.html", b"<p>a</p>", {}, ["<p>a</p>"]),
        ("a.txt", b"version 2 of a text", {}, ["version 2 of a text"]),
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
        ("a.json", b'{\n  "text": "a"\n}', "line 1 is not JSON", "jq -c ."),
        ("a.jsonl", LINES + b"{\n", "line 3 is not JSON", "one JSON object"),
        ("a.txt", b'{\n  "text": "a"\n}', "begins with a JSON object", 'data.format = "jsonl"'),
        ("a.data", b'[\n  {"text": "a"}\n]', "begins with a JSON object", 'data.format = "jsonl"'),
        ("a.csv", b"id,text\n1,a\n", "is a table by its name", 'data.format = "text"'),
        ("a.TSV.gz", gzip.compress(b"id\ttext\n1\ta\n"), "is a table by its name", 'data.format = "text"'),
        ("a.rtf", b"{\\rtf1 a}", "is a document in RTF", "UTF-8"),
        ("a.txt", POINTER, "is a pointer of Git LFS", "git lfs pull"),
        ("a.jsonl", POINTER, "is a pointer of Git LFS", "git lfs pull"),
        ("a.parquet", POINTER, "is a pointer of Git LFS, which stands for a file, not a Parquet", "git lfs pull"),
        ("a.parquet", zipped(), "is a zip archive, not a Parquet file", "unzip"),
        ("a.txt", LINES, "begins with a JSON object", 'data.format = "jsonl"'),
        ("a", b"\xef\xbb\xbf\n" + LINES, "begins with a JSON object", 'data.format = "jsonl"'),
        ("a.txt.gz", gzip.compress(LINES), "begins with a JSON object", 'data.format = "jsonl"'),
        ("a.txt", gzip.compress(b"a"), "is compressed with gzip, not text", ".gz"),
        ("a.jsonl", gzip.compress(LINES), "is compressed with gzip, not text", ".gz"),
        ("a.txt", zst(b"a"), "is compressed with zstd, not text", ".zst"),
        ("a.txt.gz", gzip.compress(gzip.compress(b"a")), "unpacks to what is compressed with gzip", "twice"),
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
            b"two\0words",
            r"is binary \(it holds bytes of 0\), not text",
            'data.format = "text"',
        ),
        ("a.txt", "two words".encode("utf-16-le"), "is UTF-16LE text", "iconv -f UTF-16LE"),
        ("a.jsonl", LINES.decode().encode("utf-16-be"), "is UTF-16BE text", "iconv -f UTF-16BE"),
        ("a.txt", "\ufeffa".encode("utf-32-le"), "is UTF-32 text", "iconv -f UTF-32"),
        ("a.txt", "\ufeffa".encode("utf-32-be"), "is UTF-32 text", "iconv -f UTF-32"),
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
    ("content", "words"),
    [
        (b"\x28\xb5\x2f\xfd\x00\x90", "has a window of 256.0 MiB, more than 128.0 MiB"),  # a window descriptor
        (b"\x28\xb5\x2f\xfd\x04\xa9", "has a window of 2.2 GiB, more than 128.0 MiB"),
        # A single segment, and a frame behind a sound one.
        (b"\x28\xb5\x2f\xfd\xa0" + (200 << 20).to_bytes(4, "little"), "has a window of 200.0 MiB, more than 128.0 MiB"),
        (zst(LINES) + b"\x28\xb5\x2f\xfd\x00\x90", "has a frame whose window is over 128 MiB"),
    ],
    ids=named,
)
def test_a_window_that_the_library_does_not_unpack_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(content + bytes(20))
    with pytest.raises(InvalidData, match=f"{path} {words}") as caught:
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
    assert [str(file.path) for file in find_sources(section(source))] == found
    if "," not in source:
        whole = find_sources(section(os.path.join(tmp_path, source)))
        assert [str(file.path) for file in whole] == [str(tmp_path / name) for name in found]


@pytest.mark.parametrize(("source", "is_relative"), [("none/*.txt", True), ("/none/a.txt", False), ("~/none", False)])
def test_only_a_relative_path_is_said_to_be_one(source: str, is_relative: bool) -> None:
    with pytest.raises(InvalidData, match="matches no file") as caught:
        find_sources(section(source))
    assert ("relative" in caught.value.hint) is is_relative


@pytest.mark.parametrize(
    ("name", "content", "chosen", "message", "hint"),
    [
        ("a.dat", gzip.compress(b"a" * 99), "text", "is not UTF-8: byte 1; it is compressed with gzip", ".gz"),
        ("a.dat", "\ufeffé".encode("utf-16-le"), "text", "is not UTF-8: byte 0; it is UTF-16 text", "iconv"),
        ("a.dat", "é".encode("latin-1"), "text", "is not UTF-8: byte 0", "convert"),
        ("a.parquet.gz", gzip.compress(b"a"), "parquet", "is compressed with gzip, not a Parquet file", ".gz"),
        ("a.jsonl", LINES, "hf", "is a file, and data.format = .hf. reads folders", "auto"),
    ],
    ids=named,
)
def test_what_is_not_what_a_person_says_it_is_is_named(
    tmp_path: Path, name: str, content: bytes, chosen: str, message: str, hint: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidData, match=message) as caught:
        texts_of(tmp_path / name, format=chosen)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"The quick brown fox jumps over the lazy dog. " * 20, "is text, and its name says token ids"),
        (LINES * 20, "is text, and"),
        (zipped() + bytes(900), "is a zip archive, and"),
        (POINTER + b"\n" * (len(POINTER) % 2), "is a pointer of Git LFS"),
    ],
    ids=named,
)
def test_what_is_no_token_ids_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    """Pairs of letters are numbers below 32,640: a text whose name ended in .bin was trained on as ids."""
    (tmp_path / "a.bin").write_bytes(content[: len(content) // 2 * 2])
    (source,) = find_sources(section(tmp_path / "a.bin"))
    with pytest.raises(InvalidData, match=message):
        list(read_ids(source, "uint16", 50_000))


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (a_pipe, "is no regular file"),
        (a_link_to_itself, "cannot be read: Too many levels of symbolic links"),
        (a_link_to_nothing, "is a link to .*blob, which is not there"),
        (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
    ],
)
@pytest.mark.parametrize("pattern", ["a.txt", "*.txt"])
def test_what_a_pattern_matches_and_nobody_can_read_is_not_passed_over(
    tmp_path: Path, pattern: str, plant: Plant, told: str
) -> None:
    """A cache whose blobs were gone had links to nothing: a job trained on the other files."""
    (tmp_path / "other.txt").write_text("text")
    plant(tmp_path / "a.txt")
    with pytest.raises(InvalidData, match=rf"a\.txt {told}"):
        find_sources(section(tmp_path / pattern))


def test_a_folder_that_links_to_itself_is_read_once(tmp_path: Path) -> None:
    """Each file was read forty times, by ever longer paths, until the system refused to follow."""
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/a.txt").write_text("text")
    (tmp_path / "d/e/loop").symlink_to(tmp_path / "d")
    (tmp_path / "d/copy").symlink_to(tmp_path / "d/e")
    (tmp_path / "d/e/b.txt").write_text("text")
    found = [str(source.path.relative_to(tmp_path)) for source in find_sources(section(f"{tmp_path}/**/*.txt"))]
    assert found == ["d/a.txt", "d/copy/b.txt", "d/e/b.txt"]


def test_each_name_in_a_list_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two names was mistyped: a job trained on the other file alone."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    with pytest.raises(InvalidData, match=r'data\.source = "b\*\.txt" matches no file'):
        find_sources(section("a.txt, b*.txt"))


@pytest.mark.parametrize(
    ("closed", "pattern"), [("d", "d/a.txt"), ("d", "d/*.txt"), ("d/e", "d/**/*.txt"), ("d/e", "*/**/*")]
)
def test_a_folder_that_may_not_be_read_is_not_passed_over_but_for_lost_files(
    tmp_path: Path, closed: str, pattern: str
) -> None:
    """Patterns pass over such a folder: a job trained on what the others held."""
    (tmp_path / "d/e/lost+found").mkdir(parents=True)
    (tmp_path / "d/a.txt").write_text("text")
    (tmp_path / "d/e/b.txt").write_text("text")
    within = str(tmp_path / closed)
    with denied(within), pytest.raises(InvalidData, match=f"{within} cannot be read: Permission denied"):
        find_sources(section(f"{tmp_path}/{pattern}"))
    with denied(str(tmp_path / "d/e/lost+found")):
        assert tmp_path / "d/a.txt" in [found.path for found in find_sources(section(f"{tmp_path}/d/**/*.txt"))]


@contextmanager
def denied(folder: str) -> Iterator[None]:
    """As a user who may not look into a folder: tests may run as root, who may."""

    def refusing(call: Callable[..., Any], path: Any, **how: Any) -> Any:
        if str(path).startswith(f"{folder}/") or (call.__name__ == "listdir" and str(path) == folder):
            raise PermissionError(13, "Permission denied", path)
        return call(path, **how)

    with pytest.MonkeyPatch.context() as patch:
        for call in (os.listdir, os.lstat, os.stat):
            patch.setattr(os, call.__name__, partial(refusing, call))
        yield


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("https://example.com/a.txt", "download it"),
        ("s3://bucket/a.jsonl", "download it"),
        ("hf://datasets/owner/name", '"hf:OWNER/NAME"'),
        ("https://huggingface.co/datasets/owner/name", '"hf:OWNER/NAME"'),
    ],
)
def test_an_address_is_said_to_be_one(source: str, hint: str) -> None:
    with pytest.raises(InvalidData, match="is an address") as caught:
        find_sources(section(source))
    assert hint in caught.value.hint
