"""`swarm cancel`: save jobs and stop them, or stop them at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import typer

from client.connection import Scheduler
from client.shell import Shell
from client.views import job_values
from swarm.errors import SchedulerUnreachable, SwarmError
from swarm.wire import jobs_pb2 as pb


def command(
    context: typer.Context,
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Names, ids or beginnings of ids.")],
    no_checkpoint: Annotated[
        bool, typer.Option("--no-checkpoint", help="Stop at once; what was trained since the last checkpoint is lost.")
    ] = False,
) -> int:
    """Save jobs, then stop them; `swarm resume` continues them. A second cancel stops at once, without saving."""
    shell: Shell = context.obj
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        found, errors = _each(shell, jobs, scheduler.get)
        ids = [view.id for view in found]
        if ids and not shell.yes and sys.stdin.isatty() and sys.stderr.isatty():
            lost = ", losing what was trained since the last checkpoint" if no_checkpoint else ""
            typer.confirm(f"cancel {', '.join(ids)}{lost}?", abort=True, err=True)
        cancel = partial(scheduler.cancel, reason="cancelled by its user", no_checkpoint=no_checkpoint)
        cancelled, more = _each(shell, ids, cancel)
    if shell.json and (cancelled or len(jobs) > 1):
        shell.data([job_values(view) for view in cancelled])
    for view in cancelled:
        shell.say(f"job {view.id}: {view.state}")
    return next((error.exit_code for error in (*errors, *more)), 0)


def _each(
    shell: Shell, jobs: Sequence[str], call: Callable[[str], pb.JobView]
) -> tuple[list[pb.JobView], list[SwarmError]]:
    """Make a call for each job. An error is reported and does not keep the others from theirs."""
    views: list[pb.JobView] = []
    errors: list[SwarmError] = []
    for job in jobs:
        try:
            views.append(call(job))
        except SchedulerUnreachable:
            raise
        except SwarmError as error:
            shell.error(error)
            errors.append(error)
    return views, errors
