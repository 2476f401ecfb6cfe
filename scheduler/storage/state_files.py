"""The files or the checkpoint that a job starts from, served in parts to the stage servers that load it.

A path is looked up among the job's own files, never on the disk, so no path can lead elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from scheduler.storage.executor import run_blocking
from swarm.checkpoint.reader import Checkpoint, StoredFile
from swarm.errors import CheckpointDamaged, InvalidModel, NotFound, Refused, SwarmError
from swarm.hf.model_folder import FILES_MAX
from swarm.rpc.links.frames import CHUNK_BYTES
from swarm.wire.messages import FetchRequest, StateFile

AnyFile = TypeVar("AnyFile", StateFile, StoredFile)

_PATH = re.compile(
    r"^((model|outer|(islands/[0-9]{2}/)?optimizer)/[A-Za-z0-9][A-Za-z0-9_.-]{0,199}|manifest\.json|trainer_state\.json)$"
)


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The files of a starting state, as stage servers see them; `place` gives the path of a file by its hash."""

    listed: tuple[StateFile, ...]
    place: Callable[[str], Path]

    def read(self, request: FetchRequest, executor: ThreadPoolExecutor | None) -> AsyncGenerator[bytes, None]:
        """The requested bytes; NotFound if the job has no such file, Refused if it is shorter, InvalidModel."""
        file = _requested(self.listed, request)

        def failed(why: str) -> InvalidModel:
            return InvalidModel(f"{file.path} of job {request.job} {why}", hint="look at the scheduler's --data-dir")

        return _read(lambda: self.place(file.sha256).open("rb"), request, executor, failed)


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """A checkpoint's tensors, served in parts to the stage servers that start from them."""

    checkpoint: Checkpoint

    @property
    def listed(self) -> tuple[StateFile, ...]:
        """The list that a stage server gets."""
        return tuple(file for file in self.checkpoint.state_files() if file.path.endswith(".safetensors"))

    def read(self, request: FetchRequest, executor: ThreadPoolExecutor | None) -> AsyncGenerator[bytes, None]:
        """The requested bytes; NotFound, Refused, or CheckpointDamaged if they are gone."""
        file = _requested((stored for stored in self.checkpoint.files if stored.path.endswith(".safetensors")), request)

        def failed(why: str) -> CheckpointDamaged:
            return CheckpointDamaged(f"{file.path} of {self.checkpoint.name} {why}")

        return _read(lambda: self.checkpoint.open(file.path), request, executor, failed)


async def _read(
    opened: Callable[[], BinaryIO],
    request: FetchRequest,
    executor: ThreadPoolExecutor | None,
    failed: Callable[[str], SwarmError],
) -> AsyncGenerator[bytes, None]:
    """The requested bytes of a file; the error that `failed` makes of what is wrong with it."""
    try:
        file = await run_blocking(executor, opened)
        try:
            await run_blocking(executor, lambda: file.seek(request.start))
            left = request.stop - request.start
            while left:
                chunk = await run_blocking(executor, partial(file.read, min(CHUNK_BYTES, left)))
                if not chunk:
                    raise failed("ends early")
                left -= len(chunk)
                yield chunk
        finally:
            file.close()
    except OSError as error:
        raise failed(f"cannot be read: {error.strerror or error}") from error


def _requested(listed: Iterable[AnyFile], request: FetchRequest) -> AnyFile:
    found = next((file for file in listed if file.path == request.path), None)
    if found is None:
        raise NotFound(f"job {request.job} has no file {request.path[:200]!r}")
    if not 0 <= request.start <= request.stop <= found.size_bytes:
        raise Refused(f"{found.path} has {found.size_bytes} bytes, not bytes {request.start} to {request.stop}")
    return found


def check_uploaded(files: Iterable[StateFile], locations: Iterable[Path]) -> None:
    """Raise InvalidModel unless the paths form a starting state and every file is here at its full size."""
    seen: set[str] = set()
    for file, location in zip(files, locations, strict=True):
        if not _PATH.fullmatch(file.path) or file.path in seen:
            raise InvalidModel(f"{file.path[:200]!r} is no path of a model's file, or comes twice")
        seen.add(file.path)
        try:
            size_bytes = location.stat().st_size
        except OSError:
            raise InvalidModel(f"{file.path} is not here", hint="submit again to upload it") from None
        if size_bytes != file.size_bytes:
            raise InvalidModel(f"{file.path} has {size_bytes} bytes here, announced were {file.size_bytes}")
    if len(seen) > FILES_MAX:
        raise InvalidModel(f"a model has at most {FILES_MAX} files, not {len(seen)}")
