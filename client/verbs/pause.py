"""`swarm pause`: save a job and free its stage servers."""

from __future__ import annotations

import typer

from client.connection import Scheduler
from client.flags import JobName
from client.shell import Shell
from client.views import job_values
from swarm.types import JobState


def command(context: typer.Context, job: JobName) -> int:
    """Commit the open steps, write a checkpoint and free the stage servers; `swarm resume` continues the job."""
    return pause(context.obj, job)


def pause(shell: Shell, job: str) -> int:
    """Pause a job and wait until it is paused; returns 0, or 1 if the job ended another way."""
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        view = scheduler.pause(scheduler.get(job).id)
        if view.state == JobState.PAUSING:
            shell.say(f"job {view.id}: {view.state}: {view.reason}")
            for seen in scheduler.watch(view.id):
                view = seen
                if view.state != JobState.PAUSING:
                    break
    if shell.json:
        shell.data(job_values(view))
    shell.say(f"job {view.id} is {view.state} at step {view.step}: {view.reason}")
    if view.state == JobState.PAUSED:
        shell.say(f"go on with: swarm resume {view.id}{shell.scheduler_flag}")
        return 0
    return 0 if view.state == JobState.SUCCEEDED else 1
