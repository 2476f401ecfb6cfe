"""Reads checkpoints. A checkpoint is complete or absent, and any number of stages can go on from it.

    latest                      name of the newest one, for other programs; ours read the manifests
    step-00000500/
      model/                    a Hugging Face folder: config.json, tokenizer, model-00001-of-00003.safetensors, index
      optimizer/                embed, layer-0000 …, head .safetensors: "<parameter>@<state>"; with staleness 1 also
                                "<parameter>@previous", the weights of one version before
      islands/01/optimizer/     of a job with islands, those of the others (swarm/checkpoint/reader.py)
      outer/                    "<parameter>@momentum" of outer steps; model/ has the outer weights then
      trainer_state.json        step, timeline, schedule, data position, seeds, totals, loss, narrow places
      manifest.json             last: size and sha256 of every file that belongs to it

Nothing is keyed by stage. A step whose name is taken by another attempt (an earlier timeline's, or one that broke off)
is written beside it as step-00000500.1: a good checkpoint is never touched while it is the newest. Checkpoints are
ordered by (timeline, step): a resume raises the timeline, so every checkpoint after it is newer, whatever its step.

No torch: the scheduler and the one-process reference share this package.

Decision: docs/decisions/069.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, TypeVar

from swarm.checkpoint.storage import MANIFEST, LocalStorage, Storage
from swarm.errors import CheckpointDamaged, NotFound, StorageError, SwarmError
from swarm.hf.model_folder import INDEX_NAME, tensor_hashes, weights_sha256
from swarm.hf.safetensors_header import LENGTH_BYTES, header_bytes, parse_header
from swarm.limits import MANIFEST_BYTES_MAX
from swarm.long_json import read_long
from swarm.types import JobId
from swarm.wire.messages import ParameterHash, StateFile

FORMAT_VERSION = 1
INDEX_BYTES_MAX = 8 << 20
PART_HEADER_BYTES_MAX = 128 << 10  # of a file with the state of one layer: there are thousands of such files
FILES_MAX = 100_000
READ_BYTES = 1 << 20
STATE_MARK = "@"

_NAME = re.compile(r"^step-(\d{8,12})(?:\.(\d{1,6}))?$")
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}"
FILE_PATH = re.compile(rf"^{_PART}(?:/{_PART}){{0,3}}$")
_SHA256 = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True)
class StoredFile:
    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with a valid manifest; `fault_of` tells whether its files still match."""

    storage: Storage
    name: str
    job: str
    timeline: int
    step: int
    created_unix_s: float
    weights_sha256: str
    loss: float  # NaN if not known
    optimizer: str  # whose state it holds; empty = weights only
    staleness: int
    files: tuple[StoredFile, ...]

    @property
    def size_bytes(self) -> int:
        """All files but the manifest."""
        return sum(file.size_bytes for file in self.files)

    @property
    def order(self) -> tuple[int, int, str]:
        """Newer is greater."""
        return self.timeline, self.step, self.name

    def open(self, path: str) -> BinaryIO:
        """A file of it for reading; NotFound if it has no such file, CheckpointDamaged if the file is unreadable."""
        stored = next((file for file in self.files if file.path == path), None)
        if stored is None:
            raise NotFound(f"checkpoint {self.name} has no file {path!r}")
        try:
            file, size_bytes = self.storage.open(f"{self.name}/{path}")
        except StorageError as error:
            raise CheckpointDamaged(f"{self.name}: {error.message}", hint=_DAMAGED_HINT) from error
        if size_bytes != stored.size_bytes:
            file.close()
            raise CheckpointDamaged(
                f"{self.name}/{path} has {size_bytes} bytes instead of {stored.size_bytes}", hint=_DAMAGED_HINT
            )
        return file

    def chunks(self, path: str, start: int = 0) -> Iterator[bytes]:
        """The bytes of a file from `start` on."""
        with self.open(path) as file:
            if start:
                file.seek(start)
            while chunk := file.read(READ_BYTES):
                yield chunk

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file; CheckpointDamaged if it does not have them."""
        with self.open(path) as file:
            file.seek(start)
            content = file.read(stop - start)
        if len(content) != stop - start:
            raise CheckpointDamaged(f"{self.name}/{path} ends before byte {stop}", hint=_DAMAGED_HINT)
        return content

    def state_files(self) -> tuple[StateFile, ...]:
        """Its files in the form in which LoadStage lists them."""
        return tuple(StateFile(file.path, file.size_bytes, file.sha256) for file in self.files)

    def trainer_state(self) -> dict[str, Any]:
        """Its trainer_state.json; CheckpointDamaged if it has none that can be read."""
        try:
            with self.open("trainer_state.json") as file:
                values = read_long(file.read(MANIFEST_BYTES_MAX))
        except (ValueError, RecursionError, OSError, NotFound) as error:
            raise CheckpointDamaged(f"{self.name}/trainer_state.json: {error}", hint=_DAMAGED_HINT) from error
        if not isinstance(values, dict):
            raise CheckpointDamaged(f"{self.name}/trainer_state.json is no object", hint=_DAMAGED_HINT)
        return values


@dataclass(frozen=True, slots=True)
class Fault:
    """A folder that is named like a checkpoint but is not a valid one; `step` is taken from its name."""

    name: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The newest checkpoint that verifies, if there is one, and the newer ones that did not."""

    checkpoint: Checkpoint | None
    skipped: tuple[Fault, ...]

    def skipped_text(self) -> str:
        """The skipped checkpoints with their faults, for a person; empty if none."""
        return "; ".join(f"{fault.name} was skipped: {fault.reason}" for fault in self.skipped)


_DAMAGED_HINT = "use an earlier one; list them with: swarm checkpoints JOB --verify"


def list_checkpoints(storage: Storage, job: JobId | None = None) -> tuple[list[Checkpoint], list[Fault]]:
    """Valid checkpoints, oldest first, and the folders without a valid manifest. Raises StorageError.

    With `job`, a checkpoint of another job is a fault. File contents are not read: see `fault_of`.
    """
    found, faults = [], []
    for name in storage.names():
        match = _NAME.match(name)
        if match is None:
            continue
        try:
            found.append(_read_manifest(storage, name, job))
        except CheckpointDamaged as error:
            faults.append(Fault(name, int(match.group(1)), error.message))
    return sorted(found, key=lambda checkpoint: checkpoint.order), faults


def fault_of(checkpoint: Checkpoint, *, contents: bool = True, progress: Callable[[], None] = lambda: None) -> str:
    """The fault in a checkpoint's files; empty if there is none.

    Sizes and the step are always compared; with `contents` also headers, the index, and the sha256 of every file and of
    the weights as a whole. `progress` is called after every few megabytes.
    """
    try:
        _check(checkpoint, contents, progress)
    except SwarmError as error:
        return error.message
    except (OSError, ValueError) as error:
        return f"{checkpoint.name}: {error}"
    return ""


def newest(storage: Storage, job: JobId | None = None, accept: Callable[[Checkpoint], bool] = lambda _: True) -> Found:
    """The newest checkpoint that `accept`s and verifies, every byte read; StorageError if the root is unreadable."""
    checkpoints, faults = list_checkpoints(storage, job)
    skipped: list[Fault] = []
    for checkpoint in filter(accept, reversed(checkpoints)):
        reason = fault_of(checkpoint)
        if not reason:
            # A folder without a manifest tells no timeline; by its step it may have been meant to be newer.
            skipped += [fault for fault in faults if fault.step >= checkpoint.step]
            return Found(checkpoint, tuple(skipped))
        skipped.append(Fault(checkpoint.name, checkpoint.step, reason))
    return Found(None, tuple(skipped + faults))


def find(storage: Storage, name: str) -> Checkpoint:
    """The checkpoint with this folder's name, by its manifest; CheckpointDamaged if there is none."""
    return _read_manifest(storage, name, None)


def open_folder(path: Path, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint in a folder on this machine: a step-… folder, or the newest that verifies in a folder of them.

    Newer ones that do not verify are told to `say`. NotFound if there is none, CheckpointDamaged if it cannot be used.
    """
    path = path.absolute()
    if (path / MANIFEST).exists():
        checkpoint = _read_manifest(LocalStorage(path.parent), path.name, None)
        if reason := fault_of(checkpoint):
            raise CheckpointDamaged(f"the checkpoint in {path} cannot be used: {reason}", hint="use an earlier one")
        return checkpoint
    found = newest(LocalStorage(path))
    if found.checkpoint is not None:
        if found.skipped:
            say(found.skipped_text())
        return found.checkpoint
    if found.skipped:
        raise CheckpointDamaged(f"no checkpoint in {path} can be used: {found.skipped_text()}")
    raise NotFound(
        f"there is no checkpoint in {path}", hint=f"give a folder with a {MANIFEST}, or one that holds step-… folders"
    )


def _read_manifest(storage: Storage, name: str, job: JobId | None) -> Checkpoint:
    try:
        file, size_bytes = storage.open(f"{name}/{MANIFEST}")
    except StorageError as error:
        raise CheckpointDamaged(f"{name} has no manifest that can be read: {error.message}") from error
    try:
        with file:
            if size_bytes > MANIFEST_BYTES_MAX:
                raise ValueError(f"its manifest has {size_bytes} bytes")
            values = read_long(file.read(MANIFEST_BYTES_MAX))
        checkpoint = _checkpoint(storage, name, values)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, OverflowError, RecursionError) as error:
        detail = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointDamaged(f"{name}: the manifest cannot be used: {detail}") from None
    if job is not None and checkpoint.job != job:
        raise CheckpointDamaged(f"{name} belongs to job {checkpoint.job!r}")
    match = _NAME.match(name)
    if match is not None and int(match.group(1)) != checkpoint.step:
        raise CheckpointDamaged(f"{name}: its manifest says step {checkpoint.step}")
    return checkpoint


def _checkpoint(storage: Storage, name: str, values: dict[str, Any]) -> Checkpoint:
    version = values["format"]
    if version != FORMAT_VERSION:
        raise ValueError(f"its format is {version!r}, this swarm reads {FORMAT_VERSION}; use a newer swarm")
    files = tuple(StoredFile(entry["path"], entry["bytes"], entry["sha256"]) for entry in values["files"])
    for file in files:
        if not isinstance(file.path, str) or not FILE_PATH.match(file.path) or ".." in PurePosixPath(file.path).parts:
            raise ValueError(f"{file.path!r} is no path of a checkpoint's file")
        if not isinstance(file.sha256, str) or not _SHA256.match(file.sha256) or not _is_count(file.size_bytes):
            raise ValueError(f"the entry of {file.path} is malformed")
    if len({file.path for file in files}) != len(files) or len(files) > FILES_MAX:
        raise ValueError("it names a file twice, or too many")
    if MANIFEST in {file.path for file in files} or "model/config.json" not in {file.path for file in files}:
        raise ValueError("it does not name a model folder")
    if not _is_count(values["step"]) or not _is_count(values["timeline"]) or values.get("staleness", 0) not in (0, 1):
        raise ValueError("step, timeline or staleness is no number that it could be")
    if not isinstance(values["weights_sha256"], str) or not _SHA256.match(values["weights_sha256"]):
        raise ValueError("weights_sha256 is no sha256")
    loss = values.get("loss")
    return Checkpoint(
        storage,
        name,
        job=str(values["job"]),
        timeline=values["timeline"],
        step=values["step"],
        created_unix_s=float(values.get("created_unix_s", 0.0)),
        weights_sha256=values["weights_sha256"],
        loss=math.nan if loss is None else float(loss),
        optimizer=str(values.get("optimizer") or ""),
        staleness=values.get("staleness", 0),
        files=files,
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _check(checkpoint: Checkpoint, contents: bool, progress: Callable[[], None]) -> None:
    """Raise a SwarmError, ValueError or OSError at the first thing that is wrong."""
    weights: list[ParameterHash] = []
    names: dict[str, str] = {}  # of parameters, with their file
    states: list[tuple[str, str]] = []
    for stored in checkpoint.files:
        with checkpoint.open(stored.path) as file:
            progress()
            if contents and _sha256(file, progress) != stored.sha256:
                raise CheckpointDamaged(f"{stored.path} has other contents than its manifest says")
            if not contents or not stored.path.endswith(".safetensors"):
                continue  # stage servers wrote the headers, and anybody may ask for a look
            file.seek(0)
            length = header_bytes(stored.path, stored.size_bytes, file.read(LENGTH_BYTES))
            if length > PART_HEADER_BYTES_MAX and not stored.path.startswith("model/"):
                raise CheckpointDamaged(f"{stored.path} has a header of {length} bytes, longer than its tensors need")
            tensors = parse_header(stored.path, stored.size_bytes, file.read(length))
            if stored.path.startswith("model/"):
                names |= dict.fromkeys(tensors, stored.path.removeprefix("model/"))
                weights += tensor_hashes(file, tensors.values())
            else:
                states += [(name.rpartition(STATE_MARK)[0], stored.path) for name in tensors]
    if contents and f"model/{INDEX_NAME}" in {stored.path for stored in checkpoint.files}:
        with checkpoint.open(f"model/{INDEX_NAME}") as file:
            index = read_long(file.read(INDEX_BYTES_MAX))
        if not isinstance(index, dict) or index.get("weight_map") != names:
            raise CheckpointDamaged(f"model/{INDEX_NAME} does not fit the files beside it")
    for parameter, path in states:
        if parameter not in names:
            raise CheckpointDamaged(f"{path} has state of {parameter!r}, which the model does not have")
    if checkpoint.trainer_state().get("step") != checkpoint.step:
        raise CheckpointDamaged("trainer_state.json is of another step than the manifest")
    if contents and weights_sha256(weights) != checkpoint.weights_sha256:
        raise CheckpointDamaged("the weights are not those that the manifest names")


def _sha256(file: BinaryIO, progress: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    while piece := file.read(4 * READ_BYTES):
        digest.update(piece)
        progress()
    return digest.hexdigest()


OPTIMIZER_FOLDER = "optimizer"
OUTER_FOLDER = "outer"
WEIGHTS_FOLDER = "weights"  # of an island, where they are not the outer weights
_OF_ISLAND = re.compile(rf"^islands/([0-9]{{2}})/(?=(?:{OPTIMIZER_FOLDER}|{WEIGHTS_FOLDER})/)")


class Named(Protocol):
    """A file of a checkpoint."""

    @property
    def path(self) -> str: ...


File = TypeVar("File", bound=Named)


def island_folder(island: int, folder: str) -> str:
    """The folder with an island's own state: OPTIMIZER_FOLDER or WEIGHTS_FOLDER.

        model/, outer/                           what all islands share
        optimizer/, weights/                     of island 0, where a job with one island has its own
        islands/01/optimizer/, .../weights/      of island 1, and so on

    Each island loads its own state. In a job with more islands the new ones take the optimizer's states of the others,
    in turn, but no weights of theirs: what one of them has trained and not merged must not count twice, so they begin
    with the outer weights. In a job with fewer islands the rest is left out.
    """
    return folder if not island else f"islands/{island:02d}/{folder}"


def without_island(path: str) -> str:
    """The path that a file of an island would have in a checkpoint of that island alone."""
    return _OF_ISLAND.sub("", path)


def files_for(files: Sequence[File], island: int) -> tuple[File, ...]:
    """The files of a checkpoint that an island loads."""
    saved = 1 + max((int(match[1]) for file in files if (match := _OF_ISLAND.match(file.path))), default=0)
    own = {island_folder(island % saved, OPTIMIZER_FOLDER), island_folder(island, WEIGHTS_FOLDER)}
    return tuple(
        file
        for file in files
        if not {OPTIMIZER_FOLDER, WEIGHTS_FOLDER}.intersection(file.path.split("/")[:-1])
        or file.path.rpartition("/")[0] in own
    )
