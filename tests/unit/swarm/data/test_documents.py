"""swarm.data.documents: the same texts from every kind of source, and where the fault is when there is one."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swarm.data.documents import find_sources, read_ids
from swarm.errors import InvalidConfig, InvalidData
from tests.support.texts import pieces_of, section, texts_of, write_lines

TEXTS = ["first\nwith two lines", "naïve 🙂 日本", " ", "the last"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()


def write_jsonl(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(json_lines(["", *TEXTS]))
    return folder / "a.jsonl"


def write_gzip(folder: Path) -> Path:
    (folder / "a.ndjson.gz").write_bytes(gzip.compress(json_lines(TEXTS)))
    return folder / "a.ndjson.gz"


def write_zstd(folder: Path) -> Path:
    with pa.CompressedOutputStream(str(folder / "a.jsonl.zst"), "zstd") as file:
        file.write(json_lines(TEXTS))
    return folder / "a.jsonl.zst"


def write_parquet(folder: Path) -> Path:
    table = pa.table({"id": list(range(5)), "text": [*TEXTS, ""]})
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def write_saved(folder: Path) -> Path:
    datasets.Dataset.from_dict({"text": TEXTS, "id": [1, 2, 3, 4]}).save_to_disk(folder / "saved")
    return folder / "saved"


def write_splits(folder: Path) -> Path:
    rows = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in (("train", TEXTS), ("test", ["t"]))}
    datasets.DatasetDict(rows).save_to_disk(folder / "splits")
    return folder / "splits"


def write_texts(folder: Path) -> str:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    (folder / "empty.txt").write_text("")
    return f"{folder}/*.txt"


@pytest.mark.parametrize(
    "write",
    [write_texts, write_jsonl, write_gzip, write_zstd, write_parquet, write_saved, write_splits],
    ids=lambda write: write.__name__,
)
def test_every_format_gives_the_same_texts(tmp_path: Path, write: Callable[[Path], object]) -> None:
    assert texts_of(write(tmp_path)) == TEXTS


@pytest.mark.parametrize("write", [write_jsonl, write_parquet], ids=lambda write: write.__name__)
def test_a_folder_of_files_is_a_data_set_if_the_job_says_so(tmp_path: Path, write: Callable[[Path], object]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder)
    assert texts_of(folder, format="hf") == TEXTS
    assert texts_of(f"hf:{folder}") == TEXTS
    assert texts_of(f"hf:{folder}", split="train[:2]")[-1] == TEXTS[0 if write is write_jsonl else 1]
    with pytest.raises(InvalidData, match="cannot be loaded"):
        texts_of(folder, format="hf", split="nothing")


def test_a_split_is_chosen_and_another_is_named(tmp_path: Path) -> None:
    folder = write_splits(tmp_path)
    assert texts_of(folder, split="test") == ["t"]
    with pytest.raises(InvalidData, match='no split "dev"') as caught:
        texts_of(folder, split="dev")
    assert "test, train" in caught.value.hint


def test_code_in_a_data_set_never_runs(tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InvalidData, match="cannot be loaded"):
        texts_of(folder, format="hf")
    assert not (tmp_path / "ran").exists()


def test_a_hub_data_set_that_cannot_be_had_is_refused() -> None:
    (source,) = find_sources(section("hf:nobody/nothing@main"))
    assert (source.format, source.size_bytes) == ("hf", 0)
    with pytest.raises(InvalidData, match=r'"hf:nobody/nothing@main".* cannot be loaded'):
        texts_of("hf:nobody/nothing@main")
    with pytest.raises(InvalidConfig, match="is a data set"):
        find_sources(section("hf:nobody/nothing", format="jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "b"', "line 3 is not JSON"),
        (b'{"body": "b"}', 'line 3 has no field "text"'),
        (b'{"text": 7}', 'line 3: field "text" is 7, not text'),
        (b'{"text": null}', 'line 3: field "text" is null, not text'),
        (b'["text"]', "line 3 is no JSON object"),
        (b'{"text": "\xff"}', "line 3 is not UTF-8: byte 10 of it"),
        (b'{"text": "\xed\xa0\xbd\xed\xb8\x80"}', "line 3 is no valid Unicode: half a surrogate pair at byte 10 of it"),
        (b'{"text": "a", "\xed\xa0\xbd": 1}', "line 3 is no valid Unicode: half a surrogate pair at byte 15 of it"),
        (b'{"text": "a\\ud800"}', "line 3 is no valid Unicode: half a surrogate pair at character 1"),
        (b'{"text": "a\tb"}', "line 3 is not JSON: Invalid control character at: character 12 of the line"),
        (b"[" * 100_000, "line 3 is not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(InvalidData, match=f"a.jsonl, {message}"):
        texts_of(tmp_path / "a.jsonl")


def test_the_other_fields_are_named_when_the_text_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 7, "body": "b", "title": "t"}\n')
    pq.write_table(pa.table({"id": [7], "body": ["b"]}), tmp_path / "b.parquet")
    for name, hint in (("a.jsonl", "body, title"), ("b.parquet", "body")):
        with pytest.raises(InvalidData, match=r'no (field|column) "text"') as caught:
            texts_of(tmp_path / name)
        assert caught.value.hint.partition(";")[0] == f"set data.text_field to one of: {hint}"
        assert texts_of(tmp_path / name, text_field="body") == ["b"]
    with pytest.raises(InvalidData, match='column "id" holds int64, not text'):
        texts_of(tmp_path / "b.parquet", text_field="id")


def test_a_file_that_is_or_unpacks_to_one_huge_line_is_refused(tmp_path: Path) -> None:
    """A gzip of one letter, a thousandth of its size, took six times its size as JSON."""
    (tmp_path / "a.jsonl").write_bytes(b"x" * (17 << 20))
    with gzip.open(tmp_path / "b.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(b'{"text": "')
        for _ in range(20):
            file.write(b"a" * (1 << 20))
        file.write(b'"}\n')
    assert (tmp_path / "b.jsonl.gz").stat().st_size < 1 << 20
    for name in ("a.jsonl", "b.jsonl.gz"):
        with pytest.raises(InvalidData, match="a line of more than 16777216 bytes"):
            texts_of(tmp_path / name)


def test_rows_of_a_parquet_file_are_held_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{number}" * 1000 for number in range(100)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", use_dictionary=False)
    held: list[int] = []
    whole = pq.ParquetFile.iter_batches

    def iter_batches(self: pq.ParquetFile, batch_size: int, **more: Any) -> Iterator[Any]:
        held.append(batch_size)
        return whole(self, batch_size, **more)  # type: ignore[no-any-return]  # of the library

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    assert texts_of(tmp_path / "a.parquet") == texts
    monkeypatch.setattr("swarm.data.documents.TABLE_BYTES_MAX", 10_000)
    assert texts_of(tmp_path / "a.parquet") == texts
    assert held[0] == 1024
    assert 1 <= held[1] <= 10


@pytest.mark.parametrize(
    ("write", "at", "message"),
    [
        (write_gzip, 10, r"a\.ndjson\.gz is damaged: Error -3 while decompressing data: "),
        (write_zstd, 14, r"a\.jsonl\.zst is damaged or not compressed as its name says: ZSTD"),
        (write_parquet, 0, r"a\.parquet"),
    ],
)
def test_damaged_files_are_refused_as_the_library_says_it(
    tmp_path: Path, write: Callable[[Path], Path], at: int, message: str
) -> None:
    """A damaged block was said to take more than 6 GiB of memory."""
    path = write(tmp_path)
    whole = path.read_bytes()
    for content in (b"nothing like it", whole[:-10], whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(InvalidData, match=path.name):
            texts_of(path)
    path.write_bytes(whole[:at] + b"\xff" * 8 + whole[at + 8 :])
    with pytest.raises(InvalidData, match=message):
        texts_of(path)


@pytest.mark.parametrize("compression", ["snappy", "gzip", "zstd", "none"])
def test_a_damaged_page_is_said_whichever_error_the_library_has_for_it(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {row}" for row in range(999)]}), path, compression=compression)
    whole = path.read_bytes()
    path.write_bytes(whole[:60] + b"\xff" * 40 + whole[100:])
    with pytest.raises(InvalidData, match=rf"{path}.* (damaged|not UTF-8)"):
        texts_of(path)


def test_a_damaged_data_set_is_said(tmp_path: Path) -> None:
    folder = write_saved(tmp_path)
    (path,) = folder.glob("*.arrow")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidData, match=r"(damaged|cannot be loaded): \w+: "):
        texts_of(folder)


def test_texts_that_lie_outside_of_a_data_set_end_no_process(tmp_path: Path) -> None:
    """A changed byte in the file of a data set ended the process with a segmentation fault."""
    folder = write_saved(tmp_path)
    (path,) = folder.glob("*.arrow")
    offsets = np.cumsum([0, *(len(text.encode()) for text in TEXTS)]).astype("<i4")
    whole, written = path.read_bytes(), offsets.tobytes()
    assert whole.count(written) == 1
    offsets[2] = 1 << 30
    path.write_bytes(whole.replace(written, offsets.tobytes()))
    with pytest.raises(InvalidData, match=r"saved\" is damaged: .*offset"):
        texts_of(folder)


NESTED = [{"doc": {"text": "a", "more": {"body": "x"}}}, {"doc": {"text": "b", "more": {"body": "y"}}}]


def write_nested(folder: Path, kind: str, rows: list[Any]) -> Path:
    path = folder / f"nested.{kind}"
    if kind == "jsonl":
        return write_lines(path, rows)
    return write_table(path, pa.Table.from_pylist(rows))


def write_table(path: Path, table: pa.Table) -> Path:
    """A Parquet file, or a data set for any other name."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        datasets.Dataset.from_dict(table.to_pydict()).save_to_disk(path)
    return path


def check_skips(path: Path, text_field: str, texts: list[str], skipped: int, place: str) -> None:
    """With data.on_null = "skip" these texts are read and so many rows are left out, else the first one is named."""
    pieces = pieces_of(path, text_field=text_field, on_null="skip")
    assert [piece.text for piece in pieces if not piece.skipped] == texts
    assert [piece.text for piece in pieces if piece.skipped] == [""] * skipped
    if skipped:
        with pytest.raises(InvalidData, match=rf'{place} "{text_field}"') as caught:
            texts_of(path, text_field=text_field)
        assert 'data.on_null = "skip"' in caught.value.hint


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_a_field_of_a_field_may_hold_the_text(tmp_path: Path, kind: str) -> None:
    path = write_nested(tmp_path, kind, NESTED)
    assert texts_of(path, text_field="doc.text") == ["a", "b"]
    assert texts_of(path, text_field="doc.more.body") == ["x", "y"]
    for name in ("text", "doc.body", "doc.text.more", "more"):
        with pytest.raises(InvalidData, match=rf'no (field|column) "{name}"') as caught:
            texts_of(path, text_field=name)
        assert caught.value.hint.partition(";")[0] == "set data.text_field to one of: doc.text, doc.more.body"
    with pytest.raises(InvalidData, match=r'"doc" (holds struct|is \{"text")'):
        texts_of(path, text_field="doc")
    whole = write_nested(tmp_path, kind, [{"doc.text": "c"}])
    assert texts_of(whole, text_field="doc.text") == ["c"], "a name with a dot goes first"


@pytest.mark.parametrize(
    ("lines", "text_field", "texts", "skipped"),
    [
        (['{"text": "a"}', '{"id": 3}', '{"text": "b"}'], "text", ["a", "b"], 1),
        (['{"text": "a"}', "{}", "null", '{"text": null}'], "text", ["a"], 3),
        (['{"id": 1}', '{"text": "a"}'], "text", ["a"], 1),
        (['{"doc": {"text": "a"}}', '{"doc": {}}', '{"doc": null}', "{}"], "doc.text", ["a"], 3),
        (['{"doc": {"text": "a"}}', '{"doc": "text"}', '{"doc": [1]}', '{"doc": 5}'], "doc.text", ["a"], 3),
        (['{"a": {"b": {"c": "x"}}}', '{"a": {"b": null}}', '{"a": {"b": {}}}'], "a.b.c", ["x"], 2),
        (['{"doc.text": "a"}', '{"doc": {"text": "b"}}', '{"doc.text": null}'], "doc.text", ["a", "b"], 1),
        (['{"text": ""}', '{"text": "a"}'], "text", ["a"], 0),
    ],
)
def test_a_line_without_the_field_is_left_out_and_counted_or_named(
    tmp_path: Path, lines: list[str], text_field: str, texts: list[str], skipped: int
) -> None:
    """A null was left out, and a line in which a writer had left the field out for the same reason was refused."""
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    check_skips(tmp_path / "a.jsonl", text_field, texts, skipped, r"a\.jsonl, line \d.* field")


@pytest.mark.parametrize(
    ("table", "text_field", "texts"),
    [
        (pa.table({"text": pa.array([None, "a", None])}), "text", ["a"]),
        (pa.table({"text": pa.array([None, "a"]).dictionary_encode()}), "text", ["a"]),
        (pa.table({"text": pa.array([None, b"a"])}), "text", ["a"]),
        (pa.table({"text": pa.nulls(2)}), "text", []),
        (pa.table({"doc": pa.array([None, {"text": None}, {"text": "a"}])}), "doc.text", ["a"]),
        (pa.table({"doc": pa.array([{"text": None}, None])}), "doc.text", []),
        (pa.table({"doc": pa.nulls(2)}), "doc.text", []),
        (pa.table({"a": pa.array([{"b": None}, {"b": {"c": "x"}}, None])}), "a.b.c", ["x"]),
    ],
    ids=lambda value: str(value.schema.field(0).type) if isinstance(value, pa.Table) else None,
)
@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_a_row_without_a_text_is_left_out_and_counted_or_named(
    tmp_path: Path, kind: str, table: pa.Table, text_field: str, texts: list[str]
) -> None:
    """A shard that holds nothing but nulls has a column of that very type, which was "null, not text"."""
    path = write_table(tmp_path / f"a.{kind}", table)
    check_skips(path, text_field, texts, table.num_rows - len(texts), r"row \d: column")


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.binary())],
    ids=str,
)
def test_bytes_in_a_column_are_text_if_they_are_utf_8(tmp_path: Path, kind: Any) -> None:
    """Spark and other writers say of texts no more than that they are bytes."""
    path = tmp_path / "a.parquet"
    good = pa.array(["naïve 🙂".encode(), b"b"], pa.binary())
    pq.write_table(pa.table({"text": good.cast(kind)}), path)
    assert texts_of(path) == ["naïve 🙂", "b"]
    bad = pa.array([b"good", b"b\xffd"], pa.binary())
    dictionary = pa.types.is_dictionary(kind)
    column = (
        bad.dictionary_encode()
        if dictionary
        else bad.cast(kind, safe=False)
        if "binary" in str(kind)
        else bad.view(pa.string())
    )
    pq.write_table(pa.table({"text": column}), path)
    with pytest.raises(InvalidData, match=r'a.parquet, row 1: column "text" is not UTF-8: byte 1 of it'):
        texts_of(path)


def test_a_large_text_is_cut_in_front_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.data.documents.READ_BYTES", 64)
    monkeypatch.setattr("swarm.data.documents.CUT_BYTES", 200)
    text = "".join(f"def f{n}():\n    return {n}\n\n" for n in range(50)) + "x" * 1000
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    for name in ("a.txt", "a.jsonl"):
        pieces = pieces_of(tmp_path / name)
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert len(pieces) > 5
        assert all(len(piece.text) <= 200 + 64 for piece in pieces)
        assert all(piece.text.startswith("def") for piece in pieces[:4])


def test_several_globs_name_a_file_once_and_a_saved_data_set_is_one_source(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x.py").write_text("x")
    (tmp_path / "y.txt").write_text("y")
    found = find_sources(section(f"{tmp_path}/**/*.py, {tmp_path}/*.txt, {tmp_path}/y*"))
    assert [(source.path.name, source.format) for source in found] == [("x.py", "text"), ("y.txt", "text")]
    write_saved(tmp_path)
    found = find_sources(section(f"{tmp_path}/**"))
    assert [source.path.name for source in found] == ["x.py", "saved", "y.txt"]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="matches no file"):
        find_sources(section(f"{tmp_path}/none/*.txt"))
    with pytest.raises(InvalidData, match="matches no file") as caught:
        find_sources(section(tmp_path))
    assert "pattern" in caught.value.hint
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InvalidData, match="matches only empty files"):
        find_sources(section(f"{tmp_path}/*.txt"))


def test_ids_are_taken_as_they_are_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    np.array([1, 2, 300], dtype="<u2").tofile(path)
    (source,) = find_sources(section(path))
    assert source.format == "bin"
    assert [(ids.tolist(), done) for ids, done in read_ids(source, "uint16", 301)] == [([1, 2, 300], 6)]
    with pytest.raises(InvalidData, match="holds id 300 at position 2, the vocabulary has 300"):
        list(read_ids(source, "uint16", 300))
    with pytest.raises(InvalidData, match="6 bytes, no whole number of uint32 ids"):
        list(read_ids(source, "uint32", 301))
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(InvalidData, match="mixes files of token ids"):
        find_sources(section(f"{tmp_path}/*"))


@pytest.mark.parametrize(
    ("ids", "dtype", "written", "vocabulary", "message", "hint"),
    [
        (range(1, 99), "uint16", "<u4", 50_304, "every second uint16 is 0: is it uint32?", "data.bin_dtype"),
        (range(1, 9), "uint16", "<i8", 50_304, "every second uint16 is 0: is it uint32?", "data.bin_dtype"),
        (range(1, 99), "uint32", "<i8", 50_304, "every second uint32 is 0: is it uint64?", "as uint32"),
        (
            range(50, 151_000, 99),
            "uint16",
            "<u4",
            151_936,
            "every second uint16 is at most 2: is it uint32?",
            "data.bin_dtype",
        ),
        (
            [20240520, 1, 5000],
            "uint16",
            "<i4",
            65_536,
            "is a shard of llm.c, whose header has 1024 bytes",
            "tail -c +1025",
        ),
        ([20240801, 7, 5000], "uint32", "<i4", 1 << 30, "is a shard of llm.c", 'bin_dtype = "uint32"'),
    ],
)
def test_ids_of_another_width_and_headers_are_refused(
    tmp_path: Path, ids: Sequence[int], dtype: str, written: str, vocabulary: int, message: str, hint: str
) -> None:
    """Half of the tokens that were trained on were 0, or were a header."""
    np.array(ids, dtype=written).tofile(tmp_path / "a.bin")
    (source,) = find_sources(section(tmp_path / "a.bin"))
    with pytest.raises(InvalidData, match=message) as caught:
        list(read_ids(source, dtype, vocabulary))
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("ids", "dtype", "vocabulary"),
    [
        ([0] * 50, "<u2", 300),
        ([7, 0, 7, 0, 7, 0, 7], "<u2", 300),
        ([5, 1] * 500, "<u2", 300),
        (range(65_536), "<u2", 151_936),
        (range(0, 151_000, 99), "<u4", 151_936),
    ],
)
def test_ids_that_only_are_odd_are_taken(tmp_path: Path, ids: Sequence[int], dtype: str, vocabulary: int) -> None:
    np.array(ids, dtype=dtype).tofile(tmp_path / "a.bin")
    (source,) = find_sources(section(tmp_path / "a.bin"))
    ((read, _),) = read_ids(source, "uint16" if dtype == "<u2" else "uint32", vocabulary)
    assert read.tolist() == list(ids)


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("saved", "datasets")])
def test_a_missing_extra_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    write_parquet(tmp_path)
    write_saved(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidConfig, match=f"needs the Python package {package}") as caught:
        texts_of(tmp_path / name)
    assert "pip install 'swarm-stages[data]'" in caught.value.hint
