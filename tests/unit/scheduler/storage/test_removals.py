"""The order in which a job leaves the database: its row with a note, its other rows, the note."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from scheduler.brain.outputs import CommitRow, EvaluationRow
from scheduler.storage import removals
from scheduler.storage.database import Database, _next_epoch
from scheduler.storage.job_record import JobRecord, JobTokens
from scheduler.storage.removals import Removals, RemovedJob
from swarm.errors import DatabaseRejected, DatabaseUnavailable, Fenced
from swarm.types import JobId, JobState
from tests.support.databases import fresh_engine

A, B = JobId("a-1"), JobId("b-1")


def record(job: JobId) -> JobRecord:
    return JobRecord(job, "a", JobState.FAILED, "", 1.0, 1.0, "{}", JobTokens((), "uint16", 257, 1.0))


async def two_jobs() -> Database:
    engine = fresh_engine()
    database = Database(engine, _next_epoch(engine), None)
    row = CommitRow(0, 0, {}, 1.0, 1.0, 1.0, 1e-3, False, 10)
    for job in (A, B):
        await database.put_job(record(job))
        for timeline, step in ((0, 0), (0, 7), (1, 3)):
            await database.put_commit(job, replace(row, timeline=timeline, step=step), 1.0)
        await database.put_evaluation(job, EvaluationRow(0, 5, 1.0, 10), 1.0)
    return database


async def test_a_job_goes_with_all_of_its_rows_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "ROWS_AT_ONCE", 3)
    database = await two_jobs()
    known = Removals(database)
    await known.begin(RemovedJob(A, "/mnt/runs"))
    assert [one.id for one in await database.jobs()] == [B]
    assert await known.unfinished() == [RemovedJob(A, "/mnt/runs")]
    assert len(await database.commits(A)) == 3, "nobody looks at them, and they may be many"
    await known.delete_rows(A)
    assert [await database.commits(A), await database.evaluations(A)] == [[], []]
    assert [len(await database.commits(B)), len(await database.evaluations(B))] == [3, 1]
    assert rows_of(database, A) == 1, "the row goes last, with the note: other rows refer to it"
    await known.end(A)
    assert await known.unfinished() == []
    assert rows_of(database, A) == 0


def rows_of(database: Database, job: JobId) -> int:
    """How many rows of the table of jobs are of this one, listed or not."""
    with database._engine.connect() as connection:
        found = connection.execute(sa.text("SELECT count(*) FROM jobs WHERE id = :job"), {"job": job})
        return int(found.scalar_one())


async def test_a_job_that_is_listed_is_not_being_removed() -> None:
    """Its row was written once more, by whoever did not hear that the removal had begun."""
    database = await two_jobs()
    known = Removals(database)
    await known.begin(RemovedJob(A))
    await database.put_job(record(A))
    assert await known.unfinished() == []
    assert {one.id for one in await database.jobs()} == {A, B}
    await known.begin(RemovedJob(A, "/elsewhere"))
    assert await known.unfinished() == [RemovedJob(A, "/elsewhere")]


async def test_a_database_that_takes_no_write_changes_nothing() -> None:
    database = await two_jobs()
    with database._engine.begin() as connection:
        refuse = "CREATE TRIGGER full BEFORE INSERT ON removals BEGIN SELECT RAISE(ABORT, 'full'); END"
        connection.exec_driver_sql(refuse)
    with pytest.raises((DatabaseUnavailable, DatabaseRejected)):
        await Removals(database).begin(RemovedJob(A))
    assert {one.id for one in await database.jobs()} == {A, B}
    assert await Removals(database).unfinished() == []


async def test_a_scheduler_that_was_superseded_removes_nothing() -> None:
    database = await two_jobs()
    with database._engine.begin() as connection:
        connection.exec_driver_sql("UPDATE control SET epoch = 2")
    with pytest.raises(Fenced):
        await Removals(database).begin(RemovedJob(A))
    assert {one.id for one in await database.jobs()} == {A, B}
