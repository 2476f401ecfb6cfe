"""Model folders as far as a client reads them: config.json, and safetensors files of zeros."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from swarm.job.resolve import Basis, resolve
from swarm.job.shapes import parameter_table
from swarm.job.spec import JobSpec, parse_job

BASE = {"vocab_size": 260, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6}
GATED = BASE | {"intermediate_size": 50, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 260, "n_embd": 36, "n_layer": 2, "n_head": 6, "n_positions": 64}
NEOX = BASE | {"intermediate_size": 50}

Tensors: TypeAlias = dict[str, tuple[str, list[int]]]  # dtype and shape by name
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "I8": 1}


def grounded(family: str, config: Mapping[str, Any]) -> JobSpec:
    """A job as `ground` leaves it for a config.json, without weights."""
    model = {"id": "acme/tiny", "family": family, "config": dict(config), "tokenizer": "byte", "init": "random"}
    return parse_job({"name": "t", "model": model, "data": {"source": "x", "sequence_length": 16}})


def tensors_of(config: Mapping[str, Any]) -> Tensors:
    """The tensors that a model of this config.json has."""
    given = {key: value for key, value in config.items() if key not in ("model_type", "transformers_version", "dtype")}
    resolved = resolve(grounded(config["model_type"], given), Basis(1))
    return {name: ("F32", list(shape)) for name, shape in parameter_table(resolved).items()}


def safetensors(tensors: Tensors, fill: bytes = b"\0") -> bytes:
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + fill * at


def write_model(folder: Path, config: Mapping[str, Any], tensors: Tensors | None = None) -> Path:
    """Write a folder of one file; without `tensors` of those that the config asks for."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(tensors_of(config) if tensors is None else tensors))
    return folder
