"""Verbs about checkpoints: list them, pause a job, go on from one, start a new job from one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from client.connection import Scheduler
from client.shell import Shell, finite, utc
from client.upload.blobs import File, upload
from client.verbs.follow import follow, raise_unless_succeeded
from client.views import job_values, number
from swarm.checkpoint.storage import MANIFEST, LocalStorage
from swarm.checkpoint.writer import Checkpoint, open_folder
from swarm.errors import INTERRUPTED, InvalidConfig, InvalidModel, NotFound
from swarm.job.changes import changed_values, check_state, check_steps
from swarm.job.spec import JobSpec, apply_overrides, parse_job
from swarm.text import size
from swarm.types import JobState
from swarm.wire import jobs_pb2 as pb

_JOB_AND_STEP = re.compile(r"^[^/\\:]+:(\d+|latest)$")
_STATE_FILES = (MANIFEST, "trainer_state.json")


def show_checkpoints(shell: Shell, job: str, *, verify: bool) -> int:
    """List a job's checkpoints; with `verify` the scheduler reads every byte. Gives 1 if it found a fault."""
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        view = scheduler.get(job)
        found = scheduler.checkpoints(view.id, verify=verify)
    faults = sum(bool(one.fault) for one in found)
    if shell.json:
        shell.data([checkpoint_values(one, verified=verify) for one in found])
    elif found:
        shell.out.print(_table(found, verified=verify), soft_wrap=True)
    else:
        shell.say(f"job {view.id} has no checkpoints; it writes one every checkpoint.every_steps and at its end")
    if faults:
        which = "cannot be used" if faults == 1 else "cannot be used each"
        shell.say(f"{faults} of {len(found)} {which}; resume takes the newest that verifies")
    return 1 if faults and verify else 0


def checkpoint_values(view: pb.CheckpointView, *, verified: bool) -> dict[str, Any]:
    """A checkpoint as JSON values; `verified` is null if nobody looked at its contents."""
    return {
        "step": view.step,
        "created": utc(view.created_unix_s),
        "size_bytes": view.size_bytes,
        "loss": finite(view.loss),
        "optimizer": view.optimizer,
        "weights_sha256": view.weights_sha256 or None,
        "verified": False if view.fault else (True if verified else None),
        "fault": view.fault or None,
    }


def _table(views: Sequence[pb.CheckpointView], *, verified: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("STEP", "TIME", "SIZE", "LOSS", "OPTIMIZER", "STATE"):
        table.add_column(column, no_wrap=column != "STATE")
    for view in views:
        good = "verified" if verified else "complete"
        table.add_row(
            str(view.step),
            utc(view.created_unix_s) or "-",
            size(view.size_bytes) if view.size_bytes else "-",
            number(view.loss),
            "yes" if view.optimizer else "no",
            Text(view.fault, style="red") if view.fault else Text(good, style="green" if verified else ""),
        )
    return table


def pause(shell: Shell, job: str) -> int:
    """Pause a job and wait until it is paused; gives 0, or 1 if it came otherwise."""
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


def is_job_and_step(text: str) -> bool:
    """Whether a start is a checkpoint that the scheduler has, not a folder of this machine."""
    return bool(_JOB_AND_STEP.match(text)) and not Path(text).exists()


def open_start(spec: JobSpec) -> Checkpoint | None:
    """The local checkpoint that a resolved spec starts from, every byte checked; None if it names none of this machine.

    NotFound, CheckpointDamaged; InvalidConfig if the job cannot go on from it.
    """
    where = spec.checkpoint.resume_from
    if not where or is_job_and_step(where):
        return None
    try:
        found = open_folder(Path(where).expanduser())
    except NotFound as error:
        raise NotFound(error.message, hint=f"{error.hint}; of a job of the scheduler: JOB:STEP or JOB:latest") from None
    check_state(found.trainer_state(), spec)
    check_steps(spec, found.step)
    return found


def upload_start(shell: Shell, scheduler: Scheduler, start: Checkpoint) -> list[pb.JobFile]:
    """Send the files of a local checkpoint that the scheduler lacks; gives what to submit."""
    if not isinstance(start.storage, LocalStorage):
        raise InvalidConfig(f"{start.storage.where} is no folder of this machine")
    home = start.storage.root / start.name
    manifest = home / MANIFEST
    try:
        raw = manifest.read_bytes()
    except OSError as error:
        raise InvalidModel(f"{manifest} cannot be read: {error.strerror or error}") from error
    files = {MANIFEST: File(hashlib.sha256(raw).hexdigest(), len(raw), raw)}
    for file in start.files:
        if file.path.endswith(".safetensors") or file.path in _STATE_FILES:
            files[file.path] = File(file.sha256, file.size_bytes, home / file.path)
    upload(shell, scheduler, list(files.values()), f"checkpoint {start.name}")
    return [pb.JobFile(path=path, sha256=file.sha256, size_bytes=file.size_bytes) for path, file in files.items()]
