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
import fnmatch
import glob
import gzip
import importlib
import io
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swarm.data.batches import TOKEN_DTYPES
from swarm.data.kinds import HEAD_BYTES, kind_beside_ids, kind_of
from swarm.data.room import ZSTD_HEAD_BYTES, check_room, page_bytes, zstd_window_bytes
from swarm.errors import InvalidConfig, InvalidData, SwarmError
from swarm.hf.placing import ALWAYS_THERE
from swarm.home import library_cache
from swarm.job.spec import DataSection
from swarm.text import first_line, size

READ_BYTES = 4 << 20
CUT_BYTES = 8 << 20  # a larger text is cut; tokenizers need 150 bytes of memory per byte of a text
LINE_BYTES_MAX = 16 << 20  # of a JSON line, and so of a file that is none, however well it was compressed
ROWS = 1024  # rows of a table that are looked at together
TABLE_BYTES_MAX = 64 << 20  # and the bytes of their texts
HUB_PREFIX = "hf:"
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".bin": "bin"}
_TABLES = (".csv", ".tsv")
_COMPRESSED = (".gz", ".zst")
ZSTD_WINDOW_BYTES_MAX = 128 << 20  # the library unpacks no more
DEPTH_MAX = 8  # of fields in fields
_LLMC_MAGICS = {20240520: 16, 20240801: 32}  # dev/data/data_common.py of llm.c; and the bits of an id
LLMC_HEADER_BYTES = 1024
_MISSING = object()
_AGAIN_HINT = "write or download it again, or choose data.source so that it is left out"
_LEFT_OUT_HINT = "let this user read it, or choose data.source so that it is left out"
_SKIP_HINT = 'data.on_null = "skip" leaves such rows out'
_UNICODE_HINT = "write the text anew as UTF-8, or choose data.source so that the file is left out"
_WINDOW_HINT = "unpack it: zstd -d --long=31"
_SAVED_MARKS = ("state.json", "dataset_dict.json")  # what save_to_disk writes


class TextPiece(NamedTuple):
    """A text or a part of one; `ends` closes the text, `done_bytes` is how much of the source has been read.

    `at` is the line (from 1), the row (from 0) or, for plain text, the byte in the source. A row that is left out is an
    empty text that is `skipped`.
    """

    text: str
    ends: bool
    done_bytes: int
    at: int
    skipped: bool = False


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
    ("hf:owner/name", "hf:owner/name@revision"). What is there by that very name is meant, though it be a pattern, too.
    With format "auto" the suffix decides: .jsonl, .ndjson, .json (JSON lines), .parquet, .bin. A folder that
    `save_to_disk` wrote is a data set. Any other file is one text, but for tables (.csv, .tsv). Text and JSON lines may
    be compressed (.gz, .zst). InvalidData if a glob matches nothing, if what it matches cannot be read or is no regular
    file, if only empty files match, or if token files (.bin) are mixed with others: no part of the data is passed over.
    """
    named = section.source.removeprefix(HUB_PREFIX)
    if section.source.startswith(HUB_PREFIX) and not named.startswith("//"):
        if section.format not in ("auto", "hf"):
            raise InvalidConfig(
                f'data.source = "{section.source}" is a data set, data.format = "{section.format}" is not',
                hint='set data.format = "auto"',
            )
        folder = Path(os.path.expanduser(named))
        return [_folder(folder)] if folder.is_dir() else [Source(Path(named), "hf", 0)]
    if "://" in section.source and not os.path.exists(section.source):
        raise InvalidData(
            f'data.source = "{section.source}" is an address, and files are read from this machine only',
            hint='download it, and name the file; a data set of the Hugging Face hub is "hf:OWNER/NAME"',
        )
    if section.format == "hf" and not any(_matched(named).values()):
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
                yield from _plain(source.path, is_sure=section.format == "text")
            case "jsonl":
                yield from _json_lines(source.path, section)
            case "parquet":
                yield from _parquet(source, section)
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
            if not done_bytes:
                _check_ids(source.path, block, ids, vocabulary_size)
            if ids.size and int(ids.max()) >= vocabulary_size:
                at = int(np.argmax(ids >= vocabulary_size))
                raise InvalidData(
                    f"{source.path} holds id {int(ids[at])} at position {done_bytes // dtype.itemsize + at}, "
                    f"the vocabulary has {vocabulary_size}",
                    hint="see data.bin_dtype, model.tokenizer and vocab_size in model.config",
                )
            done_bytes += len(block)
            yield ids, done_bytes


def _check_ids(path: Path, block: bytes, ids: NDArray[Any], vocabulary_size: int) -> None:
    """InvalidData if what a file begins with looks like something else than ids of this width."""
    for magic, bits in _LLMC_MAGICS.items():
        if block.startswith(magic.to_bytes(4, "little")):
            raise InvalidData(
                f"{path} begins with {magic}: it is a shard of llm.c, whose header has {LLMC_HEADER_BYTES} bytes",
                hint=f'cut it off: tail -c +{LLMC_HEADER_BYTES + 1}, and set data.bin_dtype = "uint{bits}"',
            )
    if (kind := kind_beside_ids(block[:HEAD_BYTES])) is not None:
        raise InvalidData(f"{path} is {kind.name}, and its name says token ids (.bin)", hint=kind.hint)
    # A wider id of the vocabulary has these bits in its upper half at most.
    bits = 8 * ids.dtype.itemsize
    upper_max = (vocabulary_size - 1) >> bits
    pairs = ids[: ids.size // 2 * 2].reshape(-1, 2)
    if len(pairs) >= (64 if upper_max else 4) and pairs[:, 1].max() <= upper_max < pairs[:, 0].max():
        what = f"at most {upper_max}" if upper_max else "0"
        hint = 'set data.bin_dtype = "uint32"' if bits == 16 else "write the ids as uint32"
        raise InvalidData(f"{path}: every second uint{bits} is {what}: is it uint{2 * bits}?", hint=hint)


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
    is_saved = cache(_is_saved)
    sources = []
    for path in map(Path, _paths(section.source)):
        mode = _mode(path)
        if stat.S_ISDIR(mode):
            if section.format == "hf" or (section.format == "auto" and _is_saved(path)):
                sources.append(_folder(path))
        elif stat.S_ISREG(mode):
            if section.format == "hf":
                raise InvalidData(
                    f'{path} is a file, and data.format = "hf" reads folders and the hub',
                    hint='set data.format = "auto"',
                )
            # The files of a saved data set lie below its folder, which "**" matches too.
            if section.format == "auto" and any(is_saved(parent) for parent in path.parents[:2]):
                continue
            chosen = _format(path) if section.format == "auto" else section.format
            sources.append(Source(path, chosen, path.stat().st_size))
        else:
            raise InvalidData(f"{path} is no regular file", hint="a pipe or a device: write what it gives into a file")
    if not sources:
        raise InvalidData(
            f'data.source = "{section.source}" matches no file, only folders',
            hint="a folder needs a pattern: DIR/**/*.txt",
        )
    return [source for source in sources if source.size_bytes > 0]


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        told = f"{path} is a link to {path.readlink()}, which is not there" if path.is_symlink() else f"{path} is gone"
    except OSError as error:
        told = f"{path} cannot be read: {error.strerror}"
    raise InvalidData(told, hint=_LEFT_OUT_HINT)


def _paths(named: str) -> list[str]:
    """All that the source names, in order; InvalidData if a part of it names nothing, or a folder cannot be read."""
    matched = _matched(named)
    for part, paths in matched.items():
        if not paths:
            relative = "" if os.path.isabs(os.path.expanduser(part)) else "; it is relative to where you are"
            raise InvalidData(f'data.source = "{part}" matches no file', hint=f"check the path{relative}")
    return sorted({path for paths in matched.values() for path in paths})


def _matched(named: str) -> dict[str, list[str]]:
    """What is there by this very name; else what each of the patterns matches that it names."""
    if os.path.lexists(whole := os.path.expanduser(named)):
        return {named: [whole]}
    matched = {}
    for part in [part.strip() for part in named.split(",") if part.strip()] or [named]:
        head = pattern = os.path.expanduser(part)
        while head and not os.path.exists(head):  # what is there by that very name is no pattern
            head = os.path.dirname(head)
        rest = [name for name in pattern[len(head) :].split("/") if name]
        matched[part] = list(_below(head, rest))
    return matched


def _below(folder: str, pattern: Sequence[str], through: Set[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """The paths below a folder (empty: here) that the names of a pattern match; InvalidData if one may not be read.

    As glob.glob, which passes over such folders, and follows a link that leads back for as long as the system does.
    """
    if not pattern:
        yield folder
        return
    name, rest = pattern[0], pattern[1:]
    try:
        if not glob.has_magic(name):
            path = os.path.join(folder, name)
            os.lstat(path)
            yield from _below(path, rest)
            return
        names = sorted(os.listdir(folder or "."))
        identity = os.stat(folder or ".")
    except (OSError, ValueError) as error:  # ValueError: no path at all
        if isinstance(error, PermissionError) and os.path.basename(folder) not in ALWAYS_THERE:
            raise InvalidData(f"{folder} cannot be read: {error.strerror}", hint=_LEFT_OUT_HINT) from None
        return
    if name != "**":
        for entry in fnmatch.filter(names, name):
            if name.startswith(".") or not entry.startswith("."):
                yield from _below(os.path.join(folder, entry), rest)
        return
    if (here := (identity.st_dev, identity.st_ino)) in through:
        return
    yield from _below(folder, rest)
    for path in (os.path.join(folder, entry) for entry in names if not entry.startswith(".")):
        if os.path.isdir(path):
            yield from _below(path, pattern, {*through, here})
        elif not rest:
            yield path


def _format(path: Path) -> str:
    name, suffix = os.path.splitext(path.name.lower())
    packed = suffix if suffix in _COMPRESSED else ""
    kind = os.path.splitext(name)[1] if packed else suffix
    if kind in _TABLES:
        raise InvalidData(
            f"{path} is a table by its name, and data.text_field cannot be found in it",
            hint='write it as JSON lines or Parquet; data.format = "text" trains on its lines as they are',
        )
    found = _SUFFIXES.get(kind, "text")
    if packed and found not in ("text", "jsonl"):
        program = "gzip" if packed == ".gz" else "zstd"
        raise InvalidData(f"{path} is compressed, and only text and JSON lines may be", hint=f"unpack it: {program} -d")
    return found


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


def _plain(path: Path, *, is_sure: bool) -> Iterator[TextPiece]:
    """The text of a file. Unless a person says that it is text, it is refused if its first bytes say what else."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, held, held_bytes, at = 0, [], 0, 0
    with path.open("rb") as raw, _decompressed(path, raw) as file:
        if not is_sure:
            _check_kind(path, file)
        try:
            while block := file.read(READ_BYTES):
                held_back = len(decoder.getstate()[0])
                if not position:
                    if not is_sure:
                        _check_no_json(path, block)
                    if block.startswith(codecs.BOM_UTF8):
                        block, position = block[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
                held.append(decoder.decode(block))
                position += len(block)
                held_bytes += len(block)
                if held_bytes > CUT_BYTES:
                    text = "".join(held)
                    cut = _line_end(text, 0, len(text) - 1)
                    yield TextPiece(text[:cut], False, raw.tell(), at)
                    held, held_bytes, at = [text[cut:]], len(text) - cut, position
            held_back = len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            place = f"{path} is not UTF-8: byte {position - held_back + error.start}"
            if not position and is_sure and (kind := kind_of(block)) is not None:
                raise InvalidData(f"{place}; it is {kind.name}", hint=kind.hint) from None
            raise InvalidData(
                place, hint="convert the file to UTF-8, or choose data.source so that it is left out"
            ) from None
        yield TextPiece("".join(held), True, raw.tell(), at)


def _check_kind(path: Path, file: BinaryIO, wanted: str = "text") -> None:
    """InvalidData if the first bytes show another kind of file."""
    kind = kind_of(file.peek(HEAD_BYTES))  # type: ignore[attr-defined]  # all that are opened here have it
    if kind is None:
        return
    if wanted == "text" and path.suffix.lower() in _COMPRESSED:
        hint = "it was compressed twice: unpack it once" if "compressed with" in kind.name else kind.hint
        raise InvalidData(f"{path} unpacks to what is {kind.name}, not {wanted}", hint=hint)
    raise InvalidData(f"{path} is {kind.name}, not {wanted}", hint=kind.hint)


def _check_no_json(path: Path, block: bytes) -> None:
    """InvalidData if the first line, or all of a small file, is a JSON object: its syntax would be trained on."""
    block = block.removeprefix(codecs.BOM_UTF8).strip()
    if not block.startswith((b"{", b"[")):
        return
    for text in (block.partition(b"\n")[0], block):
        with suppress(ValueError, RecursionError):
            value = json.loads(text)
            if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
                raise InvalidData(
                    f"{path} begins with a JSON object, and its name does not say that it is JSON lines",
                    hint='set data.format = "jsonl", or "text" to train on the lines as they are',
                )


def _json_lines(path: Path, section: DataSection) -> Iterator[TextPiece]:
    text_field = section.text_field
    with path.open("rb") as raw, _decompressed(path, raw) as file:
        _check_kind(path, file)
        begins = True
        for number, line in enumerate(_lines(path, file), start=1):
            line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            if begins and line.lstrip().startswith(b"["):
                raise InvalidData(f"{path} is a JSON array", hint="write one object per line: jq -c '.[]'")
            where = f"{path}, line {number}"
            values = _values(line, where, begins=begins)
            begins = False
            if not isinstance(values, dict | None):
                raise InvalidData(f"{where} is no JSON object", hint=f'write lines such as {{"{text_field}": "..."}}')
            value = values[text_field] if values and text_field in values else _inner(values, text_field)
            if section.on_null == "skip" and (value is None or value is _MISSING):
                yield TextPiece("", True, raw.tell(), number, skipped=True)
                continue
            if value is _MISSING:
                others = list(_fields(values or {}))
                hint = f"{_other_field(others)}; {_SKIP_HINT}"
                raise InvalidData(f'{where} has no field "{text_field}"', hint=hint)
            text = _text(value, f'{where}: field "{text_field}"')
            if b"\\u" in line:  # half a surrogate pair is JSON, but no text
                _check_encodes(text, where)
            yield from _whole(text, raw.tell(), number)


def _values(line: bytes, where: str, *, begins: bool) -> object:
    """The value of a line of JSON; InvalidData says where it is none. The first line of all `begins` a file."""
    try:
        return json.loads(_decoded(line, where))
    except (ValueError, RecursionError) as error:
        hint = "each line must be one JSON object"
        if begins and line.strip() == b"{":
            hint = f"{hint}: jq -c . writes one that lies over several lines so"
        place = f": character {error.pos + 1} of the line" if isinstance(error, json.JSONDecodeError) else ""
        what = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise InvalidData(f"{where} is not JSON: {what}{place}", hint=hint) from None


def _inner(value: object, text_field: str) -> object:
    """The value of a field of a field, such as doc.text; null if the outer one is, _MISSING if there is none."""
    for name in text_field.split("."):
        if value is None:
            return None
        if not isinstance(value, dict) or name not in value:
            return _MISSING
        value = value[name]
    return value


def _fields(values: Mapping[str, object], within: str = "", depth: int = 0) -> Iterator[str]:
    """The names of the fields that hold text."""
    for name, value in values.items():
        if isinstance(value, str):
            yield within + name
        elif isinstance(value, dict) and depth < DEPTH_MAX:
            yield from _fields(value, f"{within}{name}.", depth + 1)


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
                _check_window(path, raw)
                with arrow.CompressedInputStream(raw, "zstd") as stream:
                    yield io.BufferedReader(stream, READ_BYTES)
            case _:
                yield raw
    except (EOFError, gzip.BadGzipFile) as error:
        raise InvalidData(f"{path} is damaged or not compressed as its name says: {error}", hint=_AGAIN_HINT) from error
    except zlib.error as error:
        raise InvalidData(f"{path} is damaged: {error}", hint=_AGAIN_HINT) from error
    except OSError as error:
        if error.errno is not None or path.suffix.lower() != ".zst":
            raise
        if "too much memory" in str(error):  # of a frame behind the first one
            raise InvalidData(f"{path} has a frame whose window is over 128 MiB", hint=_WINDOW_HINT) from error
        raise InvalidData(
            f"{path} is damaged or not compressed as its name says: {first_line(error)}", hint=_AGAIN_HINT
        ) from error


def _check_window(path: Path, raw: BinaryIO) -> None:
    """InvalidData if the first frame refers back further than the library or the memory allows."""
    window_bytes = zstd_window_bytes(raw.peek(ZSTD_HEAD_BYTES))  # type: ignore[attr-defined]  # opened as a buffer
    if window_bytes > ZSTD_WINDOW_BYTES_MAX:
        most = size(ZSTD_WINDOW_BYTES_MAX)
        raise InvalidData(f"{path} has a window of {size(window_bytes)}, more than {most}", hint=_WINDOW_HINT)
    check_room(lambda: f"{path}, its window", window_bytes)


def _decoded(raw: bytes, where: str) -> str:
    """The text of these bytes; InvalidData says which byte is not UTF-8, or half a surrogate pair."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        start = error.start
    try:
        raw.decode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise InvalidData(f"{where} is not UTF-8: byte {error.start} of it", hint=_UNICODE_HINT) from None
    what = f"half a surrogate pair at byte {start} of it"
    raise InvalidData(f"{where} is no valid Unicode: {what}", hint=_UNICODE_HINT)


def _parquet(source: Source, section: DataSection) -> Iterator[TextPiece]:
    text_field = section.text_field
    arrow = load_extra("pyarrow", f"reading {source.path}")
    parquet = load_extra("pyarrow.parquet", f"reading {source.path}")
    with source.path.open("rb") as opened:
        if not opened.peek(4).startswith(b"PAR1"):
            _check_kind(source.path, opened, "a Parquet file")
    hint = f"{_AGAIN_HINT}; for another kind of file: data.format"
    with _damage(arrow, f"{source.path} is no Parquet file, or damaged", hint):
        metadata = parquet.read_metadata(source.path)
        names = _column_path(arrow, str(source.path), metadata.schema.to_arrow_schema(), text_field)
        reads = parquet.ParquetFile(source.path, metadata=metadata, buffer_size=READ_BYTES)
        with reads as file, source.path.open("rb") as raw:
            rows, row = max(1, metadata.num_rows), 0
            for number in range(metadata.num_row_groups):
                at_once = _rows_at_once(source, metadata.row_group(number), raw, text_field, row)
                for batch in file.iter_batches(batch_size=at_once, row_groups=[number], columns=[".".join(names)]):
                    done_bytes = source.size_bytes * (row + batch.num_rows) // rows
                    yield from _column(batch.column(0), names, str(source.path), section, row, done_bytes)
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
    """The number of rows of a row group to hold at a time: at most TABLE_BYTES_MAX, by its own words.

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
    names = _column_path(arrow, name, rows.features.arrow_schema, section.text_field)
    table = rows.select_columns([names[0]]).with_format("arrow")
    row = 0
    total = max(1, len(rows))
    with _damage(arrow, f"{name} is damaged", "check data.source, or download it again"):
        for batch in table.iter(ROWS):
            done_bytes = source.size_bytes * (row + batch.num_rows) // total
            for chunk in batch.column(0).chunks:
                _check_offsets(arrow, chunk)
                yield from _column(chunk, names, name, section, row, done_bytes)
                row += len(chunk)


def _check_offsets(arrow: Any, column: Any) -> None:
    """ArrowInvalid if texts lie outside of the file: it is mapped, so to read them would end the process."""
    try:
        column.validate(full=True)
    except arrow.ArrowInvalid as error:
        if "UTF8" not in str(error):  # the check behind the offsets finds that, and names its row
            raise


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
        with library_cache(InvalidData):
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


def _column_path(arrow: Any, where: str, schema: Any, text_field: str) -> list[str]:
    """The names that lead to the column of texts: one, or several if it is a field of a field. InvalidData."""
    texts = list(_text_columns(arrow, schema))
    names = [text_field] if text_field in schema.names else text_field.split(".")
    kind = schema
    for depth, name in enumerate(names, start=1):
        fields = {field.name: field.type for field in kind} if kind is schema or arrow.types.is_struct(kind) else {}
        if name not in fields:
            raise InvalidData(f'{where} has no column "{text_field}"', hint=_other_field(texts))
        kind = fields[name]
        if arrow.types.is_null(kind):  # as writers call a column in which they have seen nothing else
            return names[:depth]
    # Bytes may be UTF-8: writers that know no texts write them so.
    if not (_holds(arrow, kind, "string") or _holds(arrow, kind, "binary")):
        raise InvalidData(f'{where}: column "{text_field}" holds {kind}, not text', hint=_other_field(texts))
    return names


def _text_columns(arrow: Any, fields: Any, within: str = "", depth: int = 0) -> Iterator[str]:
    """The names of the columns that hold text."""
    for field in fields:
        if arrow.types.is_struct(field.type) and depth < DEPTH_MAX:
            yield from _text_columns(arrow, field.type, f"{within}{field.name}.", depth + 1)
        elif _holds(arrow, field.type, "string"):
            yield within + field.name


def _holds(arrow: Any, kind: Any, what: str) -> bool:
    """Whether a column holds values of this type, "string" or "binary", in whichever form."""
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    return any(getattr(arrow.types, f"is_{form}")(kind) for form in (what, f"large_{what}", f"{what}_view"))


def _column(
    column: Any, names: Sequence[str], where: str, section: DataSection, first_row: int, done_bytes: int
) -> Iterator[TextPiece]:
    for name in names[1:]:
        column = load_extra("pyarrow.compute", where).struct_field(column, name)
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # which row, the bytes tell
        column = column.dictionary_decode() if hasattr(column, "dictionary") else column
        values = column.cast("large_binary").to_pylist()
    for row, value in enumerate(values, start=first_row):
        if value is None and section.on_null == "skip":
            yield TextPiece("", True, done_bytes, row, skipped=True)
            continue
        at = f'{where}, row {row}: column "{section.text_field}"'
        text = _decoded(value, at) if isinstance(value, bytes) else _text(value, at)
        yield from _whole(text, done_bytes, row)


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
        hint = _SKIP_HINT if value is None else "see data.text_field"
        raise InvalidData(f"{where} is {json.dumps(value, default=str)[:60]}, not text", hint=hint)
    return value


def _check_encodes(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"half a surrogate pair at character {error.start}"
        raise InvalidData(f"{where} is no valid Unicode: {what}", hint=_UNICODE_HINT) from None


def _other_field(names: Sequence[str]) -> str:
    if not names:
        return "see data.text_field, or choose other data"
    return f"set data.text_field to one of: {', '.join(map(str, names))}"[:300]
