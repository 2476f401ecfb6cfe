"""Every two choices that a job can make, together in some run: its weights are those of one process, bit for bit.

Real flows, brain and torch; the transport delays and reorders every tensor at random and delivers some twice.

Sixteen rows cannot pair seven families with four optimizers, so a family stands for its architecture: rotary and gated
(Llama, Mistral, Qwen 2 and 3 take turns), Gemma 2, GPT-2, GPT-NeoX. That every pair of levels occurs is itself a test.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import combinations
from pathlib import Path

import pytest
import torch

from swarm.reference.trainer import train_local
from tests.support.scenes import resolved
from tests.support.simulated import Tokens, run_swarm, small_spec, stale, write_text

BASE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
GATED = BASE | {"intermediate_size": 40, "num_key_value_heads": 2}
WINDOW = {"sliding_window": 5}
MODELS = {
    "llama": GATED,
    "mistral": GATED | WINDOW,
    "qwen2": GATED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": GATED | {"head_dim": 8},
    "gemma2": GATED | WINDOW | {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    "gpt_neox": BASE | {"intermediate_size": 40, "rotary_pct": 0.5},
}
ARCHITECTURE = {"gemma2": "gemma2", "gpt2": "gpt2", "gpt_neox": "gpt_neox"}  # all others: rotary, gated


@dataclass(frozen=True, slots=True)
class Row:
    """One run."""

    family: str
    optimizer: str
    codec: str
    stages: int
    routing: str
    replicas: int
    tied: bool
    staleness: int
    recompute: bool
    dtype: str

    def __str__(self) -> str:
        return "-".join(str(value) for value in astuple(self))


LOWERED = "bfloat16_parameters"
ROWS = [
    Row("llama", "adamw", "none", 3, "uniform", 3, False, 0, True, "float32"),
    Row("mistral", "sgd", "bfloat16", 2, "uniform", 1, True, 1, True, "float32"),
    Row("qwen2", "muon", "float16", 3, "least_completion", 2, True, 1, True, LOWERED),
    Row("qwen3", "lamb", "int8", 1, "iwrr", 2, False, 1, False, LOWERED),
    Row("gemma2", "adamw", "bfloat16", 2, "iwrr", 2, True, 0, True, "float32"),
    Row("gemma2", "sgd", "none", 1, "least_completion", 2, True, 1, True, LOWERED),
    Row("gemma2", "muon", "int8", 3, "uniform", 1, True, 0, False, LOWERED),
    Row("gemma2", "lamb", "float16", 2, "uniform", 3, False, 1, True, "float32"),
    Row("gpt2", "adamw", "float16", 1, "iwrr", 1, False, 1, False, LOWERED),
    Row("gpt2", "sgd", "int8", 2, "uniform", 2, False, 1, False, "float32"),
    Row("gpt2", "muon", "none", 2, "iwrr", 3, True, 1, True, LOWERED),
    Row("gpt2", "lamb", "bfloat16", 3, "least_completion", 3, True, 0, False, LOWERED),
    Row("gpt_neox", "adamw", "int8", 1, "least_completion", 3, True, 1, True, "float32"),
    Row("gpt_neox", "sgd", "float16", 3, "iwrr", 3, True, 0, True, "float32"),
    Row("gpt_neox", "muon", "bfloat16", 1, "uniform", 2, False, 0, True, "float32"),
    Row("gpt_neox", "lamb", "none", 2, "least_completion", 1, False, 1, False, LOWERED),
]


def levels(row: Row) -> tuple[object, ...]:
    return ARCHITECTURE.get(row.family, "gated"), *astuple(row)[1:]


def test_every_pair_of_choices_occurs() -> None:
    columns = list(zip(*(levels(row) for row in ROWS), strict=True))
    for one, other in combinations(columns, 2):
        assert len(set(zip(one, other, strict=True))) == len(set(one)) * len(set(other))
    assert [len(set(column)) for column in columns] == [4, 4, 4, 3, 3, 3, 2, 2, 2, 2]
    assert {row.family for row in ROWS} == set(MODELS)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_swarm_ends_with_the_weights_of_one_process(tmp_path: Path, row: Row) -> None:
    number = ROWS.index(row)
    momentum = {"training__momentum": 0.9} if row.optimizer == "sgd" else {}
    spec = small_spec(
        write_text(tmp_path),
        model__family=row.family,
        model__config=MODELS[row.family] | {"tie_word_embeddings": row.tied},
        model__recompute=row.recompute,
        model__dtype=row.dtype,
        training__optimizer=row.optimizer,
        training__microbatch_sequences=(1, 2, 3)[number % 3],
        pipeline__compression=row.codec,
        pipeline__stages=row.stages,
        pipeline__routing=row.routing,
        **stale(row.staleness),
        pipeline__max_in_flight=("auto", 1, 4)[number % 4 % 3],
        **momentum,
    )
    spec = resolved(spec)
    tokens = Tokens.make(tmp_path, spec)
    expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"))
    run = run_swarm(spec, tokens, row.stages * row.replicas, seed=number)
    assert run.sha256 == expected.sha256
    if row.stages > 1:
        assert run.counts.reordered > 0
        assert run.counts.duplicated > 0
