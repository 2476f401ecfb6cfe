"""Job logs for `swarm logs`: the lines of all processes of a job, kept on disk; the newest are also in memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from scheduler.storage.executor import run_blocking
from swarm.errors import NotAllowed
from swarm.limits import LOG_KEPT_CHARACTERS_MAX
from swarm.types import JobId

LINES_KEPT = 10_000
NEWS_KEPT = 64  # lines of the scheduler itself
FILE_BYTES_MAX = 16 << 20
WAITING_MAX = 10_000  # lines that wait for the disk
READS_MAX = 64  # logs of ended jobs that are being read, or wait for that


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; `peer` is empty and `stage` -1 for the scheduler's own."""

    time_unix_s: float
    level: str
    peer: str
    stage: int
    message: str
    number: int = field(default=0, compare=False)  # its place in the log; 0: not known yet


class JobLog:
    """The log of one job: its file at `path`, and its newest lines in memory. `closed`: the job has ended."""

    def __init__(self, path: Path, writer: LogWriter | None = None, *, closed: bool = False) -> None:
        self._path = path
        self._writer = writer or LogWriter(None)
        self._lines: deque[LogLine] = deque()
        self._characters = 0
        self._total = 0
        self._news: deque[tuple[int, LogLine]] = deque(maxlen=NEWS_KEPT)
        for line in _read(path):
            self._keep(line)
        self._changed = asyncio.Event()
        self._closed = closed

    def append(self, line: LogLine) -> None:
        numbered = self._keep(line)
        self._wake()
        self._writer.add(self._path, numbered)

    def close(self) -> None:
        """The job has ended: followers reach the end."""
        self._closed = True
        self._wake()

    def kept(self) -> tuple[list[LogLine], int]:
        """The lines in memory, oldest first, and the position behind them."""
        return list(self._lines), self._total

    def news(self) -> list[tuple[int, LogLine]]:
        """The newest lines that the scheduler itself wrote, each with its number, oldest first."""
        return list(self._news)

    async def after(self, position: int) -> AsyncIterator[LogLine]:
        """Lines behind `position` as they come, until the job has ended."""
        while True:
            fresh = min(self._total - position, len(self._lines))
            position = self._total
            for line in [self._lines[place] for place in range(-fresh, 0)]:  # few: not the whole row for each line
                yield line
            if position == self._total:
                if self._closed:
                    return
                await self._changed.wait()

    def _keep(self, line: LogLine) -> LogLine:
        """In memory, where the oldest make room; gives the line with its number."""
        self._total = max(self._total + 1, line.number)
        line = replace(line, number=self._total)
        self._lines.append(line)
        if not line.peer and line.level != "debug":
            self._news.append((self._total, line))
        self._characters += len(line.message)
        while len(self._lines) > LINES_KEPT or self._characters > LOG_KEPT_CHARACTERS_MAX:
            self._characters -= len(self._lines.popleft().message)
        return line

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LogWriter:
    """Appends lines to files on the thread of `executor`, many at a time; at once if there is none."""

    def __init__(self, executor: ThreadPoolExecutor | None) -> None:
        self._executor = executor
        self._waiting: dict[Path, list[LogLine]] = {}
        self._count = 0
        self._is_writing = False
        self._lock = threading.Lock()  # of the three above; never held while a disk is waited for
        self._order = threading.Lock()  # held while lines are written

    def add(self, path: Path, line: LogLine) -> None:
        """Write the line soon, in order. A disk that does not keep up costs lines, not memory."""
        with self._lock:
            if self._count >= WAITING_MAX:
                return
            self._waiting.setdefault(path, []).append(line)
            self._count += 1
            begins, self._is_writing = not self._is_writing, True
        if self._executor is None:
            self.drain()
        elif begins:
            with suppress(RuntimeError):  # the executor has ended: whoever ended it drains
                self._executor.submit(self.drain)

    def drain(self) -> None:
        """Write until nothing waits."""
        with self._order:
            while True:
                with self._lock:
                    waiting, self._waiting, self._count = self._waiting, {}, 0
                    self._is_writing = bool(waiting)
                if not waiting:
                    return
                for path, lines in waiting.items():
                    _write(path, lines)


class JobLogs:
    """The logs of all jobs; in memory are logs of open jobs, and logs that are being read."""

    def __init__(self, root: Path, readers: ThreadPoolExecutor | None = None) -> None:
        self._root = root
        self._readers = readers
        self._reading = 0
        self._one_by_one = asyncio.Semaphore(1)
        self._open: dict[JobId, JobLog] = {}
        self._writer = LogWriter(readers)

    def open(self, job: JobId) -> None:
        """The job begins."""
        path = self._path(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open[job] = JobLog(path, self._writer)

    async def reopen(self, job: JobId) -> None:
        """The job goes on: its file is read on a thread."""
        if job in self._open:
            return

        def read() -> JobLog:
            self._writer.drain()
            self._path(job).parent.mkdir(parents=True, exist_ok=True)
            return JobLog(self._path(job), self._writer)

        log = await run_blocking(self._readers, read)
        self._open.setdefault(job, log)

    def flush(self) -> None:
        """Write what waits; the scheduler ends."""
        self._writer.drain()

    def append(self, job: JobId, line: LogLine) -> None:
        """Add a line; one that comes after the job's end goes to its file only."""
        log = self._open.get(job)
        if log is not None:
            log.append(line)
        else:
            self._writer.add(self._path(job), line)

    def of(self, job: JobId) -> JobLog:
        """The job's log. That of an ended job is read from its file, and this takes a moment."""
        if (known := self._open.get(job)) is not None:
            return known
        self._writer.drain()
        return JobLog(self._path(job), closed=True)

    async def read(self, job: JobId) -> JobLog:
        """The same, without blocking the event loop or the database; NotAllowed if too many are being read."""
        if self._reading >= READS_MAX:
            raise NotAllowed(f"{READS_MAX} logs of ended jobs are being read already", hint="try again in a moment")
        self._reading += 1
        try:
            if job in self._open:
                return self._open[job]
            async with self._one_by_one:  # so that a thread is left for writing
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


def _write(path: Path, lines: Sequence[LogLine]) -> None:
    """Append to a file that is rotated once at FILE_BYTES_MAX. A full disk costs the lines: training must go on."""
    with suppress(OSError):
        if path.exists() and path.stat().st_size > FILE_BYTES_MAX:
            path.replace(_turned_over(path))
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)


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
