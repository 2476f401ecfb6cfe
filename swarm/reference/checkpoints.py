"""Checkpoints of the one-process trainer, in the layout of a swarm's: each can resume from the other's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import torch

from swarm.checkpoint.reader import Checkpoint, fault_of, files_for, list_checkpoints
from swarm.checkpoint.storage import LocalStorage, Storage
from swarm.checkpoint.writer import CheckpointWriter, Facts, prune
from swarm.errors import CheckpointFailed, InvalidConfig, SwarmError
from swarm.hf.pretrained import WeightFile
from swarm.job.changes import check_state, check_steps
from swarm.job.islands import course_of, island_spec
from swarm.job.spec import JobSpec
from swarm.model.stage import Stage
from swarm.model.state import files_of, parameter_hashes, read_files
from swarm.types import JobId
from swarm.wire.messages import ParameterHash

Islands: TypeAlias = Sequence[Sequence[Stage]]
"""The stages of each island; a job without islands has one."""


class LocalCheckpoints:
    """Writes a checkpoint when one is due and removes old ones; reports both through `say`.

    A checkpoint that cannot be written is reported, and training goes on.
    """

    def __init__(
        self,
        storage: Storage,
        spec: JobSpec,
        tokenizer_files: dict[str, bytes],
        say: Callable[[str], None],
        *,
        start: Checkpoint | None = None,
    ) -> None:
        self._storage = storage
        self._spec = spec
        self._job = JobId(spec.name)
        self._tokenizer_files = tokenizer_files
        self._say = say
        storage.clean()
        found, _ = list_checkpoints(storage, self._job)
        before = [*found, *([start] if start is not None else [])]
        self._timeline = max((checkpoint.timeline + 1 for checkpoint in before), default=0)
        self._last_s = time.monotonic()
        self._tokens = 0
        self._at_once = False

    def after(
        self, islands: Islands, step: int, loss: float, tokens: int, *, at_once: bool = False, whole: bool = True
    ) -> Checkpoint | None:
        """The islands have made `step` steps, the newest with `tokens` tokens; gives the checkpoint if one was written.

        One is written when it is due, or `at_once`; of several islands behind their next outer step that is `whole`,
        without one that was late. None after the last step, whose weights are the model folder.
        """
        self._tokens += tokens
        self._at_once = self._at_once or at_once
        rules, course = self._spec.checkpoint, course_of(self._spec, 0)
        version = course.version_after(step)
        by_time = rules.every_s > 0 and time.monotonic() - self._last_s >= rules.every_s
        is_due = self._at_once or by_time or course.is_saved(version, rules.every_steps)
        self._at_once = is_due
        if step == self._spec.training.steps or not is_due or not whole or version != course.level_from(version):
            return None
        self._at_once = False
        try:
            return self.write(islands, step, loss)
        except SwarmError as error:
            self._say(f"no checkpoint at step {step}: {error}")
            return None

    def write(self, islands: Islands, step: int, loss: float) -> Checkpoint:
        """Write a checkpoint now, read it back, remove old ones. CheckpointFailed, StorageError."""
        self._last_s = time.monotonic()
        rules = self._spec.checkpoint
        writer = CheckpointWriter(self._storage, self._spec, step, f"{self._timeline}")
        try:
            parameters: dict[int, tuple[ParameterHash, ...]] = {}
            for island, stage in ((number, stage) for number, stages in enumerate(islands) for stage in stages):
                state = stage.capture(optimizer=rules.optimizer)
                parameters.setdefault(stage.stage, parameter_hashes(state))
                for path, content in files_of(self._spec, stage.stage, state, optimizer=rules.optimizer, island=island):
                    writer.put(path, content[:])
            facts = Facts(
                job=self._job,
                timeline=self._timeline,
                step=step,
                created_unix_s=time.time(),
                product=metadata.version("swarm-stages"),
                loss=loss,
                tokens=self._tokens,
                optimizer=rules.optimizer,
            )
            made = writer.publish(facts, parameters, self._tokenizer_files)
        except BaseException:
            writer.discard()
            raise
        if fault := fault_of(made):
            raise CheckpointFailed(f"the checkpoint at step {step} does not read back: {fault}", hint="check the disk")
        prune(self._storage, self._job, made, keep_last=rules.keep_last, keep_every_steps=rules.keep_every_steps)
        self._say(f"checkpoint {self._storage.where}/{made.name}")
        return made


def islands_from(checkpoint: Checkpoint, spec: JobSpec, device: torch.device) -> list[list[Stage]]:
    """The stages of each island of a resolved spec as the checkpoint has them, for any number of stages that wrote it.

    InvalidConfig if the job cannot go on from it, InvalidModel if it is of another model.
    """
    check_state(checkpoint.trainer_state(), spec)
    check_steps(spec, checkpoint.step)
    if not isinstance(checkpoint.storage, LocalStorage):
        raise InvalidConfig(f"{checkpoint.storage.where} is no folder of this machine", hint="copy the checkpoint here")
    home: Path = checkpoint.storage.root / checkpoint.name
    files = [
        WeightFile(file.path, home / file.path, file.size_bytes)
        for file in checkpoint.files
        if file.path.endswith(".safetensors")
    ]
    share, version = island_spec(spec), course_of(spec, 0).version_after(checkpoint.step)

    def stage_of(stage: int, island: int) -> Stage:
        state = read_files(share, stage, files_for(files, island), version)
        return Stage(share, stage, device, state, step_on=spec.training.step_on)

    stages = range(len(spec.split))
    return [[stage_of(stage, island) for stage in stages] for island in range(spec.island_count)]
