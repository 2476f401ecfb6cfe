"""What one process ends with, trained once for all tests, workers and runs that ask for the same job.

It is kept in a file below build/, whose name is a hash of all that the bits depend on: the job, its tokens, the whole
source of `swarm`, the libraries, the threads and the machine. So a file may be old, but it is never read for something
else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

import swarm
from swarm.checkpoint.reader import Checkpoint
from swarm.job.outer_log import Entry, written
from swarm.job.spec import JobSpec
from swarm.reference.trainer import EvaluationReport, train_local
from tests.support.simulated import Tokens

SOURCE = Path(swarm.__file__).parent
FOLDER = SOURCE.parent / "build" / "references"
LIBRARIES = ("torch", "transformers", "numpy", "safetensors")


@dataclass(frozen=True, slots=True)
class Reference:
    """The end of a run: loss per step, the sha256 of the weights, what was evaluated."""

    losses: tuple[float, ...]
    sha256: str
    evaluations: tuple[EvaluationReport, ...]


def reference(spec: JobSpec, tokens: Tokens, log: Sequence[Entry] = (), start: Checkpoint | None = None) -> Reference:
    """What one process makes of a resolved spec, as `train_local` has it.

    Jobs that begin with files of somebody else are trained each time: their names do not say what is in them.
    """
    if start is not None or spec.model.id or spec.checkpoint.resume_from:
        return _trained(spec, tokens, log, start)
    path = FOLDER / f"{_key(spec, tokens, log)}.json"
    if not path.exists():
        _keep(path, _trained(spec, tokens, log, None))
    values = json.loads(path.read_text(encoding="utf-8"))
    evaluations = tuple(EvaluationReport(**value) for value in values["evaluations"])
    return Reference(tuple(values["losses"]), values["sha256"], evaluations)


def _trained(spec: JobSpec, tokens: Tokens, log: Sequence[Entry], start: Checkpoint | None) -> Reference:
    trained = train_local(spec, tokens.batches(spec), device=torch.device("cpu"), log=log, start=start)
    return Reference(trained.losses, trained.sha256, trained.evaluations)


def _key(spec: JobSpec, tokens: Tokens, log: Sequence[Entry]) -> str:
    manifest = tokens.manifest
    anywhere = spec.having("data", source="")
    parts = [
        anywhere.model_dump_json(),
        *(shard.sha256 for shard in manifest.shards),
        f"{manifest.token_dtype} {manifest.vocabulary_size} {manifest.end_of_text}",
        written(log).decode(),
        str(torch.get_num_threads()),
        surroundings(SOURCE),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def surroundings(source: Path) -> str:
    """A hash of the code below `source`, the libraries and the machine."""
    parts = [platform.python_version(), torch.__config__.show(), *platform.uname(), *map(version, LIBRARIES)]
    for path in sorted(source.rglob("*.py")):
        parts += [str(path.relative_to(source)), path.read_text(encoding="utf-8")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _keep(path: Path, made: Reference) -> None:
    """Write the file as a whole: another worker reads it at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
        json.dump(asdict(made), file)
    os.replace(file.name, path)
