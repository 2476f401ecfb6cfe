"""`swarm resume`: let a job go on from one of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from client.connection import Scheduler
from client.flags import Detach, JobName
from client.shell import Shell
from client.verbs.follow import follow, raise_unless_succeeded
from client.views import job_values
from swarm.checkpoint.storage import LATEST
from swarm.errors import INTERRUPTED
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
            help="The newest checkpoint that verifies, or that of a step (swarm checkpoints JOB); 0 begins anew.",
        ),
    ] = LATEST,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value, such as training.steps, training.learning_rate or pipeline.stages; what is trained "
            "(model, data, seed, batch, optimizer) stays.",
        ),
    ] = None,
    detach: Detach = False,
) -> int:
    """Let a paused, failed or cancelled job go on from a checkpoint, at any number of stages, and follow it."""
    return resume(context.obj, job, from_, set_ or (), detach=detach)


def resume(shell: Shell, job: str, which: str, overrides: Sequence[str], *, detach: bool) -> int:
    """Let a paused, failed or cancelled job go on, perhaps with other values, and follow it; gives the exit code."""
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        scheduler.check_protocol()
        view = scheduler.get(job)
        spec_json = changed_spec(view, overrides).model_dump_json() if overrides else ""
        view = scheduler.resume(view.id, which, spec_json)
        if shell.json:
            shell.data(job_values(view))
        shell.say(f"job {view.id}: {view.reason}")
        if detach:
            shell.say(f"follow: swarm status -w {view.id}{shell.scheduler_flag}")
            return 0
        try:
            ended = follow(shell, scheduler, view.id)
        except KeyboardInterrupt:
            shell.say(f"\ndetached: job {view.id} goes on.   follow: swarm status -w {view.id}{shell.scheduler_flag}")
            return INTERRUPTED
    raise_unless_succeeded(ended)
    shell.say(f"job {ended.id} succeeded: weights sha256 {ended.weights_sha256}")
    return 0


def changed_spec(view: pb.JobView, overrides: Sequence[str]) -> JobSpec:
    """The job's spec with `--set` values on top; UsageError, InvalidConfig."""
    values: dict[str, Any] = json.loads(view.spec_json)
    return parse_job(apply_overrides(changed_values(values, overrides), overrides), where="--set")
