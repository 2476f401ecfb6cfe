"""What `swarm logs` shows: the lines of a job from all of its processes, kept on disk, the newest in memory."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.types import JobId

LINES_KEPT = 10_000
FILE_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; `peer` is empty and `stage` -1 for the scheduler's own."""

    time_unix_s: float
    level: str
    peer: str
    stage: int
    message: str


class JobLog:
    """The log of one job: appended to `path`, which is turned over once at FILE_BYTES_MAX."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: deque[LogLine] = deque(_read(path), maxlen=LINES_KEPT)
        self._total = len(self._lines)
        self._changed = asyncio.Event()
        self._closed = False

    def append(self, line: LogLine) -> None:
        """Add a line. A full disk costs the copy on disk only: training must not stop for its log."""
        self._lines.append(line)
        self._total += 1
        self._wake()
        try:
            if self._path.exists() and self._path.stat().st_size > FILE_BYTES_MAX:
                self._path.replace(self._path.with_suffix(".1.jsonl"))
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(line)) + "\n")
        except OSError:
            pass

    def close(self) -> None:
        """The job has ended: those who follow come to the end."""
        self._closed = True
        self._wake()

    def kept(self) -> tuple[list[LogLine], int]:
        """The lines that are kept, oldest first, and the position behind them."""
        return list(self._lines), self._total

    async def after(self, position: int) -> AsyncIterator[LogLine]:
        """Lines behind `position` as they come, until the job has ended."""
        while True:
            fresh = min(self._total - position, len(self._lines))
            position = self._total
            for line in list(self._lines)[len(self._lines) - fresh :]:
                yield line
            if position == self._total:
                if self._closed:
                    return
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class JobLogs:
    """The logs of all jobs, opened when first needed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[JobId, JobLog] = {}

    def of(self, job: JobId) -> JobLog:
        if job not in self._open:
            folder = self._root / job
            folder.mkdir(parents=True, exist_ok=True)
            self._open[job] = JobLog(folder / "log.jsonl")
        return self._open[job]


def _read(path: Path) -> list[LogLine]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = list(deque(file, maxlen=LINES_KEPT))
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError, TypeError):  # a line that a crash or a full disk tore
            found.append(LogLine(**json.loads(line)))
    return found
