"""A job's weights on disk: complete or absent.

    step-00000120.tmp-…/model/…   every file written, fsynced and hashed
    step-00000120.tmp-…/manifest.json, fsync        the mark that it is complete
    rename to step-00000120, fsync the parent, move `latest`

A folder without a manifest is no checkpoint; nothing reads a temporary folder. The layout is that of a Hugging Face
folder under model/, one safetensors file per stage, whole as the stage server sent it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from scheduler.blocking import run_blocking
from swarm.config import JobSpec
from swarm.errors import CorruptFrame, NotFound, SwarmError
from swarm.messages import ParameterHash, StoreHeader
from swarm.types import JobId
from swarm.weights import INDEX_NAME, model_folder_files, safetensors_index, shard_name, weights_sha256

FORMAT_VERSION = 1
READ_BYTES = 1 << 20


class CheckpointFailed(SwarmError):
    """A checkpoint could not be written; the last good one is untouched."""

    code = "E1500"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint, relative to its folder."""

    path: str
    size_bytes: int
    sha256: str


class CheckpointFolder:
    """Collects the stages of one version of a job's weights and publishes them together."""

    def __init__(
        self, root: Path, job: JobId, spec: JobSpec, timeline: int, version: int, executor: ThreadPoolExecutor | None
    ) -> None:
        self._root = root
        self._job = job
        self._spec = spec
        self.timeline = timeline
        self.version = version
        self._executor = executor
        self._temporary = root / f"step-{version:08d}.tmp-{timeline}"
        self._files: dict[str, StoredFile] = {}

    async def begin(self) -> None:
        """Make room; what an interrupted attempt left is removed."""

        def make() -> None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            (self._temporary / "model").mkdir(parents=True)

        await self._guard(make)

    async def put_stage(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        """Write one stage's safetensors bytes; gives their sha256. Storing a stage again replaces it."""
        assert self._spec.pipeline.split != "auto"
        name = f"model/{shard_name(header.stage, len(self._spec.pipeline.split))}"
        path = self._temporary / name
        digest = hashlib.sha256()
        size_bytes = 0
        file = await self._guard(lambda: path.open("wb"))
        try:
            async for chunk in chunks:
                digest.update(chunk)
                size_bytes += len(chunk)
                await self._guard(lambda chunk=chunk: file.write(chunk))
            await self._guard(lambda: _sync(file))
        finally:
            file.close()
        if size_bytes != header.total_bytes:
            raise CorruptFrame(f"stage {header.stage} announced {header.total_bytes} bytes and sent {size_bytes}")
        self._files[name] = StoredFile(name, size_bytes, digest.hexdigest())
        return digest.hexdigest()

    async def publish(
        self,
        parameters: Mapping[int, tuple[ParameterHash, ...]],
        tokenizer_files: Mapping[str, bytes],
        facts: Mapping[str, Any],
    ) -> str:
        """Complete the folder and make it the job's newest checkpoint; gives the sha256 of the weights.

        `parameters` are the hashes per stage that the stage servers reported.
        """
        stages = len(parameters)
        files = {shard_name(stage, stages): parameters[stage] for stage in sorted(parameters)}
        missing = [name for name in files if f"model/{name}" not in self._files]
        if missing:
            raise CheckpointFailed(f"stages were not stored: {', '.join(missing)}")
        small = {**model_folder_files(self._spec), **tokenizer_files}
        if stages > 1:
            small[INDEX_NAME] = safetensors_index(files)
        sha256 = weights_sha256(hash_ for stage in parameters.values() for hash_ in stage)

        def write() -> None:
            for name, content in small.items():
                _write_synced(self._temporary / "model" / name, content)
                path = f"model/{name}"
                self._files[path] = StoredFile(path, len(content), hashlib.sha256(content).hexdigest())
            manifest = {
                "format": FORMAT_VERSION,
                "job": self._job,
                "timeline": self.timeline,
                "step": self.version,
                "weights_sha256": sha256,
                "tied": self._spec.tied,
                "files": [
                    {"path": file.path, "bytes": file.size_bytes, "sha256": file.sha256}
                    for file in sorted(self._files.values(), key=lambda file: file.path)
                ],
                **facts,
            }
            _sync_folder(self._temporary / "model")
            _write_synced(self._temporary / "manifest.json", _json(manifest))
            _sync_folder(self._temporary)
            final = self._root / f"step-{self.version:08d}"
            shutil.rmtree(final, ignore_errors=True)
            self._temporary.rename(final)
            _sync_folder(self._root)
            _write_synced(self._root / "latest.tmp", f"{final.name}\n".encode())
            (self._root / "latest.tmp").replace(self._root / "latest")
            _sync_folder(self._root)

        await self._guard(write)
        return sha256

    async def discard(self) -> None:
        """Remove what was collected."""
        await run_blocking(self._executor, lambda: shutil.rmtree(self._temporary, ignore_errors=True))

    async def _guard(self, work: Any) -> Any:
        try:
            return await run_blocking(self._executor, work)
        except OSError as error:
            raise CheckpointFailed(
                f"checkpoint of job {self._job} at step {self.version} could not be written: {error}",
                hint="free disk space in the scheduler's --data-dir, or make it writable",
            ) from error


def newest_model(root: Path, job: JobId) -> tuple[str, list[StoredFile]]:
    """Weights hash and files (paths relative to `root`) of the newest complete checkpoint's model folder.

    NotFound if the job has none.
    """
    try:
        name = (root / "latest").read_text().strip()
        manifest = json.loads((root / name / "manifest.json").read_text())
    except (OSError, ValueError):
        raise NotFound(
            f"job {job} has no weights to pull yet", hint=f"weights are saved when the job ends: swarm status {job}"
        ) from None
    files = [
        StoredFile(f"{name}/{entry['path']}", entry["bytes"], entry["sha256"])
        for entry in manifest["files"]
        if entry["path"].startswith("model/")
    ]
    return manifest["weights_sha256"], files


def read_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file in pieces of READ_BYTES."""
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            yield chunk


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
