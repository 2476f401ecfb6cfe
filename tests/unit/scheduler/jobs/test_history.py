"""Which steps people see of a job that went back once, and what the database reads for them."""

from __future__ import annotations

import pytest

from scheduler.brain.outputs import CommitRow
from scheduler.jobs.history import history
from scheduler.storage.database import Database, _next_epoch
from scheduler.storage.job_record import JobRecord, JobTokens
from swarm.job.spec import parse_job
from swarm.types import JobId, JobState
from tests.support.databases import fresh_engine

JOB = JobId("tiny-1")
SPEC = parse_job(
    {
        "name": "tiny",
        "model": {"config": {"num_hidden_layers": 2}},
        "data": {"source": "a.txt"},
        "training": {"steps": 200, "warmup_steps": 1},
    }
)


class Counted(Database):
    """Counts the commit rows that were read."""

    taken = 0

    async def commits(self, *args: object, **named: object) -> list[dict[str, object]]:  # type: ignore[override]
        rows = await super().commits(*args, **named)  # type: ignore[arg-type]
        self.taken += len(rows)
        return rows


async def rolled_back() -> tuple[Counted, JobRecord]:
    """90 steps, of which the last 40 were undone, and 57 more."""
    engine = fresh_engine()
    database = Counted(engine, _next_epoch(engine), None)
    record = JobRecord(
        JOB,
        "tiny",
        JobState.RUNNING,
        "",
        1.0,
        1.0,
        "{}",
        JobTokens((), "uint16", 257, 1.0),
        timeline=1,
        first_steps=(0, 50),
    )
    await database.put_job(record)
    for timeline, steps in ((0, range(90)), (1, range(50, 107))):
        for step in steps:
            row = CommitRow(timeline, step, {}, 1.0 + timeline, 1.0, 1.0, 1e-3, False, 10)
            await database.put_commit(JOB, row, 1.0)
    return database, record


async def steps_of(database: Counted, record: JobRecord, every: int, after: int = 0) -> list[tuple[int, float]]:
    pages = [page async for page in history(database, record, SPEC, every, 107, after)]
    return [(row.step, row.loss) for page in pages for row in page]


async def test_steps_that_were_undone_are_not_told() -> None:
    database, record = await rolled_back()
    whole = [(step, 1.0 if step <= 50 else 2.0) for step in range(1, 108)]
    assert await steps_of(database, record, 0) == whole
    assert await steps_of(database, record, 1) == whole
    assert await steps_of(database, record, 0, after=100) == whole[100:]
    await database.close()


@pytest.mark.parametrize(
    ("every", "after", "told"),
    [(25, 0, [25, 50, 75, 100, 107]), (25, 100, [107]), (107, 0, [107]), (1000, 0, [107]), (25, 107, [])],
)
async def test_each_so_many_th_step_and_the_newest_are_all_that_is_read(
    every: int, after: int, told: list[int]
) -> None:
    """swarm top read all rows of a job at each look."""
    database, record = await rolled_back()
    assert [step for step, _ in await steps_of(database, record, every, after)] == told
    assert database.taken <= len(told) + 1, "and one that was undone"
    await database.close()
