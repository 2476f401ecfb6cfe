"""`swarm wait`: says nothing until jobs have ended, and gives how, so that a command can follow.

Not chosen: a command in the job file for the job's end, because it would run as the scheduler's user, and a URL would
be called from inside its network.
"""

from __future__ import annotations

import typer

from client.connection import Scheduler, dial
from client.flags import JobNames
from client.records import Job, raise_unless_succeeded
from client.shell import Shell
from client.verbs.control import each
from client.views import job_values
from swarm.errors import SwarmError
from swarm.types import JobState


def wait(context: typer.Context, jobs: JobNames) -> int:
    """Wait until jobs have ended or are paused. Exit code 0 if all have succeeded.

    A command can follow, on this machine and as yourself: swarm wait JOB && swarm pull JOB ./model
    """
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        found, errors = each(shell, jobs, scheduler.get)
        ended = [_wait(shell, scheduler, view) for view in found]
    if shell.json:
        shell.data([job_values(view) for view in ended])
    for view in ended:
        try:
            raise_unless_succeeded(view)
            shell.say(f"job {view.id} succeeded: weights sha256 {view.weights_sha256}")
        except SwarmError as error:
            if not shell.json:
                shell.error(error)
            errors.append(error)
    return next((error.exit_code for error in errors), 0)


def _wait(shell: Shell, scheduler: Scheduler, view: Job) -> Job:
    """The job once it has stopped going on by itself."""
    if view.has_ended:
        return view
    return next(
        seen for seen in scheduler.follow(view.id, shell.say) if seen.has_ended or seen.state == JobState.PAUSED
    )
