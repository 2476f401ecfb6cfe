"""A storage that takes nothing when the last step is done, and jobs that are told to stop at awkward moments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.api.job_service import drain
from scheduler.storage.checkpoints.sink import CheckpointWriter, FileWriter
from scheduler.storage.job_record import JobRecord
from swarm.errors import CheckpointFailed
from swarm.types import JobState, PeerId
from tests.support.scenes import PEERS, Desk, make_spec, of_desk


def fill_disk(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[], bool]) -> None:
    real = CheckpointWriter.create

    def create(self: CheckpointWriter, path: str) -> FileWriter:
        if is_full():
            raise CheckpointFailed("no space left", hint="free disk space", reason="disk_full")
        return real(self, path)

    monkeypatch.setattr(CheckpointWriter, "create", create)


@of_desk(training__steps=3, limits__no_progress_s=10.0)
async def test_final_weights_outlast_a_disk_that_is_full_for_longer_than_a_job_may_stand_still(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    room_s = loop.time() + 120.0
    fill_disk(monkeypatch, lambda: loop.time() < room_s)
    job = await desk.submit()
    await desk.rig.finished(job)
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    assert "tries again in 16 s" in desk.said(job)


@of_desk(training__steps=2)
async def test_a_spare_replica_may_leave_while_the_final_weights_cannot_be_saved(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True
    fill_disk(monkeypatch, lambda: full)
    job = await desk.submit()
    while "tries again in 2 s" not in desk.said(job):
        await asyncio.sleep(0.1)
    async with asyncio.timeout(10.0):
        async for _ in drain(desk.rig.jobs, desk.rig.membership, PeerId("peer-0"), "maintenance"):
            pass
    assert PeerId("peer-0") not in {peer for pool in job.stages.values() for peer in pool}
    full = False
    await desk.rig.finished(job)
    assert job.record.state is JobState.SUCCEEDED, job.record.reason


@of_desk(training__steps=1000, checkpoint__every_steps=0, limits__max_runtime_s=1000000.0)
async def test_a_pause_that_failed_is_not_tried_again_for_a_limit_that_has_not_passed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True
    fill_disk(monkeypatch, lambda: full)
    desk.rig.slowness = {PeerId(f"peer-{number}"): 60.0 for number in range(PEERS)}
    job = await desk.submit()
    await desk.until_step(job, 1)
    await desk.rig.jobs.pause(job, "by a person")
    while "cannot pause, goes on" not in desk.said(job):
        await asyncio.sleep(0.1)
    full = False
    await asyncio.sleep(80.0)
    assert job.record.state is JobState.RUNNING, job.record.reason
    await desk.rig.jobs.cancel(job, "x", checkpoint=False)


@of_desk(training__steps=3)
async def test_a_job_that_is_cancelled_while_the_state_of_another_is_written_stays_cancelled(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_slow, placing = desk.rig.store.put_job, False, asyncio.Event()

    async def put_job(record: JobRecord) -> None:
        if is_slow:
            if record.id == first.record.id and record.state is JobState.PLACING:
                placing.set()
            await asyncio.sleep(0.3)
        await real(record)

    monkeypatch.setattr(desk.rig.store, "put_job", put_job)
    first = await desk.submit(make_spec(tmp_path, training__steps=3, limits__min_replicas=50))
    await asyncio.sleep(0.05)
    second = await desk.submit()
    is_slow = True
    await placing.wait()
    assert second.record.state is JobState.QUEUED
    await desk.rig.jobs.cancel(second, "cancelled by its user")
    await asyncio.sleep(4.0)
    assert second.record.state is JobState.CANCELLED, second.record.reason
    await desk.rig.jobs.cancel(first, "x")
