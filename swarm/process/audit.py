"""The audit log: calls by people and machines, and refusals, as one JSON object per line.

    audit-000001.jsonl  audit-000002.jsonl  audit.jsonl          the older ones are full, the last is written to

A thread writes the lines, and syncs them to the disk at most SYNC_S later: no call waits for a disk.

Not chosen: a chain of hashes over the lines, because a person who can write the files can make the chain anew.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarm.errors import InvalidConfig
from swarm.process.logs import get_logger
from swarm.text import counted, printable

LINE_BYTES_MAX = 1024
PIECE_CHARACTERS = 1 << 20  # of a line that is none of ours
FILE_BYTES_MAX = 64 << 20
FILES_MAX = 16  # the oldest go
SYNC_S = 0.2
PAUSE_S = 0.1  # between two syncs
WAITING_MAX = 16_384  # lines, while the disk stands still

_log = get_logger("audit")


class Audit:
    """Appends to the newest file. Made once, and closed with `close`."""

    def __init__(self, path: Path, wall_s: Callable[[], float], bytes_max: int = FILE_BYTES_MAX) -> None:
        """InvalidConfig if the file cannot be written."""
        self._path = path
        self._wall_s = wall_s
        self._bytes_max = bytes_max
        self._waiting: deque[bytes] = deque()
        self._left_out = 0  # lines for which there was no room
        self._is_closed = False
        self._turn = threading.Condition()
        self._is_idle = True
        try:
            _check_regular(path)
            self._file = _opened(path)
            if not _ends_whole(path):
                os.write(self._file, b"\n")
        except OSError as error:
            raise InvalidConfig(
                f"the audit log {path} cannot be continued: {error}", hint="move it away to begin a new one"
            ) from error
        self._thread = threading.Thread(target=self._run, name=f"audit {path.name}", daemon=True)
        self._thread.start()

    def write(self, actor: str, action: str, result: str, **facts: str) -> None:
        """Add a line soon; `result` is "allowed", or the code and text of an error."""
        line = self._line(actor=actor, action=action, result=result, **facts)
        with self._turn:
            if len(self._waiting) < WAITING_MAX and not self._is_closed:
                self._waiting.append(line)
            else:
                self._left_out += 1
            self._turn.notify_all()

    def flush(self) -> None:
        """Wait until all lines so far are on the disk, or could not be written."""
        with self._turn:
            self._turn.wait_for(lambda: self._is_idle and not self._waiting)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        with self._turn:
            self._is_closed = True
            self._turn.notify_all()
        self._thread.join()
        os.close(self._file)

    def _line(self, **facts: str) -> bytes:
        return line_of({"time_unix_s": round(self._wall_s(), 3), **facts})

    def _run(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._waiting or self._is_closed)
                lines, self._is_idle = list(self._waiting), False
                self._waiting.clear()
                left_out, self._left_out = self._left_out, 0
            if left_out:
                told = f"{counted(left_out, 'line')} left out"
                lines.append(self._line(actor="the scheduler", action="LeftOut", result=told))
            lost = self._store(lines)
            with self._turn:
                self._left_out += left_out + lost if lost else 0
                self._is_idle = True
                self._turn.notify_all()
                if self._is_closed and not self._waiting:
                    return
                self._turn.wait_for(lambda: self._is_closed, PAUSE_S)

    def _store(self, lines: list[bytes]) -> int:
        """Write and sync the lines; how many could not be written. A full disk must not keep an admin from acting."""
        for number, line in enumerate(lines):
            try:
                if os.fstat(self._file).st_size >= self._bytes_max:
                    with suppress(OSError):  # else this file gets longer
                        self._begin_file()
                self._append(line)
            except OSError as error:
                _log.error("lines are not in the audit log", file=str(self._path), reason=str(error))
                return len(lines) - number
        with suppress(OSError):  # such as a pipe: then the lines are with the reader
            os.fsync(self._file)
        return 0

    def _append(self, line: bytes) -> None:
        before_bytes = os.fstat(self._file).st_size
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, before_bytes)  # the next line must not follow the half of this one
            raise OSError(errno.ENOSPC, "no room for a whole line")

    def _begin_file(self) -> None:
        """Keep the full file under its number, and go on in another; OSError leaves all as it was."""
        older = _older(self._path)
        number = 1 + max(older, default=0)
        full = self._path.with_name(f"{self._path.stem}-{number:06}{self._path.suffix}")
        os.fsync(self._file)
        self._path.rename(full)
        try:
            file = _opened(self._path)
        except OSError:
            full.rename(self._path)
            raise
        os.close(self._file)
        self._file = file
        for old in sorted(older)[: max(0, len(older) + 2 - FILES_MAX)]:
            older[old].unlink(missing_ok=True)


def line_of(values: dict[str, Any]) -> bytes:
    """The line of these values, at most LINE_BYTES_MAX bytes: the longest texts are cut."""
    line = {name: printable(fact)[:LINE_BYTES_MAX] if isinstance(fact, str) else fact for name, fact in values.items()}
    while len(content := json.dumps(line).encode() + b"\n") > LINE_BYTES_MAX:
        texts = [name for name in line if isinstance(line[name], str)]
        longest = max(texts, key=lambda name: len(json.dumps(line[name])))
        line[longest] = line[longest][: 3 * len(line[longest]) // 4 - 1] + "…"
    return content


def logs(path: Path) -> list[Path]:
    """The files of the log that ends in this one, the oldest first."""
    older = _older(path)
    return [*(older[number] for number in sorted(older)), path]


def lines_of(path: Path) -> Iterator[str]:
    """The lines of one file, each with its end, longer ones in pieces; OSError if it is no regular file."""
    _check_regular(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from iter(lambda: file.readline(PIECE_CHARACTERS), "")


def _check_regular(path: Path) -> None:
    """OSError for a device or a pipe, which might not end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _older(path: Path) -> dict[int, Path]:
    """The full files of this log by their numbers."""
    name = re.compile(rf"{re.escape(path.stem)}-(\d{{6}}){re.escape(path.suffix)}")
    found = {file: name.fullmatch(file.name) for file in path.parent.glob(f"{path.stem}-*{path.suffix}")}
    return {int(match[1]): file for file, match in found.items() if match is not None}


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _ends_whole(path: Path) -> bool:
    """Whether the file has no half line at its end, which a scheduler that was killed may have left."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
