"""A scheduler that dies at an exact point: `python -m tests.chaos.failing_scheduler --at POINT --hit N FLAGS`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from scheduler.__main__ import cli
from scheduler.storage.database import Database
from swarm.process.lifecycle import run_cli
from tests.chaos.failpoints import Failpoint, take_flags


def averaged_row(point: Failpoint) -> None:
    """All members hold the mean, and no row says so."""
    point.before(Database, "put_commit")


def row_commit(point: Failpoint) -> None:
    """The row is durable, and no member knows."""
    point.after(Database, "put_commit")


POINTS: dict[str, Callable[[Failpoint], None]] = {"Averaged/row": averaged_row, "row/Commit": row_commit}

if __name__ == "__main__":
    name, hit, rest = take_flags(sys.argv[1:])
    POINTS[name](Failpoint(name, hit))
    sys.argv = ["scheduler", *rest]
    run_cli(cli, "swarm scheduler")
