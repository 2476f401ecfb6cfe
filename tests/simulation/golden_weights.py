"""Trains small jobs and prints the sha256 of their weights; test_golden_weights.py says in which environment."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from stage_server.lean_imports import lean_imports

with lean_imports():
    import swarm.model.stage  # noqa: F401  # as in a stage server: a third of the time

from swarm.data.tokenizer import ByteTokenizer
from swarm.job.spec import JobSpec
from swarm.types import JobState
from tests.support.scenes import play, resolved
from tests.support.simulated import Rig, Tokens, run_swarm, small_spec, write_text

JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama, one stage": (1, {"pipeline__stages": 1}),
    "llama, three stages, tied": (6, {"pipeline__stages": 3, "config__tie_word_embeddings": True}),
    "mistral, iwrr": (
        4,
        {"model__family": "mistral", "config__sliding_window": 4, "pipeline__stages": 2, "pipeline__routing": "iwrr"},
    ),
    "qwen2, synchronous": (4, {"model__family": "qwen2", "pipeline__stages": 2, "pipeline__overlap": 0}),
    "qwen3, uniform, sgd": (
        5,
        {"model__family": "qwen3", "pipeline__stages": 2, "pipeline__routing": "uniform", "training__optimizer": "sgd"},
    ),
    "gemma2, adamw": (2, {"model__family": "gemma2", "pipeline__stages": 2}),
    "gpt2, dropout, int8": (3, {"model__family": "gpt2", "pipeline__stages": 3, "pipeline__compression": "int8"}),
    "gpt_neox, lamb": (3, {"model__family": "gpt_neox", "pipeline__stages": 1, "training__optimizer": "lamb"}),
    "bfloat16 boundaries": (4, {"pipeline__stages": 2, "pipeline__compression": "bfloat16"}),
    "float16 boundaries, synchronous": (
        4,
        {"pipeline__stages": 2, "pipeline__compression": "float16", "pipeline__overlap": 0},
    ),
    "recompute, linear": (2, {"pipeline__stages": 2, "model__recompute": True, "training__schedule": "linear"}),
    "resumed at another cut": (4, {"pipeline__stages": 2, "training__steps": 8, "checkpoint__every_steps": 2}),
}
RESUMED = "resumed at another cut"
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 64, "n_positions": 64}


def _spec(folder: Path, changes: dict[str, Any]) -> JobSpec:
    values = small_spec(write_text(folder)).model_dump()
    # As it was when the hashes were recorded: all microbatches one step late, plain AdamW.
    values["pipeline"] |= {"overlap": "all", "sync_steps": 0}
    values["training"]["lookahead"] = 0.0
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if section == "config":
            values["model"]["config"][name] = value
        else:
            values[section][name] = value
    family, config = values["model"]["family"], values["model"]["config"]
    if family == "gpt2":
        values["model"]["config"] = dict(_GPT)
    elif family == "gpt_neox":
        config.pop("num_key_value_heads")
    elif family in ("qwen3", "gemma2"):
        config["head_dim"] = 8
    return resolved(JobSpec.model_validate(values))


def weights_of(name: str) -> str:
    """Train one of the jobs in the simulated system; the sha256 of its final weights."""
    peers, changes = JOBS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        spec = _spec(folder, changes)
        tokens = Tokens.make(folder, spec)
        if name != RESUMED:
            return run_swarm(spec, tokens, peers, seed=1).sha256

        async def act(rig: Rig) -> str:
            job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())
            async for _ in rig.jobs.watch(job):
                if job.progress.steps_done >= 4:
                    break
            await rig.jobs.pause(job, "to be cut anew")
            async for _ in rig.jobs.watch(job):
                if job.record.state is JobState.PAUSED:
                    break
            await rig.jobs.resume(job, "latest", spec.having("pipeline", stages=3, split="auto"))
            await rig.finished(job)
            return job.record.weights_sha256

        return play(tokens, peers, act)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: weights_of(name) for name in JOBS}))
