"""Steps of a job as TensorBoard's event files."""

from __future__ import annotations

import math
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from client.records import Step
from swarm.errors import InvalidConfig


class TensorBoard:
    """Writes steps into a folder, one event each; use `close` at the end.

    InvalidConfig if the package is not installed or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            writers: Any = import_module("tensorboard.summary.writer.event_file_writer")
            self._event: Any = import_module("tensorboard.compat.proto.event_pb2").Event
            self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        except ModuleNotFoundError as error:
            raise InvalidConfig(
                f"this needs the Python package {error.name}",
                hint='install it with: pip install "swarm-stages[tracking]"',
            ) from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer: Any = writers.EventFileWriter(str(folder))
        except OSError as error:
            raise InvalidConfig(f"{folder} cannot be written: {error.strerror or error}") from None

    def write(self, step: Step, tokens: int) -> None:
        """Add a step; `tokens` are those of all steps up to it."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(step, tokens).items()]
        moment_s = step.committed_unix_s or time.time()
        self._writer.add_event(self._event(wall_time=moment_s, step=step.step, summary=self._summary(value=values)))

    def flush(self) -> None:
        """Let readers see the written steps."""
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def scalars(step: Step, tokens: int) -> dict[str, float]:
    """The measurements of a step by tag; values that are not finite are left out."""
    values = {
        "train/loss": step.loss,
        "train/gradient_norm": math.nan if step.skipped else step.grad_norm,
        "train/learning_rate": step.learning_rate,
        "train/skipped": float(step.skipped),
        "train/tokens": float(tokens),
        "validation/loss": step.evaluation_loss,
    }
    return {tag: value for tag, value in values.items() if math.isfinite(value)}
