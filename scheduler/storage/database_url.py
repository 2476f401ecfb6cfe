"""The value of --db, checked before SQLAlchemy opens anything."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError

from swarm.errors import InvalidConfig

_DRIVERS = ("sqlite", "sqlite+pysqlite", "postgresql", "postgresql+psycopg")
_HINT = "write sqlite (a file in --data-dir) or postgresql://USER:PASSWORD@HOST/NAME"


def make_engine(url: str) -> sa.Engine:
    """An engine that has not connected yet; InvalidConfig if the URL or its driver cannot be used."""
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        shown = url.rpartition("@")[2][:100]  # what comes before may be a password
        raise InvalidConfig(f'--db "{shown}" is no database URL', hint=_HINT) from None
    if parsed.drivername not in _DRIVERS:
        raise InvalidConfig(f"--db {parsed.drivername} is not supported", hint=_HINT)
    try:
        return sa.create_engine(parsed)
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"--db {parsed.drivername} needs the Python package {error.name}",
            hint='install it with: pip install "swarm-stages[postgres]"',
        ) from None
    except ArgumentError as error:
        raise InvalidConfig(f"--db {parsed.render_as_string()} cannot be used: {error}", hint=_HINT) from None
