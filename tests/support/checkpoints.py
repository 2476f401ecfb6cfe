"""Small checkpoints for tests, and a disk that stops, tears or refuses at a chosen operation."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from safetensors.numpy import save

from swarm.checkpoint.reader import Checkpoint
from swarm.checkpoint.storage import SCHEMES, Files, Storage
from swarm.checkpoint.writer import CheckpointWriter, Facts
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.wire.messages import ParameterHash
from tests.support.simulated import small_spec

JOB = "demo-1"
WITH_MEMORY = SCHEMES | {"memory"}  # an object store within this process
TOKENIZER = {"tokenizer.json": b"{}"}


@cache
def spec(**changes: object) -> JobSpec:
    return resolve(small_spec(Path("x"), pipeline__stages=2, **changes), Basis(257))


def tensors(step: int, stage: int) -> dict[str, np.ndarray]:
    """What stands for the weights of a stage: other numbers at every step."""
    return {f"model.layers.{stage}.w": np.full((3, 5), 10.0 * step + stage, dtype=np.float32)}


def hashes(held: dict[str, np.ndarray]) -> tuple[ParameterHash, ...]:
    return tuple(
        ParameterHash(name, "float32", value.shape, hashlib.sha256(value.tobytes()).hexdigest())
        for name, value in held.items()
    )


def facts(step: int, timeline: int = 0, job: str = JOB) -> Facts:
    return Facts(job, timeline, step, 1.7e9 + step, "0.1", 1.5, 100 * step, True)


def write(storage: Storage, step: int, *, timeline: int = 0, job: str = JOB, weights: int | None = None) -> Checkpoint:
    """A checkpoint of two stages with optimizer files; `weights` are those of another step."""
    held = [tensors(step if weights is None else weights, stage) for stage in (0, 1)]
    writer = CheckpointWriter(storage, spec(), step, f"{timeline}")
    for stage, part in enumerate(held):
        writer.put(f"model/model-{stage + 1:05d}-of-00002.safetensors", save(part))
        state = {f"{name}@first_moment": value * 2 for name, value in part.items()}
        writer.put(f"optimizer/layer-{stage:04d}.safetensors", save(state))
    parameters = {stage: hashes(part) for stage, part in enumerate(held)}
    return writer.publish(facts(step, timeline, job), parameters, TOKENIZER)


class PowerCut(BaseException):
    """The machine is off: nothing else happens."""


@dataclass(slots=True)
class _Kept:
    """A file or a folder on a disk that forgets: what it holds now, and what it would hold after a power cut."""

    names: dict[str, _Kept] = field(default_factory=dict)
    safe_names: dict[str, _Kept] = field(default_factory=dict)
    safe_bytes: bytes = b""
    is_file: bool = False


Strike: TypeAlias = Callable[[Callable[[], Any], Callable[[], Any]], Any]


class FlakyFiles(Files):
    """Counts every operation; at number `at` it calls `strike(do, torn)`, which may do it, half of it, or not."""

    def __init__(self, at: int = -1, strike: Strike | None = None) -> None:
        self.count = 0
        self.log: list[str] = []
        self.open: list[BinaryIO] = []
        self._number = at
        self._strike = strike

    def _do(self, what: str, do: Callable[[], Any], torn: Callable[[], Any] = lambda: None) -> Any:
        number, self.count = self.count, self.count + 1
        self.log.append(what)
        if number == self._number:
            assert self._strike is not None
            return self._strike(do, torn)
        return do()

    def make_folder(self, path: Path) -> None:
        self._do("make_folder", lambda: super(FlakyFiles, self).make_folder(path))

    def create(self, path: Path) -> BinaryIO:
        def create() -> BinaryIO:
            self.open.append(super(FlakyFiles, self).create(path))
            return self.open[-1]

        made: BinaryIO = self._do("create", create)
        return made

    def close(self) -> None:
        """The process is gone, and its open files with it."""
        for file in self.open:
            file.close()

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        half = memoryview(content)[: len(content) // 2]
        self._do("write", lambda: super(FlakyFiles, self).write(file, content), lambda: file.write(half))

    def sync(self, file: BinaryIO) -> None:
        self._do("sync", lambda: self.synced(file))  # the real one costs milliseconds

    def sync_folder(self, path: Path) -> None:
        self._do("sync_folder", lambda: self.synced_folder(path))

    def synced(self, file: BinaryIO) -> None:
        """For a disk that forgets: the bytes of the file are safe."""

    def synced_folder(self, path: Path) -> None:
        """For a disk that forgets: the names in the folder are safe."""

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", lambda: super(FlakyFiles, self).rename(source, target))

    def unlink(self, path: Path) -> None:
        self._do("unlink", lambda: super(FlakyFiles, self).unlink(path))

    def remove_folder(self, path: Path) -> None:
        self._do("remove_folder", lambda: super(FlakyFiles, self).remove_folder(path))


class ForgetfulFiles(FlakyFiles):
    """A disk below `top` that loses in a power cut whatever was not synced: bytes of files, names in folders."""

    def __init__(self, top: Path, at: int = -1, strike: Strike | None = None) -> None:
        super().__init__(at, strike)
        self._top = top
        self._disk = _Kept()
        self._files: dict[BinaryIO, tuple[_Kept, Path]] = {}

    def lose(self) -> None:
        """The power was cut: leave below `top` what was safe."""
        shutil.rmtree(self._top)
        self._restore(self._disk, self._top)

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        place = self._disk
        for name in path.relative_to(self._top).parts:
            place = place.names.setdefault(name, _Kept())

    def create(self, path: Path) -> BinaryIO:
        file = super().create(path)
        kept = self._at(path.parent).names[path.name] = _Kept(is_file=True)
        self._files[file] = kept, path
        return file

    def synced(self, file: BinaryIO) -> None:
        kept, path = self._files[file]
        kept.safe_bytes = path.read_bytes()

    def synced_folder(self, path: Path) -> None:
        kept = self._at(path)
        kept.safe_names = dict(kept.names)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._at(target.parent).names[target.name] = self._at(source.parent).names.pop(source.name)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        del self._at(path.parent).names[path.name]

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        del self._at(path.parent).names[path.name]

    def _at(self, path: Path) -> _Kept:
        place = self._disk
        for name in path.relative_to(self._top).parts:
            place = place.names[name]
        return place

    def _restore(self, kept: _Kept, path: Path) -> None:
        if kept.is_file:
            path.write_bytes(kept.safe_bytes)
            return
        path.mkdir()
        for name, inner in kept.safe_names.items():
            self._restore(inner, path / name)
