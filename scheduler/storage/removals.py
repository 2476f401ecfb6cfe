"""Removals of jobs: a listed job has its files, and a job that is not listed loses them.

    a note comes: the job is listed no more ─▶ its commit rows go, some at a time ─▶ its files go ─▶ row and note go

A scheduler that ends in between goes on at its next start. Writing the job's row again takes the note away.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import sqlalchemy as sa

from scheduler.storage.database import REMOVALS, Database, put
from swarm.types import JobId

ROWS_AT_ONCE = 10_000  # that one write deletes: commits of other jobs wait behind it

_JOBS = sa.table("jobs", sa.column("id", sa.String))
_STEPS = (
    sa.table("commits", sa.column("job", sa.Text), sa.column("step", sa.BigInteger)),
    sa.table("forks", sa.column("job", sa.Text), sa.column("version", sa.BigInteger)),
    sa.table("shares", sa.column("job", sa.Text), sa.column("version", sa.BigInteger)),
    sa.table("evaluations", sa.column("job", sa.Text), sa.column("version", sa.BigInteger)),
)


@dataclass(frozen=True, slots=True)
class RemovedJob:
    """A job no longer listed; `checkpoint_dir` as in its file, empty for the data folder or if it is kept."""

    id: JobId
    checkpoint_dir: str = ""


class Removals:
    """The notes of jobs that are being removed. Every method may raise DatabaseUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, job: RemovedJob) -> None:
        """Take the job from the list; from here on it is gone for good."""
        row = {"job": job.id, "checkpoint_dir": job.checkpoint_dir}
        await self._database.write(lambda connection: put(connection, REMOVALS, row))

    async def delete_rows(self, job: JobId) -> None:
        """Delete what the job committed and measured."""
        for table in _STEPS:
            key, at = table.c["job"] == job, table.columns.values()[1]
            while (least := await self._least(at, key)) is not None:
                some = sa.delete(table).where(key, at < least + ROWS_AT_ONCE)
                await self._database.write(partial(_execute, some))

    async def end(self, job: JobId) -> None:
        """Nothing else is left of the job."""

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(_JOBS).where(_JOBS.c.id == job))
            connection.execute(sa.delete(REMOVALS).where(REMOVALS.c.job == job))

        await self._database.write(write)

    async def unfinished(self) -> list[RemovedJob]:
        """The jobs of which something may be left."""
        rows = await self._database.select(sa.select(REMOVALS))
        return [RemovedJob(JobId(row["job"]), row["checkpoint_dir"]) for row in rows]

    async def _least(self, at: sa.ColumnElement[int], key: sa.ColumnElement[bool]) -> int | None:
        """The first step of which there is a row."""
        (row,) = await self._database.select(sa.select(sa.func.min(at).label("at")).where(key))
        found: int | None = row["at"]
        return found


def _execute(statement: sa.Delete, connection: sa.Connection) -> None:
    connection.execute(statement)
