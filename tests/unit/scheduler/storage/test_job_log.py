from __future__ import annotations

import asyncio
import json
import os
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scheduler.storage import job_log
from scheduler.storage.database import Database
from scheduler.storage.job_log import JobLog, JobLogs, LogLine
from scheduler.storage.stores import Stores
from swarm.errors import NotAllowed
from swarm.types import JobId

JOB = JobId("demo-1")


def line(number: int) -> LogLine:
    return LogLine(float(number), "info", "peer-a", 0, f"line {number}")


def _open(root: Path) -> JobLog:
    logs = JobLogs(root)
    logs.open(JOB)
    return logs.of(JOB)


async def test_each_line_has_a_number_that_stays_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever follows a log names the last line that he has, and goes on behind it."""
    monkeypatch.setattr(job_log, "LINES_KEPT", 4)
    log = _open(tmp_path)
    for number in range(6):
        log.append(line(number))
    assert [(line.message, line.number) for line in log.kept()[0]] == [
        (f"line {number}", number + 1) for number in range(2, 6)
    ]
    again = _open(tmp_path)
    assert [line.number for line in again.kept()[0]] == [3, 4, 5, 6]
    again.append(line(6))
    assert [line.number for line in again.kept()[0]] == [4, 5, 6, 7]


async def test_lines_of_before_they_had_numbers_get_some(tmp_path: Path) -> None:
    (tmp_path / JOB).mkdir()
    old = {"time_unix_s": 0.0, "level": "info", "peer": "", "stage": -1, "message": "old"}
    (tmp_path / JOB / "log.jsonl").write_text(f"{json.dumps(old)}\n" * 2)
    log = _open(tmp_path)
    log.append(line(1))
    assert [line.number for line in log.kept()[0]] == [1, 2, 3]


async def test_a_follower_gets_every_line_once_and_ends_with_the_job(tmp_path: Path) -> None:
    log = _open(tmp_path)
    log.append(line(0))
    kept, position = log.kept()
    seen: list[LogLine] = list(kept)

    async def follow() -> None:
        async for new in log.after(position):
            seen.append(new)

    task = asyncio.create_task(follow())
    for number in range(1, 50):
        log.append(line(number))
        if number % 7 == 0:
            await asyncio.sleep(0)
    log.close()
    await task
    assert seen == [line(number) for number in range(50)]


async def test_the_file_is_bounded_and_the_one_before_it_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _open(tmp_path)
    monkeypatch.setattr(job_log, "FILE_BYTES_MAX", 1000)
    for number in range(200):
        log.append(line(number))
    assert sum(path.stat().st_size for path in (tmp_path / JOB).iterdir()) < 3000
    read = JobLogs(tmp_path).of(JOB).kept()[0]
    oldest = (tmp_path / JOB / "log.1.jsonl").read_text().partition("\n")[0]
    assert json.loads(oldest)["message"] == read[0].message, "the file before it is read too"
    assert read == log.kept()[0][-len(read) :]
    (tmp_path / JOB / "log.jsonl").unlink()
    (tmp_path / JOB / "log.jsonl").mkdir()  # a log that cannot be written is still shown
    log.append(line(200))
    assert log.kept()[0][-1] == line(200)


async def test_an_ended_jobs_lines_leave_the_memory_and_are_read_from_disk(tmp_path: Path) -> None:
    """Ten thousand lines of every job that ever ran stayed in the scheduler's memory."""
    logs = JobLogs(tmp_path)
    logs.open(JOB)
    logs.append(JOB, line(0))
    following = logs.of(JOB)
    in_memory = weakref.ref(following)
    logs.close(JOB)
    assert [new async for new in following.after(0)] == [line(0)]
    del following
    assert in_memory() is None
    logs.append(JOB, line(1))  # a peer says late that it let go
    ended = logs.of(JOB)
    assert ended is not logs.of(JOB)
    lines, position = ended.kept()
    assert lines == [line(0), line(1)]
    assert [new async for new in ended.after(position)] == []
    assert JobLogs(tmp_path).of(JobId("unheard-of")).kept()[0] == []


async def test_no_commit_waits_while_the_log_of_an_ended_job_is_read(tmp_path: Path) -> None:
    """Logs were read on the database's only thread. This file is a pipe, empty until it is written."""
    folder = tmp_path / "jobs" / JOB
    folder.mkdir(parents=True)
    os.mkfifo(folder / "log.jsonl")
    with ThreadPoolExecutor(1) as commits, ThreadPoolExecutor(1) as files, ThreadPoolExecutor(1) as readers:
        database = await Database.open(f"sqlite:///{tmp_path}/a.db", commits)
        stores = Stores.under(tmp_path, database, files, readers)
        reading = asyncio.create_task(stores.logs.read(JOB))
        try:
            await asyncio.sleep(0)
            await asyncio.wait_for(stores.database.write(lambda _connection: None), 20)
            await asyncio.wait_for(stores.files.put_tokenizer(JOB, {"a": b""}), 20)
            assert not reading.done()
        finally:
            (folder / "log.jsonl").write_bytes(b"")  # the reader comes to the end
        assert (await asyncio.wait_for(reading, 20)).kept() == ([], 0)
        await database.close()


async def test_only_so_many_readers_wait_for_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "READS_MAX", 0)
    with pytest.raises(NotAllowed, match="are being read already"):
        await JobLogs(tmp_path).read(JOB)


async def test_lines_in_memory_are_bounded_in_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "LOG_KEPT_CHARACTERS_MAX", 1000)
    log = _open(tmp_path)
    for number in range(100):
        log.append(LogLine(float(number), "info", "p", 0, "x" * 100))
    assert [kept.time_unix_s for kept in log.kept()[0]] == list(range(90, 100))
    assert len(JobLogs(tmp_path).of(JOB).kept()[0]) == 10


async def test_a_disk_that_hangs_holds_up_nobody_and_costs_lines_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line was opened, written and closed on the event loop."""
    monkeypatch.setattr(job_log, "WAITING_MAX", 50)
    folder = tmp_path / JOB
    folder.mkdir()
    with ThreadPoolExecutor(1) as threads:
        logs = JobLogs(tmp_path, threads)
        logs.open(JOB)
        os.mkfifo(folder / "log.jsonl")  # whoever opens it waits for a reader
        for number in range(200):
            logs.append(JOB, line(number))
            await asyncio.sleep(0)
        assert logs.of(JOB).kept()[0][-1] == line(199)
        reader = os.open(folder / "log.jsonl", os.O_RDONLY | os.O_NONBLOCK)  # it has come, and stays
        logs.close(JOB)
    written = os.read(reader, 1 << 16).splitlines()
    os.close(reader)
    assert 50 <= len(written) <= 101
    assert json.loads(written[0])["message"] == "line 0"


async def test_lines_are_written_in_order_and_all_at_the_end(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        logs = JobLogs(tmp_path, threads)
        logs.open(JOB)
        for number in range(5000):
            logs.append(JOB, line(number))
    logs.append(JOB, line(5000))  # its threads have ended already
    logs.flush()
    assert JobLogs(tmp_path).of(JOB).kept()[0] == [line(number) for number in range(5001)]


async def test_a_follower_looks_at_new_lines_only(tmp_path: Path) -> None:
    """Each new line made every follower copy ten thousand."""
    log = _open(tmp_path)
    for number in range(3000):
        log._keep(line(number))
        log._total += 1
    copied = 0

    class Counting(deque[LogLine]):
        def __iter__(self) -> Iterator[LogLine]:
            nonlocal copied
            copied += len(self)
            return super().__iter__()

    log._lines = Counting(log._lines)
    copied = 0
    following = log.after(log._total - 1)
    assert await anext(following) == line(2999)
    log.append(line(3000))
    assert await anext(following) == line(3000)
    assert copied == 0


def test_the_newest_lines_of_the_scheduler_itself_are_news_also_after_a_restart(tmp_path: Path) -> None:
    log = _open(tmp_path)
    for number in range(job_log.NEWS_KEPT + 6):
        log.append(line(number))
        log.append(LogLine(float(number), "debug", "", -1, "a detail"))
        log.append(LogLine(float(number), "warning", "", -1, f"news {number}"))
    told = [one.message for _, one in log.news()]
    assert told == [f"news {number}" for number in range(6, job_log.NEWS_KEPT + 6)]
    numbers = [number for number, _ in log.news()]
    assert numbers == sorted(set(numbers))
    again = _open(tmp_path)
    assert again.news() == log.news()
    again.append(LogLine(0.0, "info", "", -1, "later"))
    assert again.news()[-1][0] > numbers[-1]
