"""The audit log: calls by people and machines, and refusals, as one JSON object per line.

    audit-000001.jsonl  audit-000002.jsonl  audit.jsonl          the older ones are full, the last is written to

Each line holds a hash over itself and the line before it, so a line that is changed, taken out or put in breaks the
chain. The chain goes on from file to file: the first line of each says how the one before it ended, and which is the
oldest that is kept. A person who can write the files could make the whole chain anew; keep a copy of its newest hash
elsewhere.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from swarm.errors import InvalidConfig
from swarm.text import printable

FIRST_HASH = "0" * 64
TEXT_CHARACTERS_MAX = 400
TAIL_BYTES = 64 << 10  # more than a line can have
PIECE_CHARACTERS = 1 << 20  # of a line that is none of ours
FILE_BYTES_MAX = 64 << 20
FILES_MAX = 16  # the oldest go
CONTINUES = "Continue"  # the action of the first line of a file
_WRONG = "does not follow from the line before it"


class Audit:
    """Appends to the newest file; opened once."""

    def __init__(self, path: Path, wall_s: Callable[[], float], bytes_max: int = FILE_BYTES_MAX) -> None:
        """InvalidConfig if the file cannot be written. After a line that is cut off, a new chain begins."""
        self._path = path
        self._wall_s = wall_s
        self._bytes_max = bytes_max
        older = _older(path)
        try:
            self._number = max(1 + max(older, default=0), _place(path)[0] if _has_lines(path) else 0)
            # Ended between two files: the newest of the full ones is gone on from.
            last = path if _has_lines(path) or not older else older[max(older)]
            self._newest = _newest_hash(last)
            self._file = _opened(path)
            if last is not path:
                self._continue()
            elif self._newest == FIRST_HASH and _has_lines(path):
                os.write(self._file, b"\n")
        except OSError as error:
            raise InvalidConfig(
                f"the audit log {path} cannot be continued: {error}", hint="move it away to begin a new one"
            ) from error

    def write(self, actor: str, action: str, result: str, **facts: str) -> None:
        """Add a line; `result` is "allowed", or the code and text of an error. OSError if the disk is full."""
        if os.fstat(self._file).st_size >= self._bytes_max:
            with suppress(OSError):  # else this file gets longer
                self._begin_file()
        self._append({"actor": actor, "action": action, "result": result} | facts)

    def close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)

    def _append(self, facts: Mapping[str, str | int]) -> None:
        line: dict[str, Any] = {"time_unix_s": round(self._wall_s(), 3), **facts}
        line = {key: printable(one)[:TEXT_CHARACTERS_MAX] if isinstance(one, str) else one for key, one in line.items()}
        newest = _hash(self._newest, line)
        content = json.dumps(line | {"hash": newest}).encode() + b"\n"
        before_bytes = os.fstat(self._file).st_size
        if os.write(self._file, content) < len(content):
            os.ftruncate(self._file, before_bytes)  # the next line must not follow the half of this one
            raise OSError(errno.ENOSPC, "no room for a whole line")
        self._newest = newest

    def _begin_file(self) -> None:
        """Keep the full file under its number, and go on in another; OSError leaves all as it was."""
        full = _numbered(self._path, self._number)
        self._path.rename(full)
        try:
            file = _opened(self._path)
        except OSError:
            full.rename(self._path)
            raise
        os.close(self._file)
        self._file = file
        self._number += 1
        self._continue()

    def _continue(self) -> None:
        """Write the first line of a file, and remove the files that are too old."""
        oldest = max(1, self._number - FILES_MAX + 1)
        told: dict[str, str | int] = {"actor": "the scheduler", "action": CONTINUES, "result": "allowed"}
        self._append(told | {"follows": self._newest, "file": self._number, "oldest": oldest})
        for number, path in _older(self._path).items():
            if number < oldest:
                path.unlink(missing_ok=True)


class Break(NamedTuple):
    """Where a log is not as it was written; line 0 is the file as a whole."""

    file: Path
    line: int
    problem: str


def verify(path: Path) -> Iterator[Break]:
    """Each break of the chain in the log that ends in this file, the oldest first. OSError if it cannot be read."""
    older = _older(path)
    newest, oldest = _place(path)
    # Without its first line a file says nothing of the older ones: those that are there are looked at.
    numbers = range(oldest, newest) if newest > 1 else sorted(older)
    before: str | None = FIRST_HASH if not numbers or numbers[0] == 1 else None
    for number in numbers:
        file = older.get(number)
        if file is None:
            yield Break(_numbered(path, number), 0, "is missing")
            before = None
            continue
        before = yield from _verify(file, before)
    yield from _verify(path, before)


def logs(path: Path) -> list[Path]:
    """The files of the log that ends in this one, the oldest first."""
    older = _older(path)
    return [*(older[number] for number in sorted(older)), path]


def _verify(path: Path, before: str | None) -> Generator[Break, None, str | None]:
    """The breaks in one file; gives its last hash. `before` is None where the file before it is not there."""
    for number, text in enumerate(lines_of(path), 1):
        try:
            line = json.loads(text)
            said = str(line.pop("hash"))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            yield Break(path, number, "is no line of an audit log")
            continue
        if before is None:
            before = str(line.get("follows"))
        # The text too: of two facts with one name, JSON shows the second only.
        if said != _hash(before, line) or text.rstrip("\n") != json.dumps(line | {"hash": said}):
            yield Break(path, number, _WRONG)
        before = said
    return before


def lines_of(path: Path) -> Iterator[str]:
    """The lines of one file, each with its end, longer ones in pieces; OSError if it is no regular file."""
    _check_regular(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from iter(lambda: file.readline(PIECE_CHARACTERS), "")


def _check_regular(path: Path) -> None:
    """OSError for a device or a pipe, which might not end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _place(path: Path) -> tuple[int, int]:
    """(number of this file, number of the oldest that is kept), as its first line says; (0, 0) if it says neither."""
    _check_regular(path)
    with path.open("rb") as file:
        first = file.readline(TAIL_BYTES)
    try:
        line = json.loads(first)
        if line["action"] != CONTINUES:
            return 1, 1
        number = int(line["file"])
        return number, max(1, number - FILES_MAX + 1, int(line["oldest"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0, 0


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:06}{path.suffix}")


def _older(path: Path) -> dict[int, Path]:
    """The full files of this log by their numbers."""
    name = re.compile(rf"{re.escape(path.stem)}-(\d{{6}}){re.escape(path.suffix)}")
    found = {file: name.fullmatch(file.name) for file in path.parent.glob(f"{path.stem}-*{path.suffix}")}
    return {int(match[1]): file for file, match in found.items() if match is not None}


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _has_lines(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _hash(before: str, line: dict[str, Any]) -> str:
    return hashlib.sha256((before + json.dumps(line, sort_keys=True)).encode()).hexdigest()


def _newest_hash(path: Path) -> str:
    if not _has_lines(path):
        return FIRST_HASH
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        tail = file.read()
    try:
        return str(json.loads(tail.splitlines()[-1])["hash"]) if tail.endswith(b"\n") else FIRST_HASH
    except (ValueError, KeyError, TypeError, RecursionError):
        return FIRST_HASH
