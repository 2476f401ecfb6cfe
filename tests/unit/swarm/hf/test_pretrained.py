"""A folder whose weights are of another model is refused before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import InvalidModel
from swarm.hf.pretrained import check_weights, ground
from swarm.job.spec import JobSpec, parse_job

LLAMA = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 16}
TENSORS = {
    "llama": {"model.embed_tokens.weight": [16, 8], "model.layers.0.a": [2], "model.layers.1.a": [2]},
    "gpt2": {"wte.weight": [16, 8], "wpe.weight": [4, 8], "h.0.a": [2], "h.1.a": [2]},
}


def folder(path: Path, config: dict[str, Any], shapes: dict[str, list[int]]) -> JobSpec:
    """A job that starts from a folder of these tensors, all zero."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 4 * (shape[0] * shape[-1] if len(shape) > 1 else shape[0])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    model = {"id": str(path), "tokenizer": "byte"}
    return ground(parse_job({"name": "t", "model": model, "data": {"source": "x", "sequence_length": 8}}))


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_weights_of_the_config_pass(config: dict[str, Any], tmp_path: Path) -> None:
    check_weights(folder(tmp_path / "hf", config, TENSORS[config["model_type"]]))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"num_hidden_layers": 3}, "says num_hidden_layers = 3, and its weights have 2"),
        (LLAMA | {"num_hidden_layers": 1}, "says num_hidden_layers = 1, and its weights have 2"),
        (LLAMA | {"hidden_size": 16}, "says hidden_size = 16, and its weights have 8"),
        (GPT2 | {"n_layer": 9}, "says num_hidden_layers = 9, and its weights have 2"),
        (GPT2 | {"n_embd": 4}, "says hidden_size = 4, and its weights have 8"),
    ],
)
def test_weights_of_another_model_are_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    """They were found out when a stage server loaded them, after all had been tokenised and sent."""
    with pytest.raises(InvalidModel, match=words):
        check_weights(folder(tmp_path / "hf", config, TENSORS[config["model_type"]]))


def test_a_config_that_says_nothing_is_not_held_against_the_weights(tmp_path: Path) -> None:
    silent = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    check_weights(folder(tmp_path / "hf", silent | {"hidden_size": "8"}, TENSORS["llama"]))
