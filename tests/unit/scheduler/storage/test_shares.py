"""scheduler.storage.shares: shares are durable with the rows of their outer step."""

from __future__ import annotations

import pytest

from scheduler.brain.outputs import CommitRow
from scheduler.storage.database import Database, _next_epoch
from scheduler.storage.job_record import JobRecord, JobTokens
from scheduler.storage.removals import Removals
from scheduler.storage.shares import SharesRow, shares_rows
from swarm.errors import SwarmError
from swarm.types import JobId, JobState
from tests.support.databases import fresh_engine

JOB = JobId("a-1")
RECORD = JobRecord(JOB, "a", JobState.RUNNING, "", 1.0, 1.0, "{}", JobTokens((), "uint16", 257, 1.0))


def row(timeline: int, step: int) -> CommitRow:
    return CommitRow(timeline, step, {}, 0.0, 1.0, 1.0, 0.0, False, 0)


async def test_shares_come_back_as_they_were_written_and_go_with_the_job() -> None:
    engine = fresh_engine()
    database = Database(engine, _next_epoch(engine), None)
    await database.put_job(RECORD)
    for version, shares in ((10, (6, 2)), (5, (4, 4))):
        for _ in range(2):
            await database.put_commits(JOB, (row(0, version - 1), row(1, version - 1)), 1.0, (), shares)
    await database.put_commits(JOB, (row(0, 20), row(1, 20)), 1.0)
    expected = [SharesRow(0, 5, (4, 4)), SharesRow(0, 10, (6, 2))]
    assert await shares_rows(database, JOB) == expected
    assert await shares_rows(database, JobId("b-1")) == []
    await Removals(database).delete_rows(JOB)
    assert await shares_rows(database, JOB) == []


async def test_shares_without_their_rows_are_not_written() -> None:
    engine = fresh_engine()
    first = Database(engine, _next_epoch(engine), None)
    await first.put_job(RECORD)
    await first.put_commits(JOB, (row(0, 4),), 1.0, (), (8,))
    second = Database(engine, _next_epoch(engine), None)
    with pytest.raises(SwarmError):
        await second.put_commits(JOB, (row(0, 4),), 1.0, (), (7,))
    assert await shares_rows(second, JOB) == [SharesRow(0, 5, (8,))]
