"""What projects used: one row for each day, project and owner, kept for 400 days.

    usage(day, project, owner, peer_s, tokens, relay_bytes, batch)

Counts gather in memory and are added to the rows in one transaction. A batch has a number, which its rows keep: written
again after an unknown outcome, it adds nothing. The counts are floats, exact up to 2^53, so a relay that reports absurd
numbers overflows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from scheduler.storage.database import Database
from swarm.errors import DatabaseRejected
from swarm.limits import USAGE_DAYS_MAX, USAGE_LISTED_MAX, USAGE_ROWS_MAX

DAY_S = 86_400

USAGE = sa.Table(
    "usage",
    sa.MetaData(),
    sa.Column("day", sa.Integer, primary_key=True),  # since 1970, UTC
    *(sa.Column(name, sa.Text, primary_key=True) for name in ("project", "owner")),
    *(sa.Column(name, sa.Float) for name in ("peer_s", "tokens", "relay_bytes")),
    sa.Column("batch", sa.Text),  # the newest that is in the row
)
_KEY = ("day", "project", "owner")
_COUNTS = ("peer_s", "tokens", "relay_bytes")
_KEYS = [USAGE.c[name] for name in _KEY]
# SQLite and PostgreSQL both understand it.
_ADD = sa.text(
    "INSERT INTO usage (day, project, owner, peer_s, tokens, relay_bytes, batch) "
    "VALUES (:day, :project, :owner, :peer_s, :tokens, :relay_bytes, :batch) "
    "ON CONFLICT (day, project, owner) DO UPDATE SET "
    + ", ".join(f"{name} = usage.{name} + excluded.{name}" for name in _COUNTS)
    + ", batch = excluded.batch WHERE usage.batch <> excluded.batch"
)


def day_of(unix_s: float) -> int:
    return int(unix_s // DAY_S)


class Usage:
    """Counts what is used; `write` stores it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._counts: dict[tuple[int, str, str], list[float]] = {}  # since the newest batch
        self._batch: dict[tuple[int, str, str], list[float]] = {}  # not known to be written
        self._number = 0

    def add(
        self, unix_s: float, project: str, owner: str, *, peer_s: float = 0.0, tokens: int = 0, relay_bytes: int = 0
    ) -> None:
        """Count what a job of the project and owner used."""
        counts = self._counts.setdefault((day_of(unix_s), project, owner), [0.0, 0.0, 0.0])
        for index, count in enumerate((peer_s, tokens, relay_bytes)):
            counts[index] += count
        if len(self._counts) > USAGE_ROWS_MAX:  # the database has been away for long
            del self._counts[min(self._counts)]

    async def write(self, unix_s: float) -> None:
        """Add what was counted to the rows and drop rows beyond the bounds: at once, or not at all.

        Raises DatabaseUnavailable, and writes the same batch the next time; Fenced; DatabaseRejected.
        """
        if not self._batch:
            self._batch, self._counts, self._number = self._counts, {}, self._number + 1
        name, oldest = f"{self._database.epoch}.{self._number}", day_of(unix_s) + 1 - USAGE_DAYS_MAX
        rows = [dict(zip(_KEY + _COUNTS, (*key, *counts), strict=True)) for key, counts in self._batch.items()]

        def write(connection: sa.Connection) -> None:
            connection.execute(_ADD, [row | {"batch": name} for row in rows])
            connection.execute(sa.delete(USAGE).where(USAGE.c.day < oldest))
            held = connection.execute(sa.select(sa.func.count()).select_from(USAGE)).scalar_one()
            if held > USAGE_ROWS_MAX:
                excess = sa.select(*_KEYS).order_by(*_KEYS).limit(held - USAGE_ROWS_MAX)
                connection.execute(sa.delete(USAGE).where(sa.tuple_(*_KEYS).in_(excess)))

        try:
            if rows:
                await self._database.write(write)
        except DatabaseRejected:
            self._batch = {}
            raise
        self._batch = {}

    def forget(self, project: str) -> None:
        """Drop what was counted for the project and is not written yet."""
        for counts in (self._counts, self._batch):
            for key in [key for key in counts if key[1] == project]:
                del counts[key]

    async def of(self, project: str, first_day: int) -> list[dict[str, Any]]:
        """The rows of a project from a day on, newest first."""
        query = sa.select(*_KEYS, *(USAGE.c[name] for name in _COUNTS)).order_by(USAGE.c.day.desc(), USAGE.c.owner)
        query = query.where(USAGE.c.project == project, USAGE.c.day >= first_day)
        return await self._database.select(query.limit(USAGE_LISTED_MAX))

    async def sums(self, projects: Sequence[str], first_day: int) -> list[dict[str, Any]]:
        """What each of the projects used from a day on, by name."""
        sums = (sa.func.sum(USAGE.c[name]).label(name) for name in _COUNTS)
        query = sa.select(USAGE.c.project, *sums).group_by(USAGE.c.project).order_by(USAGE.c.project)
        return await self._database.select(query.where(USAGE.c.project.in_(projects), USAGE.c.day >= first_day))
