"""Where texts come from: files of plain text, JSON lines or Parquet, and Hugging Face data sets.

A text comes as one piece. If it is larger than CUT_BYTES it comes as several, so that no file needs more memory than a
piece. It is cut in front of a line that does not begin with a space, where tokenizers split anyway. Errors name the
file and the line, row or byte. Sources are read in order of path, each from its beginning, so the same files give the
same texts in the same order.

pyarrow and datasets are imported only when a source needs them. No code of a data set is ever run: the library refuses
data sets with scripts.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import importlib
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swarm.data.batches import TOKEN_DTYPES
from swarm.data.room import check_room, page_bytes
from swarm.errors import InvalidConfig, InvalidData, SwarmError
from swarm.job.spec import DataSection
from swarm.text import first_line

READ_BYTES = 4 << 20
CUT_BYTES = 8 << 20  # a larger text is cut; tokenizers need 150 bytes of memory per byte of a text
LINE_BYTES_MAX = 16 << 20  # of a JSON line, and so of a file that is none, however well it was compressed
ROWS = 1024  # rows of a table that are looked at together
TABLE_BYTES_MAX = 64 << 20  # and the bytes of their texts
HUB_PREFIX = "hf:"
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".bin": "bin"}
_COMPRESSED = (".gz", ".zst")
_SAVED_MARKS = ("state.json", "dataset_dict.json")  # what save_to_disk writes


class TextPiece(NamedTuple):
    """A text or a part of one; `ends` closes the text, `done_bytes` is how much of the source has been read.

    `at` is the line (from 1), the row (from 0) or, for plain text, the byte in the source.
    """

    text: str
    ends: bool
    done_bytes: int
    at: int


@dataclass(frozen=True, slots=True)
class Source:
    """A file or a data set; `format` is text, jsonl, parquet, bin or hf, `size_bytes` 0 if unknown (hub)."""

    path: Path
    format: str
    size_bytes: int

    def behind(self, at: int, what: str = "") -> str:
        """Words for what is read behind the place `at` of a piece."""
        return f"{self.path}, {f'{what} ' if what else ''}behind {self._unit} {at}"

    def between(self, first: int, last: int) -> str:
        """Words for what lies between the places of two pieces."""
        return f"{self.path}, {self._unit} {first}{f' to {last}' if last > first else ''}"

    @property
    def _unit(self) -> str:
        return {"text": "byte", "jsonl": "line"}.get(self.format, "row")


def find_sources(section: DataSection) -> list[Source]:
    """The sources that `section.source` names, in order of path; nothing is read yet, empty files are left out.

    It names a glob, several globs separated by commas ("**" descends into folders), or a data set on the hub
    ("hf:owner/name", "hf:owner/name@revision"). With format "auto" the suffix decides: .jsonl and .ndjson (also .gz and
    .zst), .parquet, .bin. A folder that `save_to_disk` wrote is a data set. Any other file is one text. InvalidData if
    nothing matches, if only empty files match, or if token files (.bin) are mixed with others.
    """
    named = section.source.removeprefix(HUB_PREFIX)
    if section.source.startswith(HUB_PREFIX):
        if section.format not in ("auto", "hf"):
            raise InvalidConfig(
                f'data.source = "{section.source}" is a data set, data.format = "{section.format}" is not',
                hint='set data.format = "auto"',
            )
        folder = Path(os.path.expanduser(named))
        return [_folder(folder)] if folder.is_dir() else [Source(Path(named), "hf", 0)]
    if section.format == "hf" and not glob.glob(os.path.expanduser(named)):
        return [Source(Path(named), "hf", 0)]
    sources = _matching(section)
    if not sources:
        raise InvalidData(f'data.source = "{section.source}" matches only empty files', hint="add text to them")
    formats = {source.format for source in sources}
    if "bin" in formats and len(formats) > 1:
        other = next(source.path for source in sources if source.format != "bin")
        raise InvalidData(
            f'data.source = "{section.source}" mixes files of token ids (.bin) with others, such as {other}',
            hint="name one kind only",
        )
    return sources


def read_texts(source: Source, section: DataSection) -> Iterator[TextPiece]:
    """The texts of a source that is not "bin"; InvalidData names what is wrong and where."""
    with _reading(source.path):
        match source.format:
            case "text":
                yield from _plain(source.path)
            case "jsonl":
                yield from _json_lines(source.path, section.text_field)
            case "parquet":
                yield from _parquet(source, section.text_field)
            case "hf":
                yield from _data_set(source, section)
            case _:
                raise AssertionError(source.format)


def read_ids(source: Source, bin_dtype: str, vocabulary_size: int) -> Iterator[tuple[NDArray[Any], int]]:
    """The token ids of a "bin" source in order, with the bytes read so far; InvalidData says what is wrong."""
    dtype = TOKEN_DTYPES[bin_dtype]
    done_bytes = 0
    if source.size_bytes % dtype.itemsize:
        raise InvalidData(
            f"{source.path} has {source.size_bytes} bytes, no whole number of {bin_dtype} ids",
            hint="see data.bin_dtype; the file must hold ids and nothing else",
        )
    with _reading(source.path), source.path.open("rb") as file:
        while block := file.read(READ_BYTES):
            ids = np.frombuffer(block[: len(block) // dtype.itemsize * dtype.itemsize], dtype=dtype)
            if ids.size and int(ids.max()) >= vocabulary_size:
                at = int(np.argmax(ids >= vocabulary_size))
                raise InvalidData(
                    f"{source.path} holds id {int(ids[at])} at position {done_bytes // dtype.itemsize + at}, "
                    f"the vocabulary has {vocabulary_size}",
                    hint="see data.bin_dtype, model.tokenizer and vocab_size in model.config",
                )
            done_bytes += len(block)
            yield ids, done_bytes


def load_extra(name: str, needed_for: str) -> Any:
    """Import the optional dependency `name`; InvalidConfig says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidConfig(
            f"{needed_for} needs the Python package {name.partition('.')[0]}, which is not installed here",
            hint="install it with: pip install 'swarm-stages[data]'",
        ) from error


# Files ---------------------------------------------------------------------------------------------------------------


def _matching(section: DataSection) -> list[Source]:
    patterns = [part.strip() for part in section.source.split(",") if part.strip()]
    paths = sorted({path for pattern in patterns for path in glob.glob(os.path.expanduser(pattern), recursive=True)})
    sources = []
    try:
        for path in map(Path, paths):
            if path.is_dir():
                if section.format == "hf" or (section.format == "auto" and _is_saved(path)):
                    sources.append(_folder(path))
            elif path.is_file():
                # The files of a saved data set lie below its folder, which "**" matches too.
                if section.format == "auto" and any(_is_saved(parent) for parent in path.parents[:2]):
                    continue
                chosen = _format(path) if section.format == "auto" else section.format
                sources.append(Source(path, chosen, path.stat().st_size))
    except OSError as error:
        raise InvalidData(f"{error.filename} cannot be read: {error.strerror}") from error
    if not sources:
        hint = "a folder needs a pattern: DIR/**/*.txt" if paths else "check the path; it is relative to where you are"
        raise InvalidData(f'data.source = "{section.source}" matches no file', hint=hint)
    return [source for source in sources if source.size_bytes > 0]


def _format(path: Path) -> str:
    name = path.name.lower()
    for suffix in _COMPRESSED:
        inner = name.removesuffix(suffix)
        if inner != name and Path(inner).suffix in (".jsonl", ".ndjson"):
            return "jsonl"
    return _SUFFIXES.get(Path(name).suffix, "text")


def _is_saved(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in _SAVED_MARKS)


def _folder(folder: Path) -> Source:
    return Source(folder, "hf", sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidData(f"{path} cannot be read: {error.strerror or error}") from error


def _plain(path: Path) -> Iterator[TextPiece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, held, held_bytes, at = 0, [], 0, 0
    try:
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                held_back = len(decoder.getstate()[0])
                held.append(decoder.decode(block))
                position += len(block)
                held_bytes += len(block)
                if held_bytes > CUT_BYTES:
                    text = "".join(held)
                    cut = _line_end(text, 0, len(text) - 1)
                    yield TextPiece(text[:cut], False, position, at)
                    held, held_bytes, at = [text[cut:]], len(text) - cut, position
            held_back = len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InvalidData(
            f"{path} is not UTF-8: byte {position - held_back + error.start}",
            hint="convert the file to UTF-8, or choose data.source so that it is left out",
        ) from None
    yield TextPiece("".join(held), True, position, at)


def _json_lines(path: Path, text_field: str) -> Iterator[TextPiece]:
    with path.open("rb") as raw, _decompressed(path, raw) as file:
        for number, line in enumerate(_lines(path, file), start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                values = json.loads(_decoded(line.removeprefix(codecs.BOM_UTF8), where))
            except (ValueError, RecursionError) as error:
                what = (
                    f"{error.msg}: character {error.pos + 1} of the line"
                    if isinstance(error, json.JSONDecodeError)
                    else error
                )
                raise InvalidData(f"{where} is not JSON: {what}", hint="each line must be one JSON object") from None
            if not isinstance(values, dict):
                raise InvalidData(f"{where} is no JSON object", hint=f'write lines such as {{"{text_field}": "..."}}')
            if text_field not in values:
                texts = [name for name, value in values.items() if isinstance(value, str)]
                raise InvalidData(f'{where} has no field "{text_field}"', hint=_other_field(texts))
            text = _text(values[text_field], f'{where}: field "{text_field}"')
            if b"\\u" in line:  # half a surrogate pair is JSON, but no text
                _check_encodes(text, where)
            yield from _whole(text, raw.tell(), number)


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(LINE_BYTES_MAX):
        if len(line) == LINE_BYTES_MAX:
            raise InvalidData(f"{path} has a line of more than {LINE_BYTES_MAX} bytes", hint="is it JSON lines?")
        yield line


@contextmanager
def _decompressed(path: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    try:
        match path.suffix.lower():
            case ".gz":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield file  # type: ignore[misc]  # reads as a binary file does
            case ".zst":
                arrow = load_extra("pyarrow", f"reading {path}")
                with arrow.CompressedInputStream(raw, "zstd") as stream:
                    yield io.BufferedReader(stream, READ_BYTES)
            case _:
                yield raw
    except (EOFError, gzip.BadGzipFile) as error:
        raise InvalidData(f"{path} is damaged or not compressed as its name says: {error}") from error
    except zlib.error as error:
        raise InvalidData(f"{path} is damaged: {error}") from error
    except OSError as error:
        if error.errno is not None or path.suffix.lower() != ".zst":
            raise
        raise InvalidData(f"{path} is damaged or not compressed as its name says: {first_line(error)}") from error


def _decoded(raw: bytes, where: str) -> str:
    """The text of these bytes; InvalidData says which byte is not UTF-8, or half a surrogate pair."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        start = error.start
    try:
        raw.decode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise InvalidData(f"{where} is not UTF-8: byte {error.start} of it") from None
    raise InvalidData(f"{where} is no valid Unicode: half a surrogate pair at byte {start} of it")


def _parquet(source: Source, text_field: str) -> Iterator[TextPiece]:
    arrow = load_extra("pyarrow", f"reading {source.path}")
    parquet = load_extra("pyarrow.parquet", f"reading {source.path}")
    hint = "write it again, or choose data.source so that it is left out; for another kind of file: data.format"
    with _damage(arrow, f"{source.path} is no Parquet file, or damaged", hint):
        metadata = parquet.read_metadata(source.path)
        _check_column(arrow, str(source.path), metadata.schema.to_arrow_schema(), text_field)
        reads = parquet.ParquetFile(source.path, metadata=metadata, buffer_size=READ_BYTES)
        with reads as file, source.path.open("rb") as raw:
            rows, row = max(1, metadata.num_rows), 0
            for number in range(metadata.num_row_groups):
                at_once = _rows_at_once(source, metadata.row_group(number), raw, text_field, row)
                for batch in file.iter_batches(batch_size=at_once, row_groups=[number], columns=[text_field]):
                    done_bytes = source.size_bytes * (row + batch.num_rows) // rows
                    yield from _column(batch.column(0), str(source.path), text_field, row, done_bytes)
                    row += batch.num_rows


@contextmanager
def _damage(arrow: Any, what: str, hint: str) -> Iterator[None]:
    """InvalidData in the place of what pyarrow says of a file's content, whichever of its errors that is."""
    try:
        yield
    except MemoryError:  # pyarrow's is both
        raise
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the content
            raise
        raise InvalidData(f"{what}: {first_line(error)[:300]}", hint=hint) from error


def _rows_at_once(source: Source, group: Any, raw: BinaryIO, text_field: str, row: int) -> int:
    """How many rows of a row group to hold at a time: no more than hold TABLE_BYTES_MAX, by its own words.

    Each row may be the whole dictionary. InvalidData if there is no memory for the largest page.
    """
    rows = ROWS
    for chunk in (group.column(at) for at in range(group.num_columns)):
        if chunk.path_in_schema != text_field:
            continue
        pages = page_bytes(raw, chunk)
        check_room(partial(source.behind, row, "a page"), max(pages, default=0))
        rows = min(rows, TABLE_BYTES_MAX * max(1, group.num_rows) // max(1, chunk.total_uncompressed_size))
        if chunk.has_dictionary_page and pages:
            rows = min(rows, TABLE_BYTES_MAX // max(1, pages[0]))
    return max(1, rows)


# Hugging Face data sets ----------------------------------------------------------------------------------------------


def _data_set(source: Source, section: DataSection) -> Iterator[TextPiece]:
    name = f'data.source = "{section.source}"'
    arrow = load_extra("pyarrow", name)
    rows = _load_data_set(source, section)
    _check_column(arrow, name, rows.features.arrow_schema, section.text_field)
    table = rows.select_columns([section.text_field]).with_format("arrow")
    row = 0
    total = max(1, len(rows))
    with _damage(arrow, f"{name} is damaged", "check data.source, or download it again"):
        for batch in table.iter(ROWS):
            done_bytes = source.size_bytes * (row + batch.num_rows) // total
            for chunk in batch.column(0).chunks:
                yield from _column(chunk, name, section.text_field, row, done_bytes)
                row += len(chunk)


def _load_data_set(source: Source, section: DataSection) -> Any:
    """A `datasets.Dataset`: complete and on disk, so that its rows have one order."""
    datasets = load_extra("datasets", f'data.source = "{section.source}"')
    path, _, revision = str(source.path).partition("@") if not source.path.is_dir() else (str(source.path), "", "")
    where = f'data.source = "{section.source}"'
    try:
        if _is_saved(source.path):
            found = datasets.load_from_disk(path)
            if isinstance(found, dict):
                if section.split not in found:
                    raise InvalidData(
                        f'{where} has no split "{section.split}"', hint=f"data.split: one of {', '.join(sorted(found))}"
                    )
                found = found[section.split]
            return found
        return datasets.load_dataset(path, section.subset or None, split=section.split, revision=revision or None)
    except (SwarmError, MemoryError):
        raise
    except Exception as error:  # of any library that it loads files with
        raise InvalidData(
            f"{where} (subset {section.subset!r}, split {section.split!r}) cannot be loaded: "
            f"{type(error).__name__}: {first_line(error)[:300]}",
            hint="check data.source, data.subset, data.split, the network and HF_TOKEN; a folder must hold data files "
            "or come from save_to_disk",
        ) from error


def _check_column(arrow: Any, where: str, schema: Any, text_field: str) -> None:
    if text_field not in schema.names:
        raise InvalidData(f'{where} has no column "{text_field}"', hint=_other_column(arrow, schema))
    if not _is_text(arrow, schema.field(text_field).type):
        kind = schema.field(text_field).type
        raise InvalidData(f'{where}: column "{text_field}" holds {kind}, not text', hint=_other_column(arrow, schema))


def _is_text(arrow: Any, kind: Any) -> bool:
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind))


def _other_column(arrow: Any, schema: Any) -> str:
    return _other_field([field.name for field in schema if _is_text(arrow, field.type)])


def _column(column: Any, where: str, text_field: str, first_row: int, done_bytes: int) -> Iterator[TextPiece]:
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        raise InvalidData(
            f'{where}: column "{text_field}", rows {first_row} to {first_row + len(column) - 1}, is not UTF-8'
        ) from None
    for row, value in enumerate(values, start=first_row):
        yield from _whole(_text(value, f'{where}, row {row}: column "{text_field}"'), done_bytes, row)


# All -----------------------------------------------------------------------------------------------------------------


def _whole(text: str, done_bytes: int, at: int) -> Iterator[TextPiece]:
    """The pieces of a text that is in memory; none if it is empty."""
    start = 0
    while len(text) - start > CUT_BYTES:
        cut = _line_end(text, start, start + CUT_BYTES)
        yield TextPiece(text[start:cut], False, done_bytes, at)
        start = cut
    if text:
        yield TextPiece(text[start:], True, done_bytes, at)


def _line_end(text: str, start: int, stop: int) -> int:
    """Where to cut text[start:stop]: behind its last line end that is not followed by white space, else at `stop`."""
    at = text.rfind("\n", start, stop)
    while at > start and text[at + 1].isspace():
        at = text.rfind("\n", start, at)
    return at + 1 if at >= start else stop


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidData(f"{where} is {json.dumps(value, default=str)[:60]}, not text", hint="see data.text_field")
    return value


def _check_encodes(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidData(f"{where} is no valid Unicode: half a surrogate pair at character {error.start}") from None


def _other_field(names: Sequence[str]) -> str:
    if not names:
        return "no other holds text: choose other data"
    return f"set data.text_field to one of: {', '.join(map(str, names))}"[:300]
