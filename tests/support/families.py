"""A small model of every family, trained for two steps in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from swarm.reference.trainer import train_local
from tests.support.scenes import resolved
from tests.support.simulated import Tokens, small_spec, write_text

BASE = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3}
GATED = BASE | {"intermediate_size": 50, "num_key_value_heads": 1}
WINDOW = {"sliding_window": 5}
MODELS = {
    "llama": GATED,
    "mistral": GATED | WINDOW,
    "qwen2": GATED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": GATED | {"head_dim": 10},
    "gemma2": GATED | WINDOW | {"head_dim": 10},
    "gpt2": {"n_embd": 36, "n_layer": 2, "n_head": 3},
    "gpt_neox": BASE | {"intermediate_size": 50, "rotary_pct": 0.5},
}


def train(folder: Path) -> dict[str, str]:
    """sha256 of the weights after two steps, by family."""
    folder.mkdir()
    source = write_text(folder)
    hashes = {}
    for number, (family, config) in enumerate(MODELS.items()):
        spec = small_spec(
            source,
            model__family=family,
            model__config=config,
            model__recompute=bool(number % 2),
            training__steps=2,
            training__optimizer=("adamw", "sgd", "muon", "lamb")[number % 4],
            pipeline__stages=2,
        )
        spec = resolved(spec)
        tokens = Tokens.make(folder / family, spec)
        hashes[family] = train_local(spec, tokens.batches(spec), device=torch.device("cpu")).sha256
    return hashes
