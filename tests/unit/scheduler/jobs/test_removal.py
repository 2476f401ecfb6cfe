"""A job goes with all that it made, whenever the scheduler dies on the way; what is listed keeps its files."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sqlalchemy as sa

from scheduler.brain.outputs import CommitRow
from scheduler.jobs.job import Job
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.jobs.removal import CLOCK_S, TIDY_S, JobRemoval, Waste
from scheduler.metrics import SchedulerMetrics
from scheduler.storage.database import Database, _next_epoch
from scheduler.storage.job_record import JobRecord, JobTokens
from scheduler.storage.stores import Stores
from swarm.errors import DatabaseUnavailable, NotAllowed, NotFound, StorageError
from swarm.job.spec import spec_from_json
from swarm.process.logs import get_logger
from swarm.types import PROTOCOL_VERSION, JobId, JobState
from tests.support.databases import fresh_engine
from tests.support.sim import loop as sim
from tests.support.simulated import small_spec

NOW_S = 1_000_000.0
HOUR_S, DAY_S = 3600.0, 86_400.0
MINE, SHARED, FRESH = "a" * 64, "b" * 64, "c" * 64


class Crash(BaseException):
    """The scheduler is killed here."""


@dataclass
class Announced:
    removed: list[JobId] = field(default_factory=list)

    def job_changed(self, record: JobRecord, progress: Any) -> None: ...

    def job_removed(self, job: JobId) -> None:
        self.removed.append(job)


class Scene:
    """A scheduler's folder and database; `restart` is another start on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.engine, self.roots = folder / "data", fresh_engine(), (folder / "runs",)
        (self.folder / "shards").mkdir(parents=True)

    async def restart(self, keep_s: float = 0.0) -> JobRemoval:
        self.database = Database(self.engine, _next_epoch(self.engine), None)
        self.stores = Stores.under(self.folder, self.database, checkpoint_roots=self.roots)
        self.metrics, self.announced = SchedulerMetrics("0", PROTOCOL_VERSION), Announced()
        log = get_logger("test")
        ports = SchedulerPorts(self.stores, self.announced, self.metrics, Random(1), lambda: NOW_S, log)
        await self.stores.files.load()
        self.registry = JobRegistry(ports)
        for record in await self.database.jobs():
            self.registry.add(Job(record, spec_from_json(record.spec_json)))
        removal = JobRemoval(ports, self.registry, keep_s)
        await removal.load()
        return removal

    async def add(
        self, id_: str, *shards: str, state: JobState = JobState.FAILED, ended_s: float = 0.0, **checkpoint: str
    ) -> Job:
        """A job that ended so long ago, and was submitted a second before."""
        spec = small_spec(self.folder / "text.txt")
        spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=checkpoint)})
        at_s = NOW_S - ended_s
        tokens = JobTokens(shards, "uint16", 257, 1.0)
        record = JobRecord(JobId(id_), id_[:1], state, "", at_s, at_s - 1.0, spec.model_dump_json(), tokens)
        await self.database.put_job(record)
        await self.database.put_commit(record.id, CommitRow(0, 0, {}, 1.0, 1.0, 1.0, 1e-3, False, 10), at_s)
        self.registry.add(job := Job(record, spec))
        self.metrics.job_opened(record.id, "llama")
        folder = self.folder / "jobs" / id_
        (folder / "checkpoints" / "step-1").mkdir(parents=True)
        (folder / "log.jsonl").write_bytes(b"x" * 100)
        for shard in shards:
            self.upload(shard, ended_s + 2.0)
        return job

    def upload(self, shard: str, age_s: float) -> None:
        path = self.folder / "shards" / f"{shard}.bin"
        path.write_bytes(b"x" * 1000)
        os.utime(path, (NOW_S - age_s,) * 2)

    def there(self) -> set[str]:
        """The jobs' folders, and the first letters of the uploads."""
        uploads = {path.name[:1] for path in self.folder.glob("shards/*")}
        return uploads | {path.name for path in self.folder.glob("jobs/*")}

    async def listed(self) -> set[str]:
        return {record.id for record in await self.database.jobs()}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_job_goes_with_its_files_its_uploads_its_series_and_its_message(scene: Scene) -> None:
    removal = await scene.restart()
    job = await scene.add("one-1", MINE, SHARED, FRESH)
    await scene.add("two-2", SHARED)
    scene.upload(FRESH, 0.5)  # somebody asked for it since: he may be about to submit
    scene.upload(SHARED, DAY_S)
    await scene.stores.files.load()
    assert scene.stores.files.held_bytes("") == 3000
    removed = await removal.remove(job)
    assert (removed.freed_bytes, removed.left) == (1100, "")
    assert scene.stores.files.held_bytes("") == 2000
    assert scene.there() == {"two-2", "b", "c"}
    assert await scene.listed() == {"two-2"}
    assert scene.announced.removed == ["one-1"]
    assert scene.metrics.known_jobs == {"two-2"}
    with pytest.raises(NotFound):
        scene.registry.find("one-1")
    with pytest.raises(NotFound):
        await removal.remove(job)


async def test_an_upload_goes_with_the_last_job_that_named_it(scene: Scene) -> None:
    """The last one that goes is the oldest, and whoever submitted the younger ones has asked for the upload since."""
    removal = await scene.restart()
    old, young = await scene.add("one-1", SHARED, ended_s=50.0), await scene.add("two-2", SHARED)
    assert (await removal.remove(young)).freed_bytes == 100
    assert (await removal.remove(old)).freed_bytes == 1100


async def test_a_job_at_work_in_use_or_needed_stays(scene: Scene) -> None:
    removal = await scene.restart()
    works, used = await scene.add("one-1", state=JobState.RUNNING), await scene.add("two-2")
    source = await scene.add("three-3")
    await scene.add("four-4", resume_from="three-3:7")
    with pytest.raises(NotAllowed, match="job one-1 is running"):
        await removal.remove(works)
    with used.used(), pytest.raises(NotAllowed, match="is being stopped, resumed or started from"):
        await removal.remove(used)
    with pytest.raises(NotAllowed, match="job four-4 began at job three-3"):
        await removal.remove(source)
    assert await scene.listed() == {"one-1", "two-2", "three-3", "four-4"} <= scene.there()


@pytest.mark.parametrize("error", [Crash(), DatabaseUnavailable("away")], ids=["crash", "away"])
async def test_a_crash_or_an_absent_database_before_the_row_is_gone_loses_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    removal = await scene.restart()
    job = await scene.add("one-1", MINE)

    async def refuse(change: object) -> None:
        raise error

    monkeypatch.setattr(scene.database, "write", refuse)
    with pytest.raises(type(error)):
        await removal.remove(job)
    assert scene.registry.get(JobId("one-1")) is job
    assert scene.announced.removed == []
    removal = await scene.restart()
    await removal.tidy_once()
    assert await scene.listed() == {"one-1"}
    assert scene.there() == {"one-1", "a"}


@pytest.mark.parametrize("at", ["remove_unused", "remove_job"])
async def test_a_crash_after_the_row_is_gone_leaves_nothing_in_the_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    removal = await scene.restart()
    job = await scene.add("one-1", MINE, ended_s=DAY_S, dir=str(scene.roots[0]))
    (scene.roots[0] / "one-1" / "step-1").mkdir(parents=True)

    async def crash(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(scene.stores.files, at, crash)
        with pytest.raises(Crash):
            await removal.remove(job)
    assert await scene.listed() == set()
    assert "one-1" in scene.there()
    removal = await scene.restart()
    await removal.tidy_once()
    assert scene.there() == set()
    assert not (scene.roots[0] / "one-1").exists()
    with scene.engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM removals")).scalar_one() == 0


async def test_files_that_cannot_be_removed_are_tried_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    removal = await scene.restart()
    job = await scene.add("one-1")

    async def refuse(one: JobId) -> int:
        raise StorageError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(scene.stores.files, "remove_job", refuse)
        assert "read-only; this is tried again" in (await removal.remove(job)).left
        assert await removal.collect(dry_run=False) == [], "it is no folder of nobody"
    await removal.tidy_once()
    assert scene.there() == set()


async def test_checkpoints_elsewhere_go_with_the_job_but_not_with_time(scene: Scene) -> None:
    removal = await scene.restart(keep_s=HOUR_S)
    where = str(scene.roots[0])
    removed, expired, remote = (
        await scene.add("one-1", dir=where),
        await scene.add("two-2", dir=where, ended_s=DAY_S),
        await scene.add("three-3", dir="s3://bucket/runs"),
    )
    for job in (removed, expired):
        (scene.roots[0] / job.record.id / "step-1").mkdir(parents=True)
    assert (await removal.remove(removed)).left == ""
    await removal.tidy_once()
    assert await scene.listed() == {"three-3"}
    assert [path.name for path in scene.roots[0].iterdir()] == ["two-2"]
    assert (await removal.remove(remote)).left == "its checkpoints in s3://bucket/runs stay"
    older = await scene.add("four-4", dir="ftp://host/runs")  # from before such URLs were refused
    assert "its checkpoints in ftp://host/runs stay" in (await removal.remove(older)).left
    assert await scene.listed() == set()


def test_an_ended_job_expires_in_time_but_not_by_a_clock_that_nobody_has_set_yet(scene: Scene) -> None:
    async def main() -> None:
        removal = await scene.restart()
        await scene.add("one-1", ended_s=DAY_S)
        await removal.tidy_once()
        assert await removal.collect(dry_run=False) == [], "without a time jobs stay however old"
        removal = await scene.restart(keep_s=HOUR_S)
        resumed = await scene.add("two-2", ended_s=DAY_S)
        resumed.record = replace(resumed.record, state=JobState.QUEUED)
        tidying = asyncio.create_task(removal.tidy())
        await asyncio.sleep(CLOCK_S - TIDY_S)
        assert await scene.listed() == {"one-1", "two-2"}
        await asyncio.sleep(2 * TIDY_S)
        assert await scene.listed() == {"two-2"}
        tidying.cancel()

    sim.run(main(), seed=1, limit_s=1e6)


async def test_what_no_job_needs_is_named_and_then_removed(scene: Scene) -> None:
    removal = await scene.restart(keep_s=HOUR_S)
    await scene.add("old-1", MINE, ended_s=2 * HOUR_S)
    await scene.add("new-2", SHARED)
    await scene.add("stray-3", ended_s=DAY_S)
    await scene.add("young-4")
    for name, age_s in (("stray-3", 2 * HOUR_S), ("young-4", 60.0)):
        with scene.engine.begin() as connection:  # a submit that failed when its folder was there
            connection.execute(sa.text("DELETE FROM commits WHERE job = :job"), {"job": name})
            connection.execute(sa.text("DELETE FROM jobs WHERE id = :job"), {"job": name})
        os.utime(scene.folder / "jobs" / name, (NOW_S - age_s,) * 2)
    removal = await scene.restart(keep_s=HOUR_S)
    scene.upload(FRESH, 60.0)
    before = scene.there()
    named = await removal.collect(dry_run=True)
    assert named == [Waste("job", "old-1", 100), Waste("uploads", "everybody", 1000), Waste("folder", "stray-3", 100)]
    assert scene.there() == before
    done = await removal.collect(dry_run=False)
    assert sum(removed.size_bytes for removed in done) == sum(view.size_bytes for view in named)
    assert scene.there() == {"new-2", "young-4", "b", "c"}
