"""The names and shapes that the client expects are those of the library's own classes."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.job.resolve import Basis, resolve
from swarm.job.shapes import parameter_table
from swarm.job.spec import NarrowSection
from swarm.model.families import parameter_shapes
from tests.support.model_folders import GATED, GPT2, NEOX, grounded

ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GATED),
    "llama without pairs": ("llama", {key: value for key, value in GATED.items() if key != "num_key_value_heads"}),
    "llama of wide heads": ("llama", GATED | {"head_dim": 10}),
    "llama of no head_dim": ("llama", GATED | {"head_dim": None, "num_key_value_heads": None}),
    "llama of biases": ("llama", GATED | {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", GATED | {"tie_word_embeddings": True}),
    "mistral": ("mistral", GATED),
    "mistral that says bias": ("mistral", GATED | {"attention_bias": True, "head_dim": 8}),
    "qwen2": ("qwen2", GATED),
    "qwen2 that says head_dim": ("qwen2", GATED | {"head_dim": 10, "attention_bias": False}),
    "qwen3": ("qwen3", GATED),
    "qwen3 of biases": ("qwen3", GATED | {"head_dim": 10, "attention_bias": True}),
    "gemma2": ("gemma2", GATED),
    "gemma2 of biases": ("gemma2", GATED | {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", GPT2),
    "gpt2 of a width inside": ("gpt2", GPT2 | {"n_inner": 44, "tie_word_embeddings": False}),
    "gpt2 of no width inside": ("gpt2", GPT2 | {"n_inner": None}),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox without biases": ("gpt_neox", NEOX | {"attention_bias": False, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("kind", ["maxout", "bottleneck", "anchor"])
@pytest.mark.parametrize("odd", ["llama", "gpt2", "gemma2"])
def test_narrow_places_have_the_parameters_of_their_own_classes(odd: str, kind: str) -> None:
    spec = grounded(*ODD[odd])
    spec = resolve(spec.having("model", narrow=NarrowSection(kind=kind)), Basis(257))  # type: ignore[arg-type]
    ours, theirs = parameter_table(spec), parameter_shapes(spec)
    assert ours == theirs
    assert sum(".narrow_" in name for name in ours) == {"maxout": 5, "bottleneck": 6, "anchor": 3}[kind]


@pytest.mark.parametrize("odd", ODD)
def test_a_config_gives_the_parameters_of_the_librarys_classes(odd: str) -> None:
    spec = resolve(grounded(*ODD[odd]), Basis(257))
    ours, theirs = parameter_table(spec), parameter_shapes(spec)
    assert ours == theirs
