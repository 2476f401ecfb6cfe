"""`swarm resume`: continue a job from one of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from client.connection import Scheduler
from client.flags import Detach, JobName
from client.shell import Shell
from client.verbs.follow import follow_to_success
from client.views import job_values
from swarm.checkpoint.storage import LATEST
from swarm.job.changes import changed_values
from swarm.job.spec import JobSpec, apply_overrides, parse_job
from swarm.wire import jobs_pb2 as pb


def command(
    context: typer.Context,
    job: JobName,
    from_: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="latest|STEP",
            help="The newest checkpoint that verifies, or the one of a step (swarm checkpoints JOB); 0 starts over.",
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
    return resume(context.obj, job, from_, set_ or (), detach=detach)


def resume(shell: Shell, job: str, which: str, overrides: Sequence[str], *, detach: bool) -> int:
    """Continue a paused, failed or cancelled job, perhaps with other values, and follow it; returns the exit code."""
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        scheduler.check_protocol()
        view = scheduler.get(job)
        spec_json = changed_spec(view, overrides).model_dump_json() if overrides else ""
        view = scheduler.resume(view.id, which, spec_json)
        if shell.json:
            shell.data(job_values(view))
        shell.say(f"job {view.id}: {view.reason}")
        commands = f"follow: swarm status -w {view.id}{shell.scheduler_flag}"
        if detach:
            shell.say(commands)
            return 0
        return follow_to_success(shell, scheduler, view.id, commands=commands)


def changed_spec(view: pb.JobView, overrides: Sequence[str]) -> JobSpec:
    """The job's spec with `--set` values on top; UsageError, InvalidConfig."""
    values: dict[str, Any] = json.loads(view.spec_json)
    return parse_job(apply_overrides(changed_values(values, overrides), overrides), where="--set")
