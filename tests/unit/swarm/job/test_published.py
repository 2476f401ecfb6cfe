"""A config.json that the library would refuse is refused before anything is sent, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarm.errors import InvalidConfig, SwarmError
from swarm.job.families import FAMILIES
from swarm.job.resolve import Basis, resolve
from swarm.model.families import CLASSES, build
from tests.support.model_folders import GATED, GPT2, NEOX, grounded

WHOLE = {"gpt2": GPT2, "gpt_neox": NEOX}
VALUES = ("1e-5", "7", 1, 0, -1, 1.5, True, None, "x", [], {})
KINDS = (["full_attention"], ["chunked_attention"] * 2, ["sliding_attention"] * 2, ["full_attention"] * 2)
TABLES = (
    {"rope_type": "linear"},
    {"rope_type": "linear", "factor": 2},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    {"rope_type": "new", "factor": 2},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "factor": 2},
    {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0] * 3},
    {"rope_type": "longrope", "short_factor": "x", "long_factor": [2.0]},
    {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0, "x", 2.0]},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 1},
    {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": "1"},
    {"rope_type": "yarn", "factor": 2.0, "mscale": [1], "mscale_all_dim": 1.0},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": "1e4"},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
    {"rope_type": "default", "rope_theta": 100.0},
)


def verdicts(family: str, key: str, value: Any) -> tuple[str, str]:
    """The complaints about a config.json with this field: ours, and the library's when the model is built and run."""
    config = WHOLE.get(family, GATED) | {key: value}
    try:
        spec = resolve(grounded(family, dict(config)), Basis(257))
    except InvalidConfig as error:
        try:
            CLASSES[family].config(**config)
        except Exception as theirs:  # whatever the library raises is its verdict
            return str(error), str(theirs) or "refused"
        return str(error), ""
    try:
        build(spec, 0, torch.device("cpu"))(torch.zeros(1, 16, dtype=torch.long))
    except (SwarmError, ValueError, RuntimeError) as error:
        return "", str(error) or "refused"
    return "", ""


@pytest.mark.parametrize("family", FAMILIES)
def test_no_config_that_the_library_refuses_is_sent(family: str) -> None:
    """rms_norm_eps = "1e-5" was found out by the stage servers, after all data and weights had been sent."""
    own = FAMILIES[family].own_names
    keys = dict.fromkeys([*(own.get(key, key) for key in FAMILIES[family].fields), "use_cache", "id2label"])
    tried = [(key, value) for key in keys for value in VALUES]
    tried += [("layer_types", value) for value in (*KINDS, None)]
    tried += [("rope_parameters", value) for value in (*TABLES, *VALUES)] if FAMILIES[family].rotary else []
    tried += [("rope_scaling", value) for value in (*TABLES, *VALUES)] if FAMILIES[family].rotary else []
    missed = {f"{key} = {value!r}": theirs for key, value in tried if (theirs := _missed(family, key, value))}
    assert not missed


def _missed(family: str, key: str, value: Any) -> str:
    ours, theirs = verdicts(family, key, value)
    return theirs if theirs and not ours else ""


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_library_takes_is_taken(family: str) -> None:
    own = FAMILIES[family].own_names
    plain: dict[str, Any] = {
        "use_cache": False,
        "pad_token_id": 3,
        "eos_token_id": [1, 2],
        "bos_token_id": None,
        "id2label": {"0": "a"},
    }
    plain |= {"initializer_range": 0.0, "layer_types": None}
    plain |= {own.get(key, key): value for key, value in {"head_dim": 8, "n_inner": None}.items()}
    for key, value in plain.items():
        assert verdicts(family, key, value) == ("", ""), key


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        (
            "llama",
            {"rms_norm_eps": "1e-5"},
            r"rms_norm_eps = '1e-5', which should be a number .*write rms_norm_eps = 1e",
        ),
        ("llama", {"num_hidden_layers": "2"}, "num_hidden_layers"),
        ("gpt2", {"n_head": "6"}, "n_head = '6'"),
        ("qwen2", {"sliding_window": "5"}, "write sliding_window = 5 there, without quotation marks"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "2 layers and layer_types of 3"),
        ("gemma2", {"final_logit_softcapping": 30}, "with a point only .write 30.0"),
        ("llama", {"pad_token_id": 260}, "no row of the 260"),
        ("llama", {"hidden_act": "sine"}, "'sine', which Transformers does not know"),
        ("gpt_neox", {"rotary_pct": "0.25"}, "rotary_pct = '0.25'"),
        (
            "llama",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0] * 3}},
            "short_factor with 2 numbers, and a head has 3 pairs",
        ),
        (
            "qwen2",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": "32"}},
            "rope_scaling.beta_fast = '32'",
        ),
        ("gemma2", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one table for all layers"),
    ],
)
def test_a_field_that_cannot_be_is_named(family: str, fields: dict[str, Any], words: str) -> None:
    config = WHOLE.get(family, GATED) | fields
    with pytest.raises(InvalidConfig, match=words):
        resolve(grounded(family, config), Basis(257))
