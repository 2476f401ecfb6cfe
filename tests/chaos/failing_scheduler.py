"""A scheduler that dies at an exact point: `python -m tests.chaos.failing_scheduler --at POINT --hit N FLAGS`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from scheduler.__main__ import cli
from scheduler.api.sessions import Connections
from scheduler.brain.islands.exchange import OuterSteps
from scheduler.brain.settings import RebalanceSettings
from scheduler.jobs import brain_settings
from scheduler.storage.database import Database
from swarm.process.lifecycle import run_cli
from swarm.wire.messages import Averaged, Commit, Exchange
from tests.chaos.failpoints import Failpoint, take_flags


def averaged_row(point: Failpoint) -> None:
    """All members hold the mean, and no row says so."""
    point.before(Database, "put_commit")


def row_commit(point: Failpoint) -> None:
    """The row is durable, and no member knows."""
    point.after(Database, "put_commit")


def level_exchange(point: Failpoint) -> None:
    """All islands hold what they propose, and no envoy was told."""
    point.before(Connections, "send", lambda _, peer, command: isinstance(command, Exchange))


def exchange_averaged(point: Failpoint) -> None:
    """An envoy holds the mean of what all islands propose, and the scheduler has not heard it."""
    point.before(OuterSteps, "heard", lambda _, peer, event, now_s: isinstance(event, Averaged))


def exchanged_rows(point: Failpoint) -> None:
    """All envoys hold the mean, and no row says so."""
    point.before(Database, "put_commits", lambda _, job, rows, *rest: len(rows) > 1)


def rows_merge(point: Failpoint) -> None:
    """The rows of all islands are durable, and nobody has merged."""
    point.after(Database, "put_commits", lambda _, job, rows, *rest: len(rows) > 1)


def merge_agreed(point: Failpoint) -> None:
    """Some were told to merge, and others were not."""
    exchanged: set[int] = set()

    def merges(_: object, peer: object, command: object) -> bool:
        if isinstance(command, Exchange):
            exchanged.add(command.step)
        return isinstance(command, Commit) and command.step in exchanged

    point.before(Connections, "send", merges)


def never_moves(_: Failpoint) -> None:
    """Nobody dies; stage servers move soon, often and for little."""
    brain_settings.REBALANCING = RebalanceSettings(interval_s=2.0, cooldown_s=10.0, min_gain=0.05)


OUTER_POINTS: dict[str, Callable[[Failpoint], None]] = {
    "level/Exchange": level_exchange,
    "Exchange/Averaged": exchange_averaged,
    "Averaged/rows": exchanged_rows,
    "rows/merge": rows_merge,
    "merge/agreed": merge_agreed,
}
POINTS = {"Averaged/row": averaged_row, "row/Commit": row_commit, "never/moves": never_moves, **OUTER_POINTS}

if __name__ == "__main__":
    name, hit, rest = take_flags(sys.argv[1:])
    POINTS[name](Failpoint(name, hit))
    sys.argv = ["scheduler", *rest]
    run_cli(cli, "swarm scheduler")
