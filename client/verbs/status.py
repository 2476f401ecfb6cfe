"""`swarm status`: one job, now or until it ends."""

from __future__ import annotations

from typing import Annotated

import typer

from client.connection import Scheduler
from client.flags import JobName
from client.shell import Shell
from client.verbs.follow import follow, raise_unless_succeeded
from client.views import job_table, job_values


def command(
    context: typer.Context,
    job: JobName,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the job until it ends.")] = False,
) -> None:
    """Show one job: state, reason, step, loss, speed, peers per stage."""
    shell: Shell = context.obj
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        view = scheduler.get(job)
        if watch:
            view = follow(shell, scheduler, view.id)
    if not shell.json:
        shell.out.print(job_table(view), soft_wrap=True)
    elif not watch:
        shell.data(job_values(view, spec=True))
    if watch:
        raise_unless_succeeded(view)
