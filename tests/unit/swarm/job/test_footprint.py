"""The estimate of a stage's memory is held to what real stages keep: never too low, never far too high."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarm.job.families import FAMILIES
from swarm.job.footprint import graph_bytes, memory_by_stages, memory_text, stage_footprint, stage_parameters
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.model.stage import Stage
from swarm.text import size
from swarm.types import Microbatch

PLAN = Path(__file__).parents[4] / "docs" / "plan-a-run.md"
# The shapes of Llama 3.2 1B and Llama 3.1 8B.
SHAPES = {
    "1 B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8 B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False},
}


def spec_of(family: str = "llama", dtype: str = "float32", **changes: dict[str, object]) -> JobSpec:
    config: dict[str, object] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    if family == "gpt2":
        config["n_inner"] = 160
    else:
        config["intermediate_size"] = 160
    if family == "gemma2":
        config["head_dim"] = 16
    if family not in ("gpt2", "gpt_neox"):
        config["num_key_value_heads"] = 2
    values: dict[str, dict[str, object]] = {
        "model": {"family": family, "config": config, "dtype": dtype},
        "data": {"source": "x", "sequence_length": 64},
        "training": {"global_batch_sequences": 64, "microbatch_sequences": 2},
        "pipeline": {"split": (2, 1)},
    }
    for section, more in changes.items():
        values[section] |= more
    return resolve(parse_job({"name": "x", **values}), vocabulary_size=300, stages_if_auto=2)


def kept_bytes(stage: Stage, vocabulary: int) -> int:
    """Bytes that autograd saves of one microbatch, beside the parameters, each storage once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in stage.module.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    size, length, width = stage.boundary_shape()
    ids = torch.randint(0, vocabulary, (size, length))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage.forward(Microbatch(0, 0, 0), 0, portion=0, x=torch.randn(size, length, width), tokens=ids, targets=ids)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16_parameters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_are_estimated_a_little_too_high(family: str, dtype: str) -> None:
    spec = spec_of(family, dtype)
    for number, layers in enumerate((2, 1)):
        stage = Stage(spec, number, torch.device("cpu"))
        measured = kept_bytes(stage, 300)
        assert 1.0 <= graph_bytes(spec, layers, last=number == 1) / measured < 1.6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16_parameters"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_graphs_with_dropout_are_estimated_a_little_too_high(family: str, dtype: str) -> None:
    keys = {"gpt2": ["attn_pdrop", "resid_pdrop", "embd_pdrop"], "gpt_neox": ["attention_dropout", "hidden_dropout"]}
    spec = spec_of(family, dtype)
    config = spec.model.config | dict.fromkeys(keys.get(family, ["attention_dropout"]), 0.1)
    dropping = spec.model_copy(update={"model": spec.model.model_copy(update={"config": config})})
    for number, layers in enumerate((2, 1)):
        measured = kept_bytes(Stage(dropping, number, torch.device("cpu")), 300)
        assert measured > kept_bytes(Stage(spec, number, torch.device("cpu")), 300)
        assert 1.0 <= graph_bytes(dropping, layers, last=number == 1) / measured < 1.7


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted(family: str) -> None:
    spec = spec_of(family)
    for number, layers in enumerate((2, 1)):
        module = Stage(spec, number, torch.device("cpu")).module
        held = sum(parameter.numel() for parameter in module.parameters())
        assert held <= stage_parameters(spec, layers, first=number == 0, last=number == 1) < 1.03 * held


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16_parameters"])
def test_what_a_stage_holds_between_steps_is_within_the_estimate(dtype: str, staleness: int) -> None:
    training = {"optimizer": "adamw", "reproducible": True}
    spec = spec_of(dtype=dtype, training=training, pipeline={"staleness": staleness})
    stage = Stage(spec, 0, torch.device("cpu"))
    estimate = stage_footprint(spec, 2, 0, 2)
    held = [*stage.weights.newest().values()]
    held += [parameter for buffer in stage.weights.buffers for parameter in buffer.module.parameters()]
    weights = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
    state = sum(
        tensor.nbytes
        for name, _ in stage.module.named_parameters()
        for tensor in stage._optimizer.state_of(name).values()
    )
    assert weights <= estimate.weights < 1.03 * weights
    assert state <= 1.01 * estimate.optimizer


def test_what_costs_memory_raises_the_estimate_and_what_saves_it_lowers_it() -> None:
    plain = stage_footprint(spec_of(), 2, 0, 2).total_bytes

    def of(replicas: int = 1, layers: int = 2, **changes: dict[str, object]) -> int:
        return stage_footprint(spec_of(**changes), layers, 0, 2, replicas=replicas).total_bytes

    assert of(layers=3) > plain
    assert of(training={"reproducible": True}) > plain
    assert of(training={"microbatch_sequences": 4}) > plain
    assert of(pipeline={"max_in_flight": 64}) > plain > of(pipeline={"max_in_flight": 1})
    assert of(model={"recompute": True}) < plain
    assert of(model={"dtype": "bfloat16_parameters"}) < of(model={"dtype": "bfloat16"}) < plain
    assert of(pipeline={"staleness": 0}) < plain
    assert of(training={"optimizer": "sgd"}) < plain
    assert of(pipeline={"compression": "int8"}) < plain < of(pipeline={"compression": "none"})
    assert of(replicas=4) < plain
    assert of(training={"optimizer": "muon", "muon_products": "exact"}) > of(training={"optimizer": "muon"})
    assert stage_footprint(spec_of(), 2, 1, 2).graphs < stage_footprint(spec_of(), 2, 0, 2).graphs


def test_the_log_of_past_commits_is_part_of_a_stages_memory() -> None:
    """A stage server held 1.5 GB of averaged gradients that the estimate of its stage did not know."""
    spec = spec_of()
    for number, layers in enumerate((2, 1)):
        stage = Stage(spec, number, torch.device("cpu"))
        held = 4 * sum(parameter.numel() for parameter in stage.module.parameters())  # of one commit
        found = stage_footprint(spec, layers, number, 2)
        assert 2 * held <= found.log <= 2.2 * held, "of the two newest"
        assert found.total_bytes - replace(found, log=0).total_bytes >= found.log


def _largest_gib(name: str, stages: int, microbatch: int, recompute: bool) -> float:
    spec = parse_job(
        {
            "name": "x",
            "model": {
                "config": SHAPES[name] | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
                "dtype": "bfloat16",
                "recompute": recompute,
            },
            "data": {"source": "x", "sequence_length": 1024},
            "training": {"global_batch_sequences": 256, "microbatch_sequences": microbatch},
            "pipeline": {"stages": stages, "overlap": 0},
        }
    )
    resolved = resolve(spec, vocabulary_size=128_256, stages_if_auto=stages)
    split = resolved.pipeline.split
    sizes = (stage_footprint(resolved, int(count), stage, stages) for stage, count in enumerate(split))
    return max(size.total_bytes for size in sizes) / 2**30


def test_the_table_for_those_who_plan_a_run_has_these_estimates() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PLAN.read_text(encoding="utf-8").splitlines()
        if line.startswith(("| 1 B,", "| 8 B,"))
    ]
    assert len(rows) == 4
    for what, *cells in rows:
        microbatch, recompute = (1, True) if "recompute = true" in what else (8, False)
        for place, cell in enumerate(cell for cell in cells if cell):
            assert int(cell) == round(_largest_gib(what[:3], 2**place, microbatch, recompute)), (what, 2**place)


def test_people_are_told_what_the_largest_stage_takes() -> None:
    spec = spec_of()
    most = max(stage_footprint(spec, layers, stage, 2).total_bytes for stage, layers in enumerate((2, 1)))
    assert memory_text(spec) == f"stages take up to {size(most)} of memory, with microbatches of 2 sequences"
    one = stage_footprint(spec, 3, 0, 1).total_bytes
    assert memory_by_stages(spec) == f"the largest stage takes about {size(one)} with 1 stage, {size(most)} with 2"
