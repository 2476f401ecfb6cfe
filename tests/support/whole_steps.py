"""The stages of a tiny model (a Llama if no family is named) in one process, trained by microbatches and steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.model.exact_sums import mean_of_parts
from swarm.model.stage import Stage
from swarm.types import Microbatch, UnitName

CPU = torch.device("cpu")
B, T, D = 2, 16, 32


def spec_of(stages: int = 2, *, staleness: int = 0, training: dict[str, Any] | None = None, **model: Any) -> JobSpec:
    config = {"hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    if model.get("family") == "gpt2":
        config["n_inner"] = config.pop("intermediate_size")
    config |= model.pop("config", {})
    spec = resolve(
        parse_job(
            {
                "name": "t",
                "model": {"dtype": "float32", "config": config} | model,
                "data": {"source": "x", "sequence_length": T},
                "training": {
                    "steps": 10,
                    "warmup_steps": 0,
                    "global_batch_sequences": 2 * B,
                    "microbatch_sequences": B,
                    "reproducible": True,
                }
                | (training or {}),
                "pipeline": {"stages": stages},
            }
        ),
        Basis(257),
    )
    return spec.having("pipeline", overlap="all" if staleness else 0, sync_steps=0)


def stages_of(spec: JobSpec) -> list[Stage]:
    assert spec.pipeline.stages != "auto"
    return [Stage(spec, stage, CPU) for stage in range(spec.pipeline.stages)]


def text(seed: int) -> tuple[Tensor, Tensor]:
    rows = torch.randint(0, 257, (B, T + 1), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def run(stages: list[Stage], microbatch: Microbatch, *, version: int = 0, seed: int | None = None) -> float:
    """One microbatch through all stages and back; gives the loss."""
    tokens, targets = text(microbatch.index if seed is None else seed)
    x: Tensor | None = None
    loss = 0.0
    for stage in stages:
        x, loss = stage.forward(microbatch, version, portion=microbatch.step, x=x, tokens=tokens, targets=targets)
    g: Tensor | None = None
    for stage in reversed(stages):
        g, finite = stage.backward(microbatch, g)
        assert finite
    return loss


def means_of(stages: list[Stage], step: int) -> dict[UnitName, Tensor]:
    parts: dict[UnitName, list[Tensor]] = {}
    for stage in stages:
        for unit in stage.units:
            parts.setdefault(unit, []).append(stage.part(step, unit))
    return {unit: mean_of_parts(held, 2 * B * T, 30) for unit, held in parts.items()}


def commit(stages: list[Stage], step: int, **values: Any) -> list[str]:
    means = means_of(stages, step)
    arguments: dict[str, Any] = {"learning_rate": 1e-2, "scale": 1.0, "skip": False} | values
    for stage in stages:
        stage.apply(step, means, **arguments)
    return [stage.digest() for stage in stages]
