"""The catalog of all jobs' checkpoints: finds the one that a job resumes from, and lists them for people.

It reads checkpoints, and removes a removed job's; `sink.py` writes. Nothing here changes a job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from scheduler.brain.lineage import checkpoint_counts
from scheduler.storage.executor import run_blocking
from scheduler.storage.job_record import JobRecord
from scheduler.storage.trees import remove_tree
from swarm.checkpoint.reader import Checkpoint, Fault, Found, fault_of, find, list_checkpoints, newest
from swarm.checkpoint.storage import (
    LATEST,
    MANIFEST,
    SCHEMES,
    LocalStorage,
    Storage,
    check_absolute,
    local_folder,
    open_storage,
    url_parts,
)
from swarm.errors import CheckpointDamaged, InvalidConfig, NotAllowed, NotFound, StorageError, UsageError
from swarm.job.changes import JOB_AND_STEP, check_places
from swarm.job.spec import JobSpec
from swarm.text import printable, without_passwords
from swarm.types import JobId
from swarm.wire.messages import StateFile


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a timeline begins: at a checkpoint, or (None) where the job itself started."""

    step: int
    start: Checkpoint | None
    skipped: str = ""  # newer checkpoints that cannot be used, for a person

    @property
    def source(self) -> str:
        return f"from checkpoint {self.start.name}" if self.start is not None else "from the beginning"


class CheckpointCatalog:
    """Finds and reads checkpoints; `root` is the scheduler's data folder.

    A job may name a folder below `root` or one of `others`, or a URL of a kind in `schemes` below one of `others`: the
    scheduler opens it as itself, and may write in more buckets than those for checkpoints.
    """

    def __init__(
        self,
        root: Path,
        executor: ThreadPoolExecutor | None,
        others: Sequence[Path | str] = (),
        schemes: Set[str] = SCHEMES,
    ) -> None:
        self._root = root
        self._others = tuple(root for root in others if isinstance(root, Path))
        self._urls = tuple(url_parts(root, schemes) for root in others if isinstance(root, str))
        self._schemes = schemes
        self._verifying = False
        self.executor = executor

    async def open(self, spec: JobSpec, job: JobId) -> Storage:
        """Open `storage` on a thread: a job may name a disk that hangs, or a store that dials."""
        return await run_blocking(self.executor, lambda: self.storage(spec, job))

    def storage(self, spec: JobSpec, job: JobId) -> Storage:
        """Where a job's checkpoints are; InvalidConfig if the scheduler keeps none there. Not for the event loop."""
        where = spec.checkpoint.dir
        if not where:
            return LocalStorage(self._root / "jobs" / job / "checkpoints", chosen=self._root)
        folder = local_folder(where, self._schemes)
        if folder is None:
            return open_storage(f"{self._allowed_url(where)}/{job}", self._schemes)
        check_absolute(where)
        allowed = self._allowed(folder)
        return LocalStorage(allowed / job, chosen=allowed)

    def _allowed(self, folder: Path) -> Path:
        """The folder without links and `..`, if it is below one of ours and no room of the scheduler; InvalidConfig."""
        real, root = folder.resolve(), self._root.resolve()
        given = any(real.is_relative_to(other) for other in (root, *(other.resolve() for other in self._others)))
        own = any(real.is_relative_to(root / room) for room in _OWN_ROOMS)
        if own or not given or real.is_file():
            raise InvalidConfig(
                f'checkpoint.dir = "{folder}" is no folder in which this scheduler may keep checkpoints',
                hint=f"leave it out, or let the scheduler be started with --checkpoint-root {real.parent}",
            )
        return real

    def _allowed_url(self, where: str) -> str:
        """The URL, without a slash at its end, if it is one of ours or below it; InvalidConfig."""
        parts = url_parts(where, self._schemes)
        if not any(parts[: len(given)] == given for given in self._urls):
            raise InvalidConfig(
                f'checkpoint.dir = "{where}" is no URL below which this scheduler may keep checkpoints',
                hint=f"leave it out, or let the scheduler be started with --checkpoint-root {where}",
            )
        return where.removesuffix("/")

    def is_remote(self, where: str) -> bool:
        """Whether a `checkpoint.dir` is a URL, perhaps of a kind that an older version took."""
        try:
            return local_folder(where, self._schemes) is None
        except InvalidConfig:
            return True

    async def remove(self, where: str, job: JobId) -> int:
        """Remove a job's checkpoints, but not at a URL; gives the bytes. InvalidConfig for no folder of ours."""

        def remove() -> int:
            folder = local_folder(where, self._schemes)
            return 0 if folder is None else remove_tree(self._allowed(folder), job)

        return await run_blocking(self.executor, remove)

    async def start_of(self, record: JobRecord) -> Checkpoint | None:
        """The checkpoint that the job's present timeline starts from, if any; CheckpointDamaged, InvalidConfig."""
        if not record.start_name:
            return None
        return await run_blocking(self.executor, lambda: find(self._start(record), record.start_name))

    def _start(self, record: JobRecord) -> Storage:
        if self.is_remote(record.start_where):  # its URL may have been taken from the scheduler since
            self._allowed_url(record.start_where)
        return open_storage(record.start_where, self._schemes)

    async def newest(self, record: JobRecord, spec: JobSpec) -> Checkpoint | None:
        """The newest checkpoint that belongs to the job's present timeline, by its manifest alone."""

        def look() -> Checkpoint | None:
            try:
                found, _ = list_checkpoints(self.storage(spec, record.id), record.id)
            except (StorageError, InvalidConfig):
                return None
            counting = [saved for saved in found if checkpoint_counts(saved.timeline, saved.step, record.first_steps)]
            return counting[-1] if counting else None

        return await run_blocking(self.executor, look)

    async def check_there(self, record: JobRecord, spec: JobSpec, known: Checkpoint | None) -> None:
        """StorageError if the place of a job that has begun, or the checkpoint that is known there, is gone: an empty
        mount point has no checkpoints either.
        """
        place = await run_blocking(self.executor, lambda: self.storage(spec, record.id))
        is_gone = isinstance(place, LocalStorage) and not await run_blocking(self.executor, place.root.is_dir)
        if is_gone or known is not None:
            told = f"{place.where} is not there" if is_gone else f"{known and known.name} is not at {place.where}"
            hint = f"is its disk mounted? To begin anew: swarm cancel {record.id}, swarm resume {record.id} --from 0"
            raise StorageError(told, hint=hint)

    async def choose(self, record: JobRecord, spec: JobSpec, which: str) -> Found:
        """The checkpoint to resume from, after reading every byte: the "latest" that verifies, or a step's.

        If "latest" finds none, the result has no checkpoint. A step that is missing or damaged raises NotFound or
        CheckpointDamaged; anything else InvalidConfig.
        """
        return await run_blocking(self.executor, lambda: self._choose(record, spec, which))

    def _choose(self, record: JobRecord, spec: JobSpec, which: str) -> Found:
        storage = self.storage(spec, record.id)
        start: Checkpoint | Fault | None = None
        if record.start_name:
            try:
                start = find(self._start(record), record.start_name)
            except CheckpointDamaged as error:
                start = Fault(record.start_name, record.first_steps[-1], error.message)
        if which in ("", LATEST):
            steps = record.first_steps
            found = newest(storage, record.id, lambda one: checkpoint_counts(one.timeline, one.step, steps))
            if found.checkpoint is None and isinstance(start, Checkpoint) and not fault_of(start):
                return Found(start, found.skipped)
            lost = (start,) if isinstance(start, Fault) and found.checkpoint is None else ()
            return Found(found.checkpoint, found.skipped + lost)
        wanted = _step(which)
        present = list_checkpoints(storage, record.id)[0]
        candidates = [checkpoint for checkpoint in present if checkpoint.step == wanted]
        if isinstance(start, Checkpoint) and start.step == wanted:
            candidates.insert(0, start)
        if not candidates:
            steps_there = ", ".join(str(step) for step in sorted({checkpoint.step for checkpoint in present})) or "none"
            raise NotFound(
                f"job {record.id} has no checkpoint at step {wanted}; there are: {steps_there}",
                hint=f"list them with: swarm checkpoints {record.id}",
            )
        faults = []
        for checkpoint in reversed(candidates):
            if not (fault := fault_of(checkpoint)):
                return Found(checkpoint, ())
            faults.append(fault)
        raise CheckpointDamaged(
            f"the checkpoint at step {wanted} of job {record.id} cannot be used: {faults[0]}",
            hint=f"take another: swarm checkpoints {record.id} --verify",
        )

    async def shown(self, record: JobRecord, spec: JobSpec, *, verify: bool) -> list[tuple[Checkpoint | Fault, str]]:
        """All checkpoints of a job, each with its fault or "": oldest first, then those without a readable manifest.

        With `verify` every byte is read. StorageError.

        NotAllowed for a second verification: they would take all threads that serve files.
        """

        def look() -> list[tuple[Checkpoint | Fault, str]]:
            storage = self.storage(spec, record.id)
            found, faults = list_checkpoints(storage, record.id)
            shown = [(checkpoint, fault_of(checkpoint, contents=verify)) for checkpoint in found]
            if any(fault for _, fault in shown):  # unless it was removed in order while it was read
                there = {checkpoint.name for checkpoint in list_checkpoints(storage, record.id)[0]}
                shown = [(checkpoint, fault) for checkpoint, fault in shown if checkpoint.name in there]
            return [*shown, *((fault, fault.reason) for fault in faults)]

        if not verify:
            return await run_blocking(self.executor, look)
        if self._verifying:
            raise NotAllowed("checkpoints are being verified already", hint="try again when that is done")
        self._verifying = True
        verifying = asyncio.ensure_future(run_blocking(self.executor, look))  # goes on if the caller hangs up
        verifying.add_done_callback(self._verified)
        return await asyncio.shield(verifying)

    def _verified(self, done: asyncio.Future[Any]) -> None:
        self._verifying = False
        if not done.cancelled():
            done.exception()  # the caller may have gone

    async def trainer_state(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Its trainer_state.json; CheckpointDamaged."""
        return await run_blocking(self.executor, checkpoint.trainer_state)

    async def to_pull(self, record: JobRecord, spec: JobSpec, which: str) -> Checkpoint:
        """The checkpoint whose model folder will be pulled; NotFound. Its files are checked as they are read."""

        def look() -> Checkpoint:
            found, _ = list_checkpoints(self.storage(spec, record.id), record.id)
            if which in ("", LATEST):
                whole = [saved for saved in found if checkpoint_counts(saved.timeline, saved.step, record.first_steps)]
            else:
                whole = [checkpoint for checkpoint in found if checkpoint.step == _step(which)]
            for checkpoint in reversed(whole):
                if not fault_of(checkpoint, contents=False):
                    return checkpoint
            if found:
                steps = ", ".join(str(checkpoint.step) for checkpoint in found)
                raise NotFound(
                    f"job {record.id} has no checkpoint {which or LATEST!r} that can be read; there are steps: {steps}",
                    hint=f"see what is wrong with: swarm checkpoints {record.id} --verify",
                )
            raise NotFound(
                f"job {record.id} has no weights to pull yet",
                hint=f"they are saved every checkpoint.every_steps and at the end: swarm status {record.id}",
            )

        return await run_blocking(self.executor, look)


def root_of(word: str) -> Path | str:
    """The folder or the URL of --checkpoint-root; UsageError."""
    try:
        folder = local_folder(word)
        if folder is None:
            url_parts(word)
    except InvalidConfig as error:
        raise UsageError(
            f'--checkpoint-root "{printable(without_passwords(word))[:200]}" is no folder and no URL', hint=error.hint
        ) from None
    return word if folder is None else folder.absolute()


# Folders of the data folder that a job may not name as the place of its checkpoints.
_OWN_ROOMS = ("jobs", "shards", "lock", "pki", "profiles")


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A checkpoint that came with a job: its files as blobs, each under its announced hash."""

    files: Mapping[str, Path]  # by path within the checkpoint
    where: str = "upload"

    def open(self, path: str) -> tuple[BinaryIO, int]:
        inside = path.partition("/")[2]
        if inside not in self.files:
            raise StorageError(f"{inside} was not sent along")
        try:
            return self.files[inside].open("rb"), self.files[inside].stat().st_size
        except OSError as error:
            raise StorageError(f"{inside}: {error.strerror or error}") from error


def uploaded_checkpoint(files: Sequence[StateFile], place: Callable[[str], Path]) -> Checkpoint | None:
    """The checkpoint among a job's files, if any; `place` finds a blob by its hash. CheckpointDamaged."""
    if MANIFEST not in {file.path for file in files}:
        return None
    held = Uploaded({file.path: place(file.sha256) for file in files})
    found = find(cast(Storage, held), "upload")
    announced = {file.path: (file.size_bytes, file.sha256) for file in files if file.path != MANIFEST}
    named = {
        file.path: (file.size_bytes, file.sha256)
        for file in found.files
        if file.path in announced or file.path.endswith(".safetensors")
    }
    if named != announced:
        odd = sorted(path for path in named.keys() | announced.keys() if named.get(path) != announced.get(path))
        raise CheckpointDamaged(
            f"the checkpoint that was sent along is not complete: {', '.join(odd[:5])}", hint="submit again"
        )
    return found


def job_and_step(text: str) -> tuple[str, str]:
    """The parts of "JOB:STEP"; InvalidConfig for anything else."""
    match = JOB_AND_STEP.match(text)
    if match is None:
        raise InvalidConfig(
            f'checkpoint.resume_from = "{text}" is neither a checkpoint that was sent along nor JOB:STEP',
            hint="give a folder on your machine, or a job of this scheduler and a step, such as demo-1a2b3c:500",
        )
    return match.group(1), match.group(2)


def same_model(start: JobSpec, spec: JobSpec, of: str) -> None:
    """Raise InvalidConfig if a job cannot start from the weights of another."""
    ours: Mapping[str, object] = {"model.family": spec.model.family, **spec.model.config}
    theirs: Mapping[str, object] = {"model.family": start.model.family, **start.model.config}
    for key in ("model.family", *sorted((ours.keys() | theirs.keys()) - {"model.family"})):
        if ours.get(key) != theirs.get(key):
            raise InvalidConfig(
                f"{key} = {ours.get(key)!r}, but {of} trained a model with {theirs.get(key)!r}",
                hint="use the same [model] section as that job",
            )
    check_places(start.model.narrow, spec, of)


def _step(text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise InvalidConfig(f'"{text}" is no step', hint='give "latest" or a number, such as 500')
    return int(text)
