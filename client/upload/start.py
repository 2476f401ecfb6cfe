"""Upload the checkpoint that a new job starts from, if it is on this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

from client.connection import Scheduler
from client.shell import Shell
from client.upload.blobs import File, upload
from swarm.checkpoint.reader import Checkpoint, open_folder
from swarm.checkpoint.storage import MANIFEST, LocalStorage
from swarm.errors import InvalidConfig, InvalidModel, NotFound
from swarm.job.changes import JOB_AND_STEP, check_state, check_steps
from swarm.job.spec import JobSpec
from swarm.wire import jobs_pb2 as pb

_STATE_FILES = (MANIFEST, "trainer_state.json")


def is_job_and_step(text: str) -> bool:
    """Whether this names a checkpoint of a scheduler's job rather than a folder of this machine."""
    return bool(JOB_AND_STEP.match(text)) and not Path(text).exists()


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
    """Send the files of a local checkpoint that the scheduler lacks; returns the files to submit."""
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
