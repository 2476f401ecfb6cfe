from __future__ import annotations

import asyncio
from pathlib import Path

from scheduler import joblog
from scheduler.joblog import JobLogs, LogLine
from swarm.types import JobId

JOB = JobId("demo-1")


def line(number: int) -> LogLine:
    return LogLine(float(number), "info", "peer-a", 0, f"line {number}")


async def test_lines_are_kept_across_a_restart(tmp_path: Path) -> None:
    log = JobLogs(tmp_path).of(JOB)
    for number in range(3):
        log.append(line(number))
    assert JobLogs(tmp_path).of(JOB).kept()[0] == [line(0), line(1), line(2)]


async def test_a_follower_gets_every_line_once_and_ends_with_the_job(tmp_path: Path) -> None:
    log = JobLogs(tmp_path).of(JOB)
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
    await asyncio.wait_for(task, 5)
    assert seen == [line(number) for number in range(50)]


async def test_the_file_is_bounded(tmp_path: Path, monkeypatch: object) -> None:
    log = JobLogs(tmp_path).of(JOB)
    monkeypatch.setattr(joblog, "FILE_BYTES_MAX", 1000)  # type: ignore[attr-defined]
    for number in range(200):
        log.append(line(number))
    assert sum(path.stat().st_size for path in (tmp_path / JOB).iterdir()) < 3000
    assert log.kept()[0][-1] == line(199)


async def test_a_log_that_cannot_be_written_is_still_shown(tmp_path: Path) -> None:
    log = JobLogs(tmp_path).of(JOB)
    (tmp_path / JOB / "log.jsonl").mkdir()
    log.append(line(0))
    assert log.kept()[0] == [line(0)]
