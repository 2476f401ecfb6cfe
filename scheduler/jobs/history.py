"""The committed steps of a job that count, for curves."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from scheduler.brain.lineage import checkpoint_counts, row_counts
from scheduler.jobs.islands import rows_made
from scheduler.jobs.job import job_rows
from scheduler.storage.database import Database
from scheduler.storage.job_record import JobRecord
from swarm.job.spec import JobSpec

ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class StepMade:
    """A committed step, with the names of the message; NaN and 0 where nothing is known."""

    step: int  # steps committed with this one
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    skipped: bool
    committed_unix_s: float
    evaluation_loss: float


async def history(
    database: Database, record: JobRecord, spec: JobSpec, every: int, newest: int, after: int = 0
) -> AsyncIterator[list[StepMade]]:
    """The steps behind `after`, oldest first, in lists of at most ROWS_AT_ONCE; each `every`-th, and the `newest`."""
    evaluated = await evaluations(database, record)
    async for rows in _rows(database, record, spec, every or 1, first=after):
        made = [_made(row, evaluated) for row in rows if row["step"] >= after]
        wanted = [step for step in made if step.step % (every or 1) == 0]
        if wanted:
            after = wanted[-1].step
        yield wanted
    if every and newest > after:
        async for rows in _rows(database, record, spec, newest, first=newest - 1):
            yield [_made(row, evaluated) for row in rows if row["step"] + 1 == newest]


async def thinned(database: Database, record: JobRecord, spec: JobSpec, every: int) -> list[StepMade]:
    """Only each `every`-th step; the database picks them, so a job of many steps takes no longer."""
    rows = [row async for page in _rows(database, record, spec, every) for row in page]
    return [_made(row, {}) for row in rows if (row["step"] + 1) % every == 0]


async def evaluations(database: Database, record: JobRecord) -> dict[int, float]:
    """The validation losses that count, by the steps committed before each."""
    found = await database.evaluations(record.id)
    return {row.version: row.loss for row in found if checkpoint_counts(row.timeline, row.version, record.first_steps)}


async def _rows(
    database: Database, record: JobRecord, spec: JobSpec, every: int = 1, first: int = 0
) -> AsyncIterator[list[Mapping[str, Any]]]:
    """The rows that count, at least each N-th with `every` = N; for islands also rows of steps before `first`."""
    if spec.has_outer_steps:
        for timeline in range(record.timeline + 1):
            yield [asdict(row) for row in await rows_made(database, record, spec, job_rows(spec, timeline))]
        return
    after = (-1, -1)
    while page := await database.commits(record.id, after=after, first=first, count=ROWS_AT_ONCE, every=every):
        after = (page[-1]["timeline"], page[-1]["step"])
        yield [row for row in page if row_counts(row["timeline"], row["step"], record.first_steps)]


def _made(row: Mapping[str, Any], evaluated: Mapping[int, float]) -> StepMade:
    step = row["step"] + 1
    return StepMade(
        step=step,
        loss=math.nan if row["loss"] is None else row["loss"],
        grad_norm=row["norm"],
        learning_rate=row["learning_rate"],
        tokens=row["tokens"],
        skipped=bool(row["skip"]),
        committed_unix_s=row.get("committed_unix_s") or 0.0,
        evaluation_loss=evaluated.get(step, math.nan),
    )
