"""`swarm cancel`, `swarm pause` and `swarm resume`: end a job, or interrupt and continue it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, TypeVar

import typer

from client.connection import dial
from client.flags import Detach, JobName, JobNames, offers
from client.records import Job
from client.shell import Shell
from client.verbs.watching.follow import follow_to_success
from client.views import job_values
from swarm.checkpoint.storage import LATEST
from swarm.errors import SchedulerUnreachable, SwarmError
from swarm.job.changes import changed_spec, changed_values
from swarm.job.spec import apply_overrides
from swarm.types import JobState
from swarm.wire import jobs_pb2 as pb

View = TypeVar("View", Job, pb.RemovedView)


def cancel(
    context: typer.Context,
    jobs: JobNames,
    no_checkpoint: Annotated[
        bool, typer.Option("--no-checkpoint", help="Stop at once; what was trained since the last checkpoint is lost.")
    ] = False,
) -> int:
    """Save jobs, then stop them; `swarm resume` continues them. A second cancel stops at once, without saving."""
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        found, errors = each(shell, jobs, scheduler.get)
        ids = [view.id for view in found]
        if ids and not shell.yes and sys.stdin.isatty() and sys.stderr.isatty():
            lost = ", losing what was trained since the last checkpoint" if no_checkpoint else ""
            typer.confirm(f"cancel {', '.join(ids)}{lost}?", abort=True, err=True)
        ask = partial(pb.CancelRequest, reason="cancelled by its user", no_checkpoint=no_checkpoint)
        cancelled, more = each(shell, ids, lambda job: scheduler.job("Cancel", ask(job=job)))
    if shell.json and (cancelled or len(jobs) > 1):
        shell.data([job_values(view) for view in cancelled])
    for view in cancelled:
        shell.say(f"job {view.id}: {view.state}")
    return next((error.exit_code for error in (*errors, *more)), 0)


def pause(context: typer.Context, job: JobName) -> int:
    """Commit the open steps, write a checkpoint and free the stage servers; `swarm resume` continues the job."""
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        view = scheduler.job("Pause", pb.JobRequest(job=scheduler.get(job).id))
        if view.state == JobState.PAUSING:
            shell.say(f"job {view.id}: {view.state}: {view.reason}")
            for seen in scheduler.follow(view.id, shell.say):
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


def resume(
    context: typer.Context,
    job: JobName,
    from_: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="latest|STEP",
            help="The newest checkpoint that verifies, or the one of a step (swarm checkpoints JOB); 0 starts over.",
            autocompletion=offers("steps"),
        ),
    ] = LATEST,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value, such as training.steps, training.learning_rate or pipeline.stages. Model, data, "
            "seed, batch and optimizer cannot change.",
        ),
    ] = None,
    detach: Detach = False,
) -> int:
    """Continue a paused, failed or cancelled job from a checkpoint, with any number of stages, and follow it."""
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        scheduler.check_protocol()
        view = scheduler.get(job)
        spec_json = ""
        if set_:
            values = apply_overrides(changed_values(view.spec, set_), set_)
            spec_json = changed_spec(view.spec, values, "--set").model_dump_json()
        request = pb.ResumeRequest(job=view.id, spec_json=spec_json, **{"from": from_})
        view = scheduler.job("Resume", request)
        if shell.json:
            shell.data(job_values(view))
        commands = f"follow: swarm status -w {view.id}{shell.scheduler_flag}"
        if detach:  # else its reason comes with its state
            shell.say(f"job {view.id}: {view.reason}")
            shell.say(commands)
            return 0
        return follow_to_success(shell, scheduler, view.id, commands=commands)


def each(shell: Shell, jobs: Sequence[str], call: Callable[[str], View]) -> tuple[list[View], list[SwarmError]]:
    """Make a call for each job. An error is reported and does not keep the others from theirs."""
    views: list[View] = []
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
