"""`swarm cancel`: save jobs and stop them, or stop them at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from client.connection import Scheduler
from client.shell import Shell
from client.views import job_values


def command(
    context: typer.Context,
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Names, ids or beginnings of ids.")],
    no_checkpoint: Annotated[
        bool, typer.Option("--no-checkpoint", help="Stop at once; what was trained since the last checkpoint is lost.")
    ] = False,
) -> None:
    """Save what was trained, then stop jobs; `swarm resume` goes on. A second cancel stops at once, without saving."""
    shell: Shell = context.obj
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        views = [scheduler.get(job) for job in jobs]
        if not shell.yes and sys.stdin.isatty() and sys.stderr.isatty():
            names = ", ".join(view.id for view in views)
            lost = ", losing what was trained since the last checkpoint" if no_checkpoint else ""
            typer.confirm(f"cancel {names}{lost}?", abort=True, err=True)
        views = [scheduler.cancel(view.id, "cancelled by its user", no_checkpoint=no_checkpoint) for view in views]
    if shell.json:
        shell.data([job_values(view) for view in views])
    for view in views:
        shell.say(f"job {view.id}: {view.state}")
