"""The shares of a job's islands, in the database: how much of a step each trains behind which outer step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa

from swarm.types import JobId

if TYPE_CHECKING:
    from scheduler.storage.database import Database

_SHARES = sa.table(
    "shares", *(sa.column(name) for name in ("job", "timeline", "version", "shares_json", "epoch"))
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharesRow:
    """Behind `version`, on a timeline of one of the islands that exchanged there, islands have these shares."""

    timeline: int
    version: int
    shares: tuple[int, ...]


def put_shares(connection: sa.Connection, epoch: int, job: JobId, row: SharesRow) -> None:
    """Write a row; writing it again after an unknown outcome changes nothing."""
    table = _SHARES.c
    key = sa.and_(table.job == job, table.timeline == row.timeline, table.version == row.version, table.epoch == epoch)
    if connection.execute(sa.select(table.version).where(key)).first() is None:
        values = {"job": job, "epoch": epoch, "timeline": row.timeline, "version": row.version}
        connection.execute(sa.insert(_SHARES).values(**values, shares_json=json.dumps(row.shares)))


async def shares_rows(database: Database, job: JobId) -> list[SharesRow]:
    """Those of a job, in order of versions."""
    rows = await database.select(sa.select(_SHARES).where(_SHARES.c.job == job).order_by(_SHARES.c.version))
    return [SharesRow(row["timeline"], row["version"], tuple(json.loads(row["shares_json"]))) for row in rows]
