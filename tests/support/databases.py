"""The scheduler's database in memory: migrated once for all that a test process makes."""

from __future__ import annotations

import sqlite3
from functools import lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from scheduler.storage.database import migrate

BEFORE_ONE_MIGRATION = Path(__file__).with_name("before_one_migration.sql")  # by the last version with nineteen

_COMPILED: dict[Any, Any] = {}


def fresh_engine() -> sa.Engine:
    """An empty database with all tables, for as many schedulers, one after the other, as have the engine."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.deserialize(_migrated())
    connection.execute("PRAGMA foreign_keys=ON")  # as in a file
    # Else each engine compiles every statement anew.
    return _engine_on(connection).execution_options(compiled_cache=_COMPILED)


def taken_over(sql: Path) -> sa.Engine:
    """A database that an earlier version wrote."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.executescript(sql.read_text())
    engine = _engine_on(connection)
    migrate(engine)
    return engine


@lru_cache(maxsize=1)
def _migrated() -> bytes:
    """The content of such a database: migrations take their time, so they run once."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    migrate(_engine_on(connection))
    return connection.serialize()


def _engine_on(connection: sqlite3.Connection) -> sa.Engine:
    return sa.create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool)
