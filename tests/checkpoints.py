"""Small checkpoints for tests, and a disk that stops, tears or refuses at a chosen operation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from safetensors.numpy import save

from swarm.checkpoint import Checkpoint, CheckpointWriter, Facts
from swarm.config import JobSpec
from swarm.messages import ParameterHash
from swarm.partition import resolve
from swarm.storage import Files, Storage
from tests.rig import small_spec

JOB = "demo-1"
TOKENIZER = {"tokenizer.json": b"{}"}


@cache
def spec(**changes: object) -> JobSpec:
    return resolve(small_spec(Path("x"), pipeline__stages=2, **changes), vocabulary_size=257, stages_if_auto=1)


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


Strike: TypeAlias = Callable[[Callable[[], Any], Callable[[], Any]], Any]


class FlakyFiles(Files):
    """Counts every operation; at number `at` it calls `strike(do, torn)`, which may do it, half of it, or not."""

    def __init__(self, at: int = -1, strike: Strike | None = None) -> None:
        self.count = 0
        self.log: list[str] = []
        self.open: list[BinaryIO] = []
        self._at = at
        self._strike = strike

    def _do(self, what: str, do: Callable[[], Any], torn: Callable[[], Any] = lambda: None) -> Any:
        number, self.count = self.count, self.count + 1
        self.log.append(what)
        if number == self._at:
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
        self._do("sync", lambda: None)  # costs milliseconds, and no test can see whether it was done

    def sync_folder(self, path: Path) -> None:
        self._do("sync_folder", lambda: None)

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", lambda: super(FlakyFiles, self).rename(source, target))

    def unlink(self, path: Path) -> None:
        self._do("unlink", lambda: super(FlakyFiles, self).unlink(path))

    def remove_folder(self, path: Path) -> None:
        self._do("remove_folder", lambda: super(FlakyFiles, self).remove_folder(path))
