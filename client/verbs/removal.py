"""`swarm rm` and `swarm gc`: remove jobs that have ended, and files that no job needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from client.connection import dial
from client.flags import JobNames
from client.shell import Shell
from client.verbs.control import each
from client.views import FittedTable
from swarm.text import size
from swarm.wire import jobs_pb2 as pb

_WORDS = {
    "job": "a job beyond --keep-jobs",
    "uploads": "uploads of this person that no job names",
    "folder": "a folder of no job",
}


def rm(context: typer.Context, jobs: JobNames) -> int:
    """Remove jobs that have ended: weights, checkpoints, logs, and the uploads that no other job names. This cannot be
    undone, so scripts pass --yes. A job from which another job may still start is kept; checkpoints at a URL stay
    there."""
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        found, errors = each(shell, jobs, scheduler.get)
        # The youngest first: a job is kept for those that began at it.
        ids = list(dict.fromkeys(view.id for view in sorted(found, key=lambda view: -view.created_unix_s)))
        if ids:
            shell.confirm(f"remove {', '.join(ids)} with all weights, checkpoints and logs")
        removed, more = each(shell, ids, lambda job: scheduler.call("Remove", pb.JobRequest(job=job)))
    if shell.json and (removed or len(jobs) > 1):
        shell.data(
            [
                {"id": removal.id, "freed_bytes": removal.freed_bytes, "left": removal.left or None}
                for removal in removed
            ]
        )
    for removal in removed:
        left = f"; {removal.left}" if removal.left else ""
        shell.say(f"job {removal.id} removed, {size(removal.freed_bytes)} freed{left}")
    return next((error.exit_code for error in (*errors, *more)), 0)


def gc(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
) -> None:
    """Remove files that no job needs and that were not touched for an hour: uploads that no job names, folders of jobs
    that are not listed, and jobs beyond `swarm scheduler --keep-jobs`. All but the folders are also removed by
    themselves, uploads after a day. Scripts pass --yes."""
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        waste = scheduler.call("Collect", pb.CollectRequest(dry_run=True)).waste
        if waste and not shell.json:
            shell.out.print(_table(waste))
        if waste and not dry_run:
            shell.confirm(f"remove this, {_total(waste)}")
            waste = scheduler.call("Collect", pb.CollectRequest()).waste
    if shell.json:
        shell.data([{"kind": item.kind, "name": item.name, "size_bytes": item.size_bytes} for item in waste])
    elif waste:
        shell.say(f"{_total(waste)} {'can be freed with: swarm gc' if dry_run else 'freed'}")
    else:
        shell.say("nothing to remove")


def _total(waste: Sequence[pb.Waste]) -> str:
    return size(sum(item.size_bytes for item in waste))


def _table(waste: Sequence[pb.Waste]) -> FittedTable:
    rows = [(Text(size(item.size_bytes)), Text(item.name), Text(_WORDS.get(item.kind, item.kind))) for item in waste]
    return FittedTable(("SIZE", "NAME", "WHAT"), rows, dropped_first=())
