"""Writing a checkpoint: files in any order, the manifest last; and removing old ones.

swarm.checkpoint.reader describes the layout.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from swarm.checkpoint.reader import FILE_PATH, FORMAT_VERSION, Checkpoint, StoredFile, fault_of, find, list_checkpoints
from swarm.checkpoint.storage import LATEST, MANIFEST, Sink, Storage
from swarm.errors import CheckpointFailed, StorageError
from swarm.hf import model_folder
from swarm.job.course import PLAIN
from swarm.job.outer_log import OUTER_LOG, Entry, written
from swarm.job.schedule import learning_rate
from swarm.job.spec import JobSpec
from swarm.types import JobId
from swarm.wire.messages import ParameterHash


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that the manifest and the trainer state record besides the files; times are seconds since the epoch."""

    job: str
    timeline: int
    step: int
    created_unix_s: float
    product: str
    loss: float
    tokens: int  # of all steps up to here
    optimizer: bool  # whether its state was written
    outer_log: tuple[Entry, ...] = ()  # of islands, if chance had a say


class CheckpointWriter:
    """Writes one checkpoint: files in any order, each from any thread, then `publish`. CheckpointFailed."""

    def __init__(self, storage: Storage, spec: JobSpec, step: int, tag: str) -> None:
        self._storage = storage
        self._spec = spec
        self._step = step
        self._files: dict[str, StoredFile] = {}
        self._is_published = False
        with _writing(step):
            self.name = _free_name(storage, step)
            self._draft = storage.begin(self.name, tag)

    def create(self, path: str) -> FileWriter:
        """Begin a file, `path` as in a checkpoint."""
        assert FILE_PATH.match(path), path
        with _writing(self._step):
            return FileWriter(self, path, self._draft.create(path))

    def put(self, path: str, content: bytes) -> StoredFile:
        writer = self.create(path)
        try:
            writer.write(content)
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def publish(
        self, facts: Facts, parameters: Mapping[int, Sequence[ParameterHash]], tokenizer_files: Mapping[str, bytes]
    ) -> Checkpoint:
        """Complete it, unless this timeline has an equal one, and make it the newest; `parameters` are by stage."""
        assert facts.step == self._step
        stages = len(parameters)
        shards = {model_folder.shard_name(stage, stages): parameters[stage] for stage in sorted(parameters)}
        missing = [name for name in shards if f"model/{name}" not in self._files]
        if missing:
            raise CheckpointFailed(f"stages were not stored: {', '.join(missing)}", reason="peer")
        small = {**model_folder.model_folder_files(self._spec), **tokenizer_files}
        if stages > 1:
            small[model_folder.INDEX_NAME] = model_folder.safetensors_index(shards)
        if facts.outer_log:
            small[OUTER_LOG] = written(facts.outer_log)
        for name, content in small.items():
            self.put(f"model/{name}", content)
        self.put("trainer_state.json", json_bytes(_trainer_state(self._spec, facts)))
        sha256 = model_folder.weights_sha256(hash_ for stage in parameters.values() for hash_ in stage)
        files = tuple(self._files[path] for path in sorted(self._files))
        with _writing(self._step):
            if (known := self._equal(facts, sha256)) is not None:
                self._draft.discard()
                self._storage.point(known.name)
                return known
            self._is_published = True
            self._draft.publish(json_bytes(_manifest(self._spec, facts, sha256, files)))
            self._storage.point(self.name)
        return find(self._storage, self.name)

    def hashes(self) -> dict[str, str]:
        """sha256 of each file that is whole so far, by path."""
        return {path: file.sha256 for path, file in self._files.items()}

    def discard(self) -> None:
        self._draft.discard()

    def withdraw(self) -> None:
        """Remove it, however far it got; `latest` names the one before, or goes if there is none. StorageError."""
        self._draft.discard()
        if self._is_published:
            if self.name in self._storage.names():
                self._storage.remove(self.name)
            if left := list_checkpoints(self._storage)[0]:
                self._storage.point(left[-1].name)
            elif LATEST in self._storage.names():
                self._storage.remove(LATEST)

    def written(self, file: StoredFile) -> None:
        self._files[file.path] = file

    def _equal(self, facts: Facts, sha256: str) -> Checkpoint | None:
        for known in list_checkpoints(self._storage, JobId(facts.job))[0]:
            same = (known.step, known.timeline, known.weights_sha256) == (facts.step, facts.timeline, sha256)
            if same and bool(known.optimizer) == facts.optimizer and not fault_of(known):
                return known
        return None


class FileWriter:
    """One file on its way into a checkpoint."""

    def __init__(self, writer: CheckpointWriter, path: str, sink: Sink) -> None:
        self._writer = writer
        self._path = path
        self._sink = sink
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    def write(self, content: bytes) -> None:
        with _writing(self._writer._step):
            self._digest.update(content)
            self._size_bytes += len(content)
            self._sink.write(content)

    @property
    def size_bytes(self) -> int:
        """What was written until now."""
        return self._size_bytes

    def finish(self) -> StoredFile:
        """Make it durable; gives its size and hash."""
        with _writing(self._writer._step):
            self._sink.finish()
        stored = StoredFile(self._path, self._size_bytes, self._digest.hexdigest())
        self._writer.written(stored)
        return stored

    def pause(self) -> None:
        """More may come, or not."""
        self._sink.pause()

    def abort(self) -> None:
        self._sink.abort()


def prune(
    storage: Storage,
    job: JobId,
    proven: Checkpoint,
    *,
    keep_last: int,
    keep_every_steps: int = 0,
    protected: Collection[str] = (),
) -> list[str]:
    """Remove old checkpoints; gives the names of those removed.

    `proven` was read back and is whole; nothing newer than it is removed. The newest `keep_last` that look whole
    (including `proven`), steps that are multiples of `keep_every_steps` (0: none) and the names in `protected` are
    kept. Older folders that are not valid checkpoints are removed too.
    """
    checkpoints, faults = list_checkpoints(storage, job)
    removed = []
    kept = 0
    for listed in reversed(checkpoints):
        if listed.order > proven.order:
            continue
        if listed.name == proven.name:
            kept += 1
        elif kept < keep_last:
            kept += not fault_of(listed, contents=False)
        elif listed.name not in protected and not (keep_every_steps and listed.step % keep_every_steps == 0):
            storage.remove(listed.name)
            removed.append(listed.name)
    for fault in faults:
        if fault.step < proven.step and fault.name not in protected and not _has_manifest(storage, fault.name):
            storage.remove(fault.name)
            removed.append(fault.name)
    return removed


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """JSON as our files have it: sorted, indented, no NaN."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _has_manifest(storage: Storage, name: str) -> bool:
    try:
        storage.open(f"{name}/{MANIFEST}")[0].close()
    except StorageError as error:
        return not isinstance(error.__cause__, FileNotFoundError)
    return True


def _free_name(storage: Storage, step: int) -> str:
    taken = set(storage.names())
    name, attempt = f"step-{step:08d}", 0
    while name in taken:
        attempt += 1
        name = f"step-{step:08d}.{attempt}"
    return name


def _trainer_state(spec: JobSpec, facts: Facts) -> dict[str, Any]:
    training, following = spec.training, PLAIN.at(facts.step)
    islands = {"count": spec.island_count, "mode": spec.averaging.mode, "every_steps": spec.outer.every_steps}
    return {
        "step": facts.step,
        "timeline": facts.timeline,
        "loss": facts.loss if math.isfinite(facts.loss) else None,
        "schedule": {
            "kind": training.schedule,
            "steps": training.steps,
            "warmup_steps": training.warmup_steps,
            "next_learning_rate": learning_rate(training, following.rate_step),
        },
        "data": {
            "next_step": facts.step,
            "sequences": following.portion * training.global_batch_sequences,
            "global_batch_sequences": training.global_batch_sequences,
            "sequence_length": spec.data.sequence_length,
            "shuffle": spec.data.shuffle,
            "validation_ratio": spec.data.validation_ratio,
        },
        "seeds": {"training": training.seed},
        "totals": {"tokens": facts.tokens, "microbatches": facts.step * training.microbatches},
        "optimizer": {"name": training.optimizer, "state": facts.optimizer, "staleness": spec.pipeline.staleness},
        "overlap": {"microbatches": spec.overlap, "sync_steps": spec.sync_steps, "lookahead": training.lookahead},
        **({"islands": islands} if spec.has_outer_steps else {}),
        **({"narrow": spec.model.narrow.model_dump()} if spec.places else {}),
    }


def _manifest(spec: JobSpec, facts: Facts, sha256: str, files: Sequence[StoredFile]) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "job": facts.job,
        "timeline": facts.timeline,
        "step": facts.step,
        "created_unix_s": facts.created_unix_s,
        "product": facts.product,
        "model": {"family": spec.model.family, "id": spec.model.id, "commit": spec.model.revision},
        "dtypes": {"weights": "float32", "optimizer": "float32", "compute": spec.model.dtype},
        "tied": spec.tied,
        "staleness": spec.pipeline.staleness,
        "optimizer": spec.training.optimizer if facts.optimizer else "",
        "loss": facts.loss if math.isfinite(facts.loss) else None,
        "tokens": facts.tokens,
        "weights_sha256": sha256,
        "files": [{"path": file.path, "bytes": file.size_bytes, "sha256": file.sha256} for file in files],
    }


@contextmanager
def _writing(step: int) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise CheckpointFailed(
            f"the checkpoint at step {step} could not be written: {error.message}",
            hint=error.hint,
            reason=error.reason,
        ) from error
