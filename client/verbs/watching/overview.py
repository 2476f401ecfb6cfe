"""`swarm ls`, `swarm status` and `swarm version`: list jobs, show one, name the running versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from client.connection import dial
from client.flags import JobName
from client.records import raise_unless_succeeded
from client.shell import Shell, product
from client.verbs.watching.follow import follow
from client.views import job_table, job_values, jobs_table
from swarm.errors import SwarmError, UsageError
from swarm.types import PROTOCOL_VERSION, JobState
from swarm.wire.jobs_pb2 import VersionRequest

VERSION_S_MAX = 5.0


def ls(
    context: typer.Context,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have ended.")] = False,
    state: Annotated[str, typer.Option(help="Only jobs in this state.", show_default=False)] = "",
    limit: Annotated[int, typer.Option(min=1, max=2**32 - 1, help="At most this many.")] = 50,
) -> None:
    """List jobs, newest first."""
    shell: Shell = context.obj
    if state and state not in list(JobState):
        raise UsageError(f'there is no job state "{state}"', hint=f"one of: {', '.join(JobState)}")
    with dial(shell) as scheduler:
        views, troubles = scheduler.jobs(all=all_, state=state, limit=limit)
    _say_troubles(shell, troubles)
    if shell.json:
        shell.data([job_values(view) for view in views])
    elif views:
        shell.out.print(jobs_table(views))
    else:
        shell.say("no jobs" if all_ or state else "no jobs are open; all jobs: swarm ls -a")


def status(
    context: typer.Context,
    job: JobName,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the job until it ends.")] = False,
) -> None:
    """Show one job: state, reason, step, loss, speed, peers per stage."""
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        view = scheduler.get(job)
        _say_troubles(shell, scheduler.jobs(all=False, limit=1)[1])
        if watch:
            view = follow(shell, scheduler, view.id)
    if not shell.json:
        shell.out.print(job_table(view), soft_wrap=True)
    elif not watch:
        shell.data(job_values(view, spec=True))
    if watch:
        raise_unless_succeeded(view)


def _say_troubles(shell: Shell, troubles: Sequence[str]) -> None:
    for trouble in troubles:
        shell.say(f"scheduler: {trouble}")


def version(context: typer.Context) -> None:
    """Show the version of this command and of the scheduler."""
    shell: Shell = context.obj
    answer = None
    try:
        with dial(shell, min(shell.timeout_s, VERSION_S_MAX)) as scheduler:
            answer = scheduler.call("Version", VersionRequest())
    except SwarmError as error:
        shell.say(error.message)
    if shell.json:
        theirs = answer and {"product": answer.product, "protocol": answer.protocol, "epoch": answer.epoch}
        shell.data({"product": product(), "protocol": PROTOCOL_VERSION, "scheduler": theirs})
        return
    print(f"swarm {product()}, protocol {PROTOCOL_VERSION}")
    if answer is not None:
        print(f"scheduler {answer.product}, protocol {answer.protocol}, at {shell.scheduler}")
