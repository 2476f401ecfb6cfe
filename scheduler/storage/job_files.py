"""The files of jobs in the scheduler's folder: token shards, tokenizers, starting states."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from scheduler.storage.database import JobTokens
from scheduler.storage.executor import run_blocking
from scheduler.storage.state_files import CheckpointFiles, StateFiles
from swarm.checkpoint.reader import Checkpoint
from swarm.data.batches import Batches, TokenData
from swarm.errors import InvalidData
from swarm.job.spec import JobSpec
from swarm.messages import StateFile
from swarm.types import JobId


class JobFiles:
    """Everything in the folder that is not a checkpoint."""

    def __init__(self, root: Path, executor: ThreadPoolExecutor | None) -> None:
        self._root = root
        self._executor = executor

    async def remove_unfinished(self) -> None:
        """Delete files that a killed scheduler left half written."""
        await run_blocking(self._executor, lambda: _remove_unfinished(self._root))

    async def remove_unused(self, used: Set[str], before_unix_s: float) -> None:
        """Delete uploaded files that no job names and nobody asked for since then."""
        await run_blocking(self._executor, lambda: _remove_unused(self._root / "shards", used, before_unix_s))

    def shard(self, sha256: str) -> Path:
        """Where the token shard with this hash is, or would be."""
        return self._root / "shards" / f"{sha256}.bin"

    async def put_tokenizer(self, job: JobId, files: dict[str, bytes]) -> None:
        """Keep the job's tokenizer files, by name."""
        folder = self._tokenizer(job)
        await run_blocking(self._executor, lambda: _write_files(folder, files))

    async def tokenizer(self, job: JobId) -> dict[str, bytes]:
        """The job's tokenizer files, by name."""
        folder = self._tokenizer(job)
        return await run_blocking(self._executor, lambda: _read_files(folder))

    def state(self, files: Iterable[StateFile], start: Checkpoint | None) -> StateFiles | CheckpointFiles:
        """The starting state of a timeline: a checkpoint, or the files that came with the job."""
        return CheckpointFiles(start) if start else StateFiles({file: self.shard(file.sha256) for file in files})

    def batches(self, spec: JobSpec, tokens: JobTokens) -> Batches:
        """The job's data; InvalidData if a shard is not here."""
        missing = [sha256 for sha256 in tokens.shards if not self.shard(sha256).exists()]
        if missing:
            raise InvalidData(
                f"{len(missing)} of {len(tokens.shards)} token shards are not here", hint="submit again to upload them"
            )
        paths = [self.shard(sha256) for sha256 in tokens.shards]
        data = TokenData.open(paths, tokens.token_dtype, spec.model.config["vocab_size"])
        return Batches.of_job(spec, data, tokens.end_of_text)

    def _tokenizer(self, job: JobId) -> Path:
        return self._root / "jobs" / job / "tokenizer"


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _remove_unfinished(root: Path) -> None:
    for folder in root.glob("jobs/*/checkpoints/*.tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for part in root.glob("shards/*.part"):
        part.unlink(missing_ok=True)


def _remove_unused(folder: Path, used: Set[str], before_unix_s: float) -> None:
    for path in folder.glob("*.bin"):
        with suppress(OSError):
            if path.stem not in used and path.stat().st_mtime < before_unix_s:
                path.unlink()
