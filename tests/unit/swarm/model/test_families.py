"""The job's side, the model folder and the stage agree with Transformers on what a family is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import swarm
from swarm.errors import InvalidConfig
from swarm.hf.model_folder import model_folder_files
from swarm.job.families import FAMILIES
from swarm.job.partition import balanced_split, flops_per_token
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, ModelSection, parse_job
from swarm.model.families import CLASSES

# What a config class takes beside its fields, and turns into rope_parameters.
ROTARY = {"rope_theta", "rotary_pct", "rotary_emb_base"}


def job(family: str, **config: Any) -> JobSpec:
    base = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    return parse_job(
        {
            "name": "t",
            "model": {"family": family, "config": base | config},
            "data": {"source": "x", "sequence_length": 32},
        }
    )


def resolved(spec: JobSpec) -> JobSpec:
    return resolve(spec, Basis(257))


def test_whatever_knows_families_has_them_from_the_one_table() -> None:
    assert get_args(ModelSection.model_fields["family"].annotation) == ("auto", *FAMILIES)
    assert CLASSES.keys() == FAMILIES.keys()
    for name, family in FAMILIES.items():
        assert family.architecture == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]


def test_no_source_file_but_the_table_names_more_than_one_family() -> None:
    sources = Path(swarm.__file__).parent.rglob("*.py")
    naming = {
        path.name: named
        for path in sources
        if len(named := {name for name in FAMILIES if f'"{name}"' in path.read_text(encoding="utf-8")}) > 1
    }
    assert naming == {"families.py": set(FAMILIES)}


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_are_those_of_the_library_with_its_defaults(family: str) -> None:
    ours = FAMILIES[family]
    known = {field.name: field.default for field in dataclasses.fields(CLASSES[family].config)}
    for key, (kind, default) in ours.fields.items():
        name = ours.own_names.get(key, key)
        assert name in known.keys() | ROTARY, key
        # Ours differ where the library's would be wrong here: tokens are the tokenizer's, dropout is off.
        if default is not None and name in known and not key.endswith(("_token_id", "dropout", "pdrop")):
            assert (default, type(default)) == (known[name], kind), key


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_file_has_the_familys_own_names_and_resolving_twice_changes_nothing(family: str) -> None:
    spec = resolved(job(family))
    assert resolved(spec) == spec
    config = json.loads(model_folder_files(spec)["config.json"])
    known = {field.name for field in dataclasses.fields(CLASSES[family].config)}
    assert config.keys() <= known | ROTARY | {"model_type", "architectures", "dtype"}
    # Else Gemma 2 would take an ordinary byte for padding, and never learn it.
    assert config["pad_token_id"] is None


def test_gpt2_understands_its_own_names_and_the_common_ones() -> None:
    config = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
    spec = parse_job(
        {
            "name": "t",
            "model": {"family": "gpt2", "config": config},
            "data": {"source": "x", "sequence_length": 32},
        }
    )
    assert spec.layers == 2
    filled = resolved(spec).model.config
    assert (filled["hidden_size"], filled["n_inner"], filled["max_position_embeddings"]) == (48, 192, 64)
    with pytest.raises(InvalidConfig, match=r"n_embd .* are the same"):
        resolved(job("gpt2", n_embd=48))


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("gpt2", {"resid_pdrop": 1.0}, "resid_pdrop = 1.0 should be"),
        ("gpt2", {"n_positions": 16}, "less than data.sequence_length"),
        ("gpt2", {"rope_theta": 1e4}, "unknown key model.config.rope_theta"),
        ("gpt2", {"activation_function": "sine"}, "activation_function"),
        ("gpt_neox", {"hidden_dropout": -0.1}, "hidden_dropout = -0.1 should be"),
        ("gpt_neox", {"rotary_pct": 0.2}, "rotary_pct"),
        ("gpt_neox", {"rotary_pct": 1.5}, "rotary_pct"),
        ("gpt_neox", {"num_key_value_heads": 2}, "unknown key"),
        ("gemma2", {"hidden_act": "silu"}, "unknown key"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "more than 0"),
        ("mistral", {"sliding_window": 0}, "at least 1"),
        ("qwen2", {"attention_bias": True}, "unknown key"),
        ("qwen3", {"head_dim": 5}, "odd"),
    ],
)
def test_an_impossible_model_is_refused_with_its_field(family: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        resolved(job(family, **config))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cost_of_a_layer_is_its_matrices_and_its_scores(family: str) -> None:
    spec = resolved(job(family, **({} if family == "gpt2" else {"intermediate_size": 96})))
    layer, head = flops_per_token(spec)
    inner = 256 if family == "gpt2" else 96
    matrices = 2 if family in ("gpt2", "gpt_neox") else 3
    assert layer == 4 * 64 * 64 + matrices * 64 * inner + 64 * 32
    assert head == 64 * 257
    assert sum(balanced_split(spec, 3)) == 8
