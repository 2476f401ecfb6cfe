"""swarm.hf.model_folder: the hash that names a model, and the small files of its folder."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from swarm.errors import ReplicaDiverged
from swarm.hf.model_folder import model_folder_files, safetensors_index, shard_name, weights_sha256
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import parse_job
from swarm.wire.messages import ParameterHash

A = ParameterHash("a", "float32", (2, 3), "00")
B = ParameterHash("b", "float32", (4,), "01")


def test_hash_ignores_order_and_counts_tied_weights_once() -> None:
    assert weights_sha256([A, B]) == weights_sha256([B, A]) == weights_sha256([A, B, A])


@pytest.mark.parametrize(
    "other",
    [
        ParameterHash("c", "float32", (2, 3), "00"),
        ParameterHash("a", "float64", (2, 3), "00"),
        ParameterHash("a", "float32", (3, 2), "00"),
        ParameterHash("a", "float32", (2, 3), "ff"),
    ],
)
def test_hash_covers_name_dtype_shape_and_bytes(other: ParameterHash) -> None:
    assert weights_sha256([other, B]) != weights_sha256([A, B])


def test_tied_copies_that_differ_are_an_error() -> None:
    with pytest.raises(ReplicaDiverged, match="the name a"):
        weights_sha256([A, ParameterHash("a", "float32", (2, 3), "ff")])


def test_index_names_the_file_of_every_parameter() -> None:
    index = json.loads(safetensors_index({shard_name(0, 2): [A], shard_name(1, 2): [B]}))
    assert index["metadata"]["total_size"] == 4 * (6 + 4)
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    assert shard_name(0, 1) == "model.safetensors"


def test_config_file_describes_the_model_that_was_trained() -> None:
    spec = parse_job(
        {
            "name": "t",
            "model": {"config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}},
            "data": {"source": "x"},
        }
    )
    files = model_folder_files(resolve(spec, Basis(257, stages=2)))
    config = json.loads(files["config.json"])
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["model_type"], config["vocab_size"], config["dtype"]) == ("llama", 257, "float32")
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 256, "eos_token_id": 256}


def test_what_the_scheduler_and_the_client_use_loads_no_torch() -> None:
    modules = "swarm.hf.model_folder, swarm.job.partition, swarm.job.schedule, swarm.data"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
