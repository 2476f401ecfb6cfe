"""A pytest plugin that puts PostgreSQL in the place of SQLite, for the tests of what is stored.

`pytest -p tests.support.on_postgres tests/unit/scheduler/storage`, with the URL of a server in the environment. Each
file that a test calls sqlite:///FILE becomes a database of that server, and each database in memory a fresh one.

What is claimed of the storage is claimed once, for both databases.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from scheduler.storage.database import migrate
from tests.support import databases, members

SERVER = "SWARM_TEST_POSTGRES"

# Tests of SQLite itself or of URLs, or that speak its SQL.
SQLITE_ALONE = frozenset({
    "test_what_is_committed_is_on_the_disk",
    "test_a_database_that_cannot_be_used_is_an_error_with_its_cause",
    "test_a_missing_driver_is_named_with_the_extra_that_installs_it",
    "test_a_database_url_that_cannot_be_used_is_refused_with_what_can",
    "test_an_error_about_a_database_leaves_out_its_passwords",
    "test_the_database_is_in_its_data_folder_whatever_the_folder_is_called",
    "test_a_database_that_an_earlier_version_put_elsewhere_is_named",
    "test_a_database_of_another_version_is_refused_and_stays_as_it_is",
    "test_a_database_that_nineteen_migrations_made_is_taken_over",
})  # fmt: skip

_create_engine = sa.create_engine
_numbers = itertools.count()
_databases: dict[str, sa.URL] = {}


def pytest_configure() -> None:
    sa.create_engine = _engine
    databases.fresh_engine = _fresh_engine
    members.database_url = lambda folder: f"sqlite:///{folder}/a.db"


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    left_out = [item for item in items if item.originalname in SQLITE_ALONE]
    assert {item.originalname for item in left_out} == SQLITE_ALONE, "these tests have other names now"
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _engine(url: str | sa.URL, **options: Any) -> sa.Engine:
    wanted = sa.make_url(url)
    if wanted.get_backend_name() != "sqlite":
        return _create_engine(wanted, **options)
    key = wanted.database or f"memory-{next(_numbers)}"
    if key not in _databases:
        _databases[key] = _new_database()
    # No connection is kept: many tests of databases in memory do not close theirs.
    return _create_engine(_databases[key], poolclass=NullPool, **options)


def _new_database() -> sa.URL:
    server = sa.make_url(os.environ[SERVER]).set(drivername="postgresql+psycopg")
    name = f"claim_{next(_numbers)}"
    engine = _create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name} TEMPLATE template0"))
    engine.dispose()
    return server.set(database=name)


def _fresh_engine() -> sa.Engine:
    engine = _engine("sqlite://")
    migrate(engine)
    return engine
