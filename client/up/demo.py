"""The built-in job of `swarm up --demo`: a tiny Llama that reads Python's standard library."""

from __future__ import annotations

import json
import math
import sysconfig
from itertools import count
from pathlib import Path

from client.records import Job

NAME = "demo"
FOLDER = "swarm-demo-model"
LAYERS = 4
WIDTH = 128
STEPS = 200
SEQUENCES = 16
SEQUENCE_LENGTH = 128

_JOB = """\
schema_version = 1
name = "{name}"

[model]
family = "llama"
dtype = "float32"
tokenizer = "byte"

[model.config]
hidden_size = {width}
intermediate_size = {wide}
num_hidden_layers = {layers}
num_attention_heads = 4
initializer_range = 0.05

[data]
source = {source}
sequence_length = {sequence_length}

[training]
steps = {steps}
global_batch_sequences = {sequences}
microbatch_sequences = 2
learning_rate = 3e-3
schedule = "cosine"
warmup_steps = 10
reproducible = true

[pipeline]
stages = {stages}
compression = "bfloat16"
"""


def demo_job(stages: int) -> tuple[str, str]:
    """The job file for this number of stages, with at least one layer for each, and a description of the job."""
    layers = max(LAYERS, stages)
    source = f"{sysconfig.get_paths()['stdlib']}/[a-p]*.py"
    text = _JOB.format(
        name=NAME,
        width=WIDTH,
        wide=3 * WIDTH,
        layers=layers,
        source=json.dumps(source, ensure_ascii=False),
        sequence_length=SEQUENCE_LENGTH,
        steps=STEPS,
        sequences=SEQUENCES,
        stages=stages,
    )
    story = (
        f"A Llama of {layers} layers is cut into {stages} stages; the stage servers find the scheduler through the "
        "broker.\n"
        f"It reads the source of Python's standard library, byte by byte: {STEPS} steps of {SEQUENCES} sequences of "
        f"{SEQUENCE_LENGTH} bytes.\n"
        "Every microbatch goes through one replica of each stage and back; replicas of a stage average their gradients."
    )
    return text, story


def report(view: Job) -> tuple[bool, str]:
    """Whether the job learned more than how often each byte occurs, and the sentence that says so."""
    learned = math.isfinite(view.loss) and view.loss < view.unigram_entropy
    words = (
        f"Loss {view.loss:.3f} nats per byte. Knowing only how often each byte occurs would give "
        f"{view.unigram_entropy:.3f}: the model has learned {'what follows what' if learned else 'nothing yet'}."
    )
    work = "; ".join(
        f"stage {stage.stage}: {stage.microbatches} microbatches, each counted once, by {len(stage.peers)} peers"
        for stage in view.stages
    )
    return learned, f"{words}\n{work}." if work else words


def free_name(folder: Path) -> Path:
    """An unused path in `folder` for the model."""
    names = (FOLDER if number == 1 else f"{FOLDER}-{number}" for number in count(1))
    return next(folder / name for name in names if not (folder / name).exists())
