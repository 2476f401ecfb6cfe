"""What `swarm logs` shows: the lines of all processes of a job, kept on disk; the newest are also in memory."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from scheduler.storage.executor import run_blocking
from swarm.errors import NotAllowed
from swarm.types import JobId

LINES_KEPT = 10_000
FILE_BYTES_MAX = 16 << 20
READS_MAX = 64  # logs of ended jobs that are being read, or wait for that


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; `peer` is empty and `stage` -1 for the scheduler's own."""

    time_unix_s: float
    level: str
    peer: str
    stage: int
    message: str


class JobLog:
    """The log of one job: its file at `path`, and its newest lines in memory. `closed`: the job has ended."""

    def __init__(self, path: Path, *, closed: bool = False) -> None:
        self._path = path
        self._lines: deque[LogLine] = deque(_read(path), maxlen=LINES_KEPT)
        self._total = len(self._lines)
        self._changed = asyncio.Event()
        self._closed = closed

    def append(self, line: LogLine) -> None:
        self._lines.append(line)
        self._total += 1
        self._wake()
        _write(self._path, line)

    def close(self) -> None:
        """The job has ended: followers reach the end."""
        self._closed = True
        self._wake()

    def kept(self) -> tuple[list[LogLine], int]:
        """The lines in memory, oldest first, and the position behind them."""
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
    """The logs of all jobs; in memory are those of jobs that have not ended, and those that are being read."""

    def __init__(self, root: Path, readers: ThreadPoolExecutor | None = None) -> None:
        self._root = root
        self._readers = readers
        self._reading = 0
        self._open: dict[JobId, JobLog] = {}

    def open(self, job: JobId) -> None:
        """The job begins, or goes on after a restart."""
        path = self._path(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open[job] = JobLog(path)

    def append(self, job: JobId, line: LogLine) -> None:
        """Add a line; one that comes after the job's end goes to its file only."""
        log = self._open.get(job)
        if log is not None:
            log.append(line)
        else:
            _write(self._path(job), line)

    def of(self, job: JobId) -> JobLog:
        """The job's log; that of an ended job is read from its file, which takes a moment."""
        return self._open.get(job) or JobLog(self._path(job), closed=True)

    async def read(self, job: JobId) -> JobLog:
        """The same, without blocking the event loop or the database; NotAllowed if too many are being read."""
        if self._reading >= READS_MAX:
            raise NotAllowed(f"{READS_MAX} logs of ended jobs are being read already", hint="try again in a moment")
        self._reading += 1
        try:
            if job in self._open:
                return self._open[job]
            return await run_blocking(self._readers, lambda: self.of(job))
        finally:
            self._reading -= 1

    def close(self, job: JobId) -> None:
        """The job has ended: followers reach the end, and its lines leave the memory."""
        log = self._open.pop(job, None)
        if log is not None:
            log.close()

    def _path(self, job: JobId) -> Path:
        return self._root / job / "log.jsonl"


def _write(path: Path, line: LogLine) -> None:
    """Append to a file that is rotated once at FILE_BYTES_MAX. A full disk costs the line: training must go on."""
    with suppress(OSError):
        if path.exists() and path.stat().st_size > FILE_BYTES_MAX:
            path.replace(_turned_over(path))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")


def _read(path: Path) -> list[LogLine]:
    lines: deque[str] = deque(maxlen=LINES_KEPT)
    for part in (_turned_over(path), path):
        with suppress(OSError), part.open(encoding="utf-8", errors="replace") as file:
            lines.extend(file)
    found = []
    for line in lines:
        with suppress(ValueError, TypeError):  # a line that was cut by a crash or a full disk
            found.append(LogLine(**json.loads(line)))
    return found


def _turned_over(path: Path) -> Path:
    return path.with_suffix(".1.jsonl")
