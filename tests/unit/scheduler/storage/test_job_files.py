"""scheduler.storage.job_files: the data of jobs is counted before it is needed on the event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.storage.database import Database
from scheduler.storage.executor import run_blocking
from scheduler.storage.job_files import JobFiles
from scheduler.storage.job_record import JobRecord
from scheduler.storage.stores import Stores
from swarm.data.batches import TokenData
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.limits import SHARDS_MAX
from swarm.types import JobId, JobState
from tests.support.simulated import Tokens, small_spec, write_text
from tests.support.turns import UNITS_MAX, event_loop


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads on which tokens were counted."""
    counted: list[str] = []
    count = TokenData.occurrences

    def noted(data: TokenData, token: int, start: int, many: int) -> int:
        counted.append(threading.current_thread().name)
        return count(data, token, start, many)

    monkeypatch.setattr(TokenData, "occurrences", noted)
    return counted


def made(folder: Path) -> tuple[JobSpec, Tokens]:
    spec = small_spec(write_text(folder), data__validation_ratio=0.5)
    resolved = resolve(spec, Basis(ByteTokenizer.vocabulary_size))
    return resolved, Tokens.make(folder, resolved)


def test_validation_tokens_are_counted_once_for_a_data_set(tmp_path: Path, counting: list[str]) -> None:
    """At a job's start they were counted on the event loop, for as long as a disk takes to read them."""
    spec, tokens = made(tmp_path)
    files = JobFiles(tmp_path, None)
    looked_at = files.counted(spec, tokens.of_job(), "")
    assert len(counting) == 1
    assert files.batches(spec, tokens.of_job(), "").evaluation_tokens == looked_at.evaluation_tokens
    assert len(counting) == 1
    other = spec.having("data", validation_ratio=0.25)
    assert files.batches(other, tokens.of_job(), "").evaluation_tokens < looked_at.evaluation_tokens
    assert len(counting) == 2, "another part of the data"


async def test_after_a_restart_they_are_counted_on_a_thread(tmp_path: Path, counting: list[str]) -> None:
    spec, tokens = made(tmp_path)
    record = JobRecord(
        id=JobId("j"),
        name="j",
        state=JobState.QUEUED,
        reason="",
        since_unix_s=0.0,
        created_unix_s=0.0,
        spec_json="",
        tokens=tokens.of_job(),
    )
    with ThreadPoolExecutor(1, thread_name_prefix="aside") as threads:
        files = JobFiles(tmp_path, threads)
        await files.reopened(record, spec)
        assert files.batches(spec, record.tokens, record.owner).evaluation_tokens
    assert [name.partition("_")[0] for name in counting] == ["aside"]


async def test_the_longest_data_is_opened_and_named_aside_from_the_event_loop(tmp_path: Path) -> None:
    """At a job's start 4,096 shards were mapped on it, and with each removal it was asked which files all jobs name."""
    spec, tokens = made(tmp_path)
    longest = replace(tokens.of_job(), shards=tokens.of_job().shards * SHARDS_MAX)
    record = JobRecord(JobId("j"), "j", JobState.QUEUED, "", 0.0, 0.0, "", longest)
    records = [
        replace(record, tokens=replace(longest, shards=tuple(f"{number:064x}" for number in range(SHARDS_MAX))))
        for _ in range(32)
    ]
    with ThreadPoolExecutor(1) as threads:
        files = JobFiles(tmp_path, threads)
        async with event_loop() as held:
            await files.opened(spec, longest, "")
            assert len(await files.named_by(records)) == SHARDS_MAX
    assert held.units <= UNITS_MAX, f"{held.units:.0f} units"


async def test_files_of_jobs_are_served_while_the_storage_of_checkpoints_hangs(tmp_path: Path) -> None:
    """Four stages that saved to a disk that was away held all threads, so no other job started."""
    is_back = threading.Event()
    with ThreadPoolExecutor(4) as files, ThreadPoolExecutor(4) as savers:
        database = await Database.open("sqlite://", None)
        stores = Stores.under(tmp_path, database, files, checkpoint_threads=savers)
        hanging = [asyncio.ensure_future(run_blocking(stores.checkpoints.executor, is_back.wait)) for _ in range(4)]
        try:
            await asyncio.wait_for(stores.files.put_tokenizer(JobId("j"), {"a": b""}), 20)
            assert not any(task.done() for task in hanging)
        finally:
            is_back.set()
            await asyncio.gather(*hanging)
