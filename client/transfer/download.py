"""Fetching a trained model. Every file is checked; the folder appears whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from client.connection import Scheduler
from client.records import Checkpoint, Job
from client.shell import Shell, bytes_bar, product
from client.transfer.model_card import model_card
from client.transfer.precision import Dtype, convert_folder
from swarm.checkpoint.storage import LATEST
from swarm.errors import CorruptFrame, InvalidConfig, InvalidModel, NotAllowed
from swarm.hf.model_folder import FILES_MAX, tensor_hashes, weights_sha256
from swarm.hf.placing import begin, is_free, put_in_place
from swarm.hf.safetensors_header import read_header
from swarm.wire import jobs_pb2 as pb
from swarm.wire.messages import ParameterHash

CARD = "README.md"
_AGAIN = "pull again; if it happens again, the checkpoint on the scheduler is damaged"


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model folder that has arrived, as it lies there: in the precision that was asked for."""

    path: Path
    files: int
    size_bytes: int
    weights_sha256: str


def download(
    shell: Shell,
    scheduler: Scheduler,
    job: Job,
    folder: Path,
    *,
    step: str = LATEST,
    dtype: Dtype = "keep",
    force: bool = False,
) -> Pulled:
    """Fetch the model of a job's checkpoint into `folder`; with `force` it may exist.

    NotAllowed if it exists without `force`, CorruptFrame if bytes changed on the way, InvalidConfig, InvalidModel.
    """
    _check_target(folder, force)
    final = job.weights_sha256 if step in (LATEST, str(job.steps)) else ""
    part = _begin(folder)
    try:
        _receive(shell, scheduler.pull(job.id, step, shell.say), part)
        sha256 = weights_sha256(_parameters(part))
        if final and sha256 != final:
            raise CorruptFrame(
                f"the weights of job {job.id} arrived with sha256 {sha256}, the scheduler names {final}", hint=_AGAIN
            )
        arrived = _arrived(scheduler.checkpoints(job.id), step, sha256)
        if dtype != "keep":
            convert_folder(part, dtype)
            sha256 = weights_sha256(_parameters(part))
        if job.spec_json and not (part / CARD).exists():
            (part / CARD).write_text(model_card(job, arrived, sha256, product()), encoding="utf-8")
        sizes = [path.stat().st_size for path in part.rglob("*") if path.is_file()]
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise _cannot_write(folder, error) from error
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    try:
        put_in_place(part, folder, replace=force)
    except (OSError, NotAllowed) as error:
        told = _cannot_write(folder, error) if isinstance(error, OSError) else error
        raise type(told)(told.message, hint=f"the model has arrived in {part}: move it with mv") from error
    return Pulled(folder.resolve(), len(sizes), sum(sizes), sha256)


def _arrived(checkpoints: Sequence[Checkpoint], step: str, sha256: str) -> Checkpoint:
    """The newest of the checkpoints with these weights, and of that step if one was named.

    One that has been removed since has the step that was named, and no loss; step 0: not known.
    """
    named = int(step) if step.isdecimal() else 0
    same = [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.weights_sha256 == sha256 and (not named or checkpoint.step == named)
    ]
    return same[-1] if same else Checkpoint(step=named)


def _check_target(folder: Path, force: bool) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise NotAllowed(f"{folder} exists and is no folder", hint="choose another DIR")
    try:
        takes = force or is_free(folder)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    if not takes:
        raise NotAllowed(f"{folder} exists already", hint="choose another DIR, or replace it with --force")


def _begin(folder: Path) -> Path:
    try:
        return begin(folder)
    except OSError as error:
        raise _cannot_write(folder, error) from None


def _cannot_write(folder: Path, error: OSError) -> InvalidConfig:
    return InvalidConfig(f"{folder} cannot be written: {error.strerror or error}", hint="choose another DIR")


def _receive(shell: Shell, chunks: Iterable[pb.FileChunk], part: Path) -> None:
    """Write the stream of files below `part`."""
    writer: _CheckedWriter | None = None
    seen: set[str] = set()
    total_bytes = 0
    try:
        with bytes_bar(shell, "pulling") as advance:
            for chunk in chunks:
                if chunk.HasField("header"):
                    if writer is not None:
                        writer.finish()
                    header = chunk.header
                    if header.path in seen or len(seen) >= FILES_MAX:
                        raise CorruptFrame(f"the scheduler sent {header.path!r} twice, or too many files", hint=_AGAIN)
                    seen.add(header.path)
                    writer = _CheckedWriter(part, header)
                if chunk.payload:
                    if writer is None:
                        raise CorruptFrame("the scheduler sent bytes that belong to no file", hint=_AGAIN)
                    writer.write(chunk.payload)
                    total_bytes += len(chunk.payload)
                    advance(total_bytes, None)
        if writer is not None:
            writer.finish()
    except OSError as error:
        raise InvalidConfig(
            f"the model cannot be written to {part.parent}: {error.strerror or error}", hint="choose another DIR"
        ) from error
    finally:
        if writer is not None:
            writer.close()
    if not seen:
        raise CorruptFrame("the scheduler sent no files", hint=_AGAIN)


class _CheckedWriter:
    """Writes one file and compares its size and sha256 with the header."""

    def __init__(self, part: Path, header: pb.FileHeader) -> None:
        self._header = header
        self._left = header.size_bytes
        self._digest = hashlib.sha256()
        path = part / _safe(header.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("xb")

    def write(self, payload: bytes) -> None:
        self._left -= len(payload)
        if self._left < 0:
            raise CorruptFrame(f"{self._header.path} is longer than announced", hint=_AGAIN)
        self._digest.update(payload)
        self._file.write(payload)

    def finish(self) -> None:
        if self._left or self._digest.hexdigest() != self._header.sha256:
            raise CorruptFrame(f"{self._header.path} did not arrive as it was sent", hint=_AGAIN)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()


def _safe(text: str) -> PurePosixPath:
    """A path that stays inside the folder, else CorruptFrame: the scheduler is not trusted."""
    path = PurePosixPath(text)
    parts = path.parts
    if not parts or path.is_absolute() or any(part in ("..", ".") or "\\" in part or "\0" in part for part in parts):
        raise CorruptFrame(f"the scheduler sent a file named {text!r}", hint="do not trust this scheduler")
    return path


def _parameters(folder: Path) -> Iterator[ParameterHash]:
    """The hash of every tensor in the safetensors files of a folder: the client has no torch to load them with."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors = read_header(path, path.name).values()
        except InvalidModel as error:
            raise CorruptFrame(f"{path.name} is not a safetensors file: {error.message}", hint=_AGAIN) from None
        with path.open("rb") as file:
            yield from tensor_hashes(file, tensors)
