"""Binds a data folder to its database: both hold the same id.

The database knows the jobs, the folder holds their tokens, weights and checkpoints. A scheduler that started with the
wrong folder would find no data and fail every running job, so it does not start.
"""

from __future__ import annotations

import json
import platform
import secrets
from pathlib import Path

import sqlalchemy as sa

from swarm.errors import InvalidConfig
from swarm.text import counted

ID_FILE = "data-folder.json"

_FOLDER = sa.table("data_folder", sa.column("id", sa.Text), sa.column("place", sa.Text))
_JOBS = sa.table("jobs")


def bind(connection: sa.Connection, folder: Path) -> str:
    """Check that the folder holds the data of this database's jobs, and give the id of both.

    A database without an id, or without jobs, takes the folder's. InvalidConfig if the data are elsewhere.
    """
    present, place = _read(folder), f"{platform.node()}:{folder.resolve()}"
    known = connection.execute(sa.select(_FOLDER.c.id, _FOLDER.c.place)).first()
    if known is not None and known.id != present:
        jobs = connection.execute(sa.select(sa.func.count()).select_from(_JOBS)).scalar_one()
        if jobs:
            raise InvalidConfig(
                f"{folder} does not hold the data of the {counted(jobs, 'job')} in this database: "
                f"they are in {known.place}",
                hint=f"start with that --data-dir; if it moved, copy it whole, with {ID_FILE}",
            )
    one = present or secrets.token_hex(8)
    connection.execute(sa.delete(_FOLDER))
    connection.execute(sa.insert(_FOLDER).values(id=one, place=place))
    if present:
        return one
    try:
        (folder / ID_FILE).write_text(json.dumps({"id": one}) + "\n")
    except OSError as error:
        raise InvalidConfig(f"{folder} cannot be used: {error.strerror or error}", hint="check --data-dir") from None
    return one


def _read(folder: Path) -> str:
    try:
        found = json.loads((folder / ID_FILE).read_text())["id"]
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(
            f"{folder / ID_FILE} cannot be used: {error}", hint="restore it, or choose another --data-dir"
        ) from None
    if not (isinstance(found, str) and 0 < len(found) <= 64):
        raise InvalidConfig(f"{folder / ID_FILE} holds no id", hint="restore it, or choose another --data-dir")
    return found
