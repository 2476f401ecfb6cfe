"""The files of jobs in the scheduler's folder: token shards, tokenizers, starting states.

shards/HASH.bin              sent over plaintext, or to a scheduler of before people had folders of their own
shards/ROLE/NAME/HASH.bin    sent by a person, who does not find what others sent
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from scheduler.storage.executor import run_blocking
from scheduler.storage.job_record import JobRecord, JobTokens
from scheduler.storage.state_files import CheckpointFiles, StateFiles
from scheduler.storage.trees import remove_tree, tree_bytes
from swarm.checkpoint.reader import Checkpoint
from swarm.data.batches import Batches, TokenData
from swarm.errors import InvalidData
from swarm.job.spec import JobSpec
from swarm.limits import UPLOADED_BYTES_MIN
from swarm.types import JobId

COUNTED_MAX = 4096  # data sets whose validation tokens are remembered


@dataclass(frozen=True, slots=True)
class HeldFiles:
    """Uploaded files by owner: their bytes, what they count as, how many they are."""

    bytes: Counter[str] = field(default_factory=Counter)
    counted_bytes: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)

    def add(self, owner: str, size_bytes: int) -> None:
        """The owner has a file more, which counts as UPLOADED_BYTES_MIN at least."""
        self.bytes[owner] += size_bytes
        self.counted_bytes[owner] += max(size_bytes, UPLOADED_BYTES_MIN)
        self.files[owner] += 1

    def without(self, freed: HeldFiles) -> HeldFiles:
        """What is left after these files went."""
        return HeldFiles(self.bytes - freed.bytes, self.counted_bytes - freed.counted_bytes, self.files - freed.files)


class JobFiles:
    """Everything in the folder that is not a checkpoint."""

    def __init__(self, root: Path, executor: ThreadPoolExecutor | None) -> None:
        self._root = root
        self._shards = root / "shards"
        self._jobs = root / "jobs"
        self._executor = executor
        self._held = HeldFiles()
        self._shared: Set[str] = frozenset()  # hashes of files that every person finds
        self._validation_tokens: OrderedDict[tuple[object, ...], int] = OrderedDict()  # by data set

    async def load(self) -> None:
        """Delete files that a killed scheduler left half written, and count what each person holds."""
        await run_blocking(self._executor, lambda: _remove_unfinished(self._root))
        self._held = await run_blocking(self._executor, lambda: _sizes(self._shards))
        self._shared = await run_blocking(self._executor, lambda: _shared(self._shards))

    async def remove_unused(
        self, used: Set[Path], before_unix_s: float, since: Mapping[Path, float] | None = None, *, dry_run: bool = False
    ) -> Counter[str]:
        """Delete uploaded files that no job names and that were not asked for since then; or files in `since`, by their
        times.

        Returns the freed bytes by owner; with `dry_run` the bytes that would be freed.
        """
        freed = await run_blocking(
            self._executor, lambda: _remove_unused(self._shards, used, before_unix_s, since, dry_run=dry_run)
        )
        if not dry_run:
            self._held = self._held.without(freed)
            self._shared = await run_blocking(self._executor, lambda: _shared(self._shards))
        return freed.bytes

    async def named_by(self, records: Sequence[JobRecord]) -> set[Path]:
        """The uploaded files that the jobs have to do with; of one job these may be 14,000."""

        def named() -> set[Path]:
            hashes = {
                (record.owner, sha256)
                for record in records
                for sha256 in (*record.tokens.shards, *(file.sha256 for file in record.files))
            }
            return {self.shard(owner, sha256) for owner, sha256 in hashes}

        return await run_blocking(self._executor, named)

    async def remove_job(self, job: JobId) -> int:
        """Remove the job's folder: its log, tokenizer, and checkpoints that are kept here; the bytes. StorageError."""
        return await run_blocking(self._executor, lambda: remove_tree(self._jobs, job))

    async def job_bytes(self, job: JobId) -> int:
        """The size of the job's folder. StorageError."""
        return await run_blocking(self._executor, lambda: tree_bytes(self._jobs, job))

    async def strays(self, known: Set[str], before_unix_s: float) -> list[tuple[str, int]]:
        """Folders of no known job that were not touched since then, and their bytes. StorageError."""
        return await run_blocking(self._executor, lambda: _strays(self._jobs, known, before_unix_s))

    def shard(self, owner: str, sha256: str) -> Path:
        """Where the file with this hash is that the owner sent, or would be.

        A person does not find what others sent, so knows nothing of their files, and starts no job from their weights.
        """
        folder = self._shards if sha256 in self._shared else self._shards / owner
        return folder / f"{sha256}.bin"

    def took(self, owner: str, size_bytes: int) -> None:
        """The owner has a file more."""
        self._held.add(owner, size_bytes)

    def held_bytes(self, owner: str) -> int:
        """The size of all files that the owner has sent and that are still here."""
        return self._held.bytes[owner]

    def taken_by(self, owner: str) -> tuple[int, int]:
        """How many these files are, and the bytes that they count as towards the owner's half of the disk."""
        return self._held.files[owner], self._held.counted_bytes[owner]

    async def put_tokenizer(self, job: JobId, files: dict[str, bytes]) -> None:
        """Keep the job's tokenizer files, by name."""
        folder = self._tokenizer(job)
        await run_blocking(self._executor, lambda: _write_files(folder, files))

    async def tokenizer(self, job: JobId) -> dict[str, bytes]:
        """The job's tokenizer files, by name."""
        folder = self._tokenizer(job)
        return await run_blocking(self._executor, lambda: _read_files(folder))

    def state(self, job: JobRecord, start: Checkpoint | None) -> StateFiles | CheckpointFiles:
        """The starting state of a timeline: a checkpoint, or the files that came with the job."""
        if start:
            return CheckpointFiles(start)
        return StateFiles(job.files, partial(self.shard, job.owner))

    def batches(self, spec: JobSpec, tokens: JobTokens, owner: str) -> Batches:
        """The job's data; InvalidData if a shard is not here."""
        paths = [self.shard(owner, sha256) for sha256 in tokens.shards]
        missing = [path for path in paths if not path.exists()]
        if missing:
            raise InvalidData(
                f"{len(missing)} of {len(tokens.shards)} token shards are not here", hint="submit again to upload them"
            )
        data = TokenData.open(paths, tokens.token_dtype, spec.model.config["vocab_size"])
        batches = Batches.of_job(spec, data, tokens.end_of_text)
        if (known := self._validation_tokens.get(_data_set(spec, tokens))) is not None:
            batches.evaluation_tokens = known
        return batches

    def counted(self, spec: JobSpec, tokens: JobTokens, owner: str) -> Batches:
        """As `batches`, with its validation tokens counted and remembered. It reads them all: not on the event loop."""
        batches = self.batches(spec, tokens, owner)
        self._validation_tokens[_data_set(spec, tokens)] = batches.evaluation_tokens
        if len(self._validation_tokens) > COUNTED_MAX:
            self._validation_tokens.popitem(last=False)
        return batches

    async def opened(self, spec: JobSpec, tokens: JobTokens, owner: str) -> Batches:
        """As `batches`, on a thread: 4,096 shards take a sixth of a second."""
        return await run_blocking(self._executor, lambda: self.batches(spec, tokens, owner))

    async def reopened(self, record: JobRecord, spec: JobSpec) -> Batches:
        """The data of a job that an earlier scheduler start accepted, counted."""
        return await run_blocking(self._executor, lambda: self.counted(spec, record.tokens, record.owner))

    def _tokenizer(self, job: JobId) -> Path:
        return self._jobs / job / "tokenizer"


def _data_set(spec: JobSpec, tokens: JobTokens) -> tuple[object, ...]:
    """What the number of validation tokens depends on."""
    section = spec.data
    return (tokens.shards, tokens.end_of_text, section.sequence_length, section.validation_ratio)


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _remove_unfinished(root: Path) -> None:
    for folder in root.glob("jobs/*/checkpoints/*.tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for pattern in ("shards/*.part", "shards/*/*.part", "shards/*/*/*.part"):
        for part in root.glob(pattern):
            part.unlink(missing_ok=True)


def _shared(folder: Path) -> frozenset[str]:
    """The hashes of the files that are in no person's folder."""
    return frozenset(path.stem for path in folder.glob("*.bin"))


def _uploaded(folder: Path) -> Iterator[tuple[str, Path]]:
    """(owner, file) of all that was uploaded."""
    for pattern in ("*.bin", "*/*/*.bin"):
        for path in folder.glob(pattern):
            yield "" if path.parent == folder else str(path.parent.relative_to(folder)), path


def _sizes(folder: Path) -> HeldFiles:
    found = HeldFiles()
    for owner, path in _uploaded(folder):
        with suppress(OSError):
            found.add(owner, path.stat().st_size)
    return found


def _remove_unused(
    folder: Path, used: Set[Path], before_unix_s: float, since: Mapping[Path, float] | None, *, dry_run: bool
) -> HeldFiles:
    """What was freed."""
    freed = HeldFiles()
    for owner, path in _uploaded(folder):
        least_s = before_unix_s if since is None else since.get(path, 0.0)
        if path in used:
            continue
        with suppress(OSError):
            known = path.stat()
            if known.st_mtime < least_s:
                if not dry_run:
                    path.unlink()
                freed.add(owner, known.st_size)
    return freed


def _strays(folder: Path, known: Set[str], before_unix_s: float) -> list[tuple[str, int]]:
    found = []
    with suppress(FileNotFoundError):
        for entry in sorted(os.scandir(folder), key=lambda one: one.name):
            if entry.name in known or not entry.is_dir(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_mtime < before_unix_s:
                found.append((entry.name, tree_bytes(folder, entry.name)))
    return found
