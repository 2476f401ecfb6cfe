"""Small jobs with islands that one process trains, and how far their weights are apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.data.batches import Batches, TokenData
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.model.stage import Stage
from swarm.reference.trainer import Trained, train_local

CPU = torch.device("cpu")
T = 16


def spec_of(
    mode: str = "diloco", islands: int = 2, *, stages: int = 1, tied: bool = False, steps: int = 6, **outer: Any
) -> JobSpec:
    config = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    training = {
        "steps": steps, "warmup_steps": 2, "global_batch_sequences": 8, "microbatch_sequences": 2,
        "learning_rate": 1e-2, "reproducible": True, "eval_every_steps": 1,
    }  # fmt: skip
    values = {
        "name": "t",
        "model": {"dtype": "float32", "config": config | {"tie_word_embeddings": tied}},
        "data": {"source": "x", "sequence_length": T, "validation_ratio": 0.1},
        "training": training,
        "pipeline": {"stages": stages, "compression": "none"} | ({"overlap": 0} if mode == "allreduce" else {}),
        "islands": {"count": islands},
        "averaging": {"mode": mode},
        "outer": outer,
    }
    return resolve(parse_job(values), Basis(257))


def batches_of(spec: JobSpec) -> Batches:
    text = np.random.default_rng(0).integers(0, 257, size=200 * T + 1).astype(np.uint16)
    return Batches.of_job(spec, TokenData([text]), -1)


def train(spec: JobSpec) -> Trained:
    return train_local(spec, batches_of(spec))


def weights(stages: list[Stage] | tuple[Stage, ...]) -> dict[str, Tensor]:
    return {name: value.clone() for stage in stages for name, value in stage.weights.newest().items()}


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def drift(islands: list[list[Stage]], seed: int = 0, scale: float = 1.0) -> None:
    """Give each island weights of its own."""
    for number, island in enumerate(islands):
        generator = torch.Generator().manual_seed(seed + number)
        for stage in island:
            for value in stage.weights.newest().values():
                value.data += scale * torch.randn(value.shape, generator=generator)
