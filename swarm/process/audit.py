"""What people and machines asked of the scheduler, and were refused: one JSON object per line.

Each line holds a hash over itself and the line before it, so a line that is changed, taken out or put in breaks the
chain. Whoever can write the file could make the whole chain anew; keep a copy of its newest hash elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from swarm.errors import InvalidConfig
from swarm.text import printable

FIRST_HASH = "0" * 64
TEXT_CHARACTERS_MAX = 400
TAIL_BYTES = 64 << 10  # more than a line can have


class Audit:
    """Appends to the file; opened once."""

    def __init__(self, path: Path, wall_s: Callable[[], float]) -> None:
        """InvalidConfig if the file cannot be written. After a line that is cut off, a new chain begins."""
        self._wall_s = wall_s
        try:
            self._newest = _newest_hash(path)
            self._file: IO[str] = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a")
            if self._newest == FIRST_HASH and path.stat().st_size:
                self._file.write("\n")
        except OSError as error:
            raise InvalidConfig(
                f"the audit log {path} cannot be continued: {error}", hint="move it away to begin a new one"
            ) from error

    def write(self, actor: str, action: str, result: str, **facts: str) -> None:
        """Add a line; `result` is "allowed", or the code and text of an error. OSError if the disk is full."""
        line = {"time_unix_s": round(self._wall_s(), 3), "actor": actor, "action": action, "result": result} | facts
        line = {key: printable(one)[:TEXT_CHARACTERS_MAX] if isinstance(one, str) else one for key, one in line.items()}
        newest = _hash(self._newest, line)
        self._file.write(json.dumps(line | {"hash": newest}) + "\n")
        self._file.flush()
        self._newest = newest

    def close(self) -> None:
        self._file.close()


def verify(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, what is wrong) for each break of the chain."""
    before = FIRST_HASH
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
                said = str(line.pop("hash"))
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                yield number, "is no line of an audit log"
                continue
            # The text too: of two facts with one name, JSON shows the second only.
            if said != _hash(before, line) or text.rstrip("\n") != json.dumps(line | {"hash": said}):
                yield number, "does not follow from the line before it"
            before = said


def _hash(before: str, line: dict[str, Any]) -> str:
    return hashlib.sha256((before + json.dumps(line, sort_keys=True)).encode()).hexdigest()


def _newest_hash(path: Path) -> str:
    if not path.exists() or not path.stat().st_size:
        return FIRST_HASH
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        tail = file.read()
    try:
        return str(json.loads(tail.splitlines()[-1])["hash"]) if tail.endswith(b"\n") else FIRST_HASH
    except (ValueError, KeyError, TypeError, RecursionError):
        return FIRST_HASH
