"""`swarm ls`: the jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from client.connection import Scheduler
from client.shell import Shell
from client.views import job_values, jobs_table
from swarm.errors import UsageError
from swarm.types import JobState


def command(
    context: typer.Context,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have ended.")] = False,
    state: Annotated[str, typer.Option(help="Only jobs in this state.", show_default=False)] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = 50,
) -> None:
    """List jobs, newest first."""
    shell: Shell = context.obj
    if state and state not in list(JobState):
        raise UsageError(f'there is no job state "{state}"', hint=f"one of: {', '.join(JobState)}")
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        views = scheduler.jobs(all=all_, state=state, limit=limit)
    if shell.json:
        shell.data([job_values(view) for view in views])
    elif views:
        shell.out.print(jobs_table(views))
    else:
        shell.say("no jobs" if all_ or state else "no jobs are open; all jobs: swarm ls -a")
