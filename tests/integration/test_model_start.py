"""A model folder of Transformers goes in, cut anywhere, and gives the library's logits; a broken one gives a reason."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from swarm.errors import InvalidConfig, InvalidModel, SwarmError
from swarm.hf.pretrained import WeightFile, ground, weight_files
from swarm.job.course import PLAIN
from swarm.job.partition import balanced_split, flops_per_token
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, spec_from_json
from swarm.model.families import parameter_shapes
from swarm.model.stage import Stage
from swarm.model.state import InitialState, StateReading, part_file, read_files, read_span
from swarm.reference.trainer import build_stages, save_folder, sha256_of, train_local, train_step
from swarm.types import Microbatch
from swarm.wire.messages import StateFile
from tests.support.simulated import stale
from tests.support.specs import batches_of, quick_spec

CPU = torch.device("cpu")
T = 16
VOCABULARY = 260  # more than the tokenizer's
BASE = {"vocab_size": VOCABULARY, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3}
GATED = BASE | {"intermediate_size": 50, "num_key_value_heads": 1, "max_position_embeddings": 64}
WINDOW = {"sliding_window": 5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GATED | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}),
    "llama-tied": ("llama", GATED | {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 10}),
    "mistral": ("mistral", GATED | WINDOW | {"head_dim": 10}),
    "qwen2": ("qwen2", GATED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", GATED | {"head_dim": 10, "layer_types": ["full_attention"] * 3}),
    "gemma2": ("gemma2", GATED | WINDOW | {"head_dim": 10, "query_pre_attn_scalar": 20}),
    "gpt2": ("gpt2", {"vocab_size": VOCABULARY, "n_embd": 36, "n_layer": 3, "n_head": 3, "n_positions": 64}),
    "gpt_neox": ("gpt_neox", BASE | {"intermediate_size": 50, "rotary_pct": 0.5, "max_position_embeddings": 64}),
}


def save(folder: Path, model: str = "llama", *, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Any:
    """A model of the library with nothing at its neutral value, saved; evaluating."""
    family, fields = MODELS[model]
    torch.manual_seed(1)
    twin: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    twin.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return twin.eval()


def job(folder: Path | str, *, stages: int = 1, config: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    """A job that starts from `folder`; changes are "section__key" values."""
    model = {"model__id": str(folder), "model__config": config or {}, "model__tokenizer": "byte"}
    return quick_spec(pipeline__stages=stages, **(model | changes))


def spec_of(folder: Path | str, **changes: Any) -> JobSpec:
    return resolve(ground(job(folder, **changes)), Basis(257))


def logits_of(stages: list[Stage], tokens: Tensor) -> Tensor:
    hidden = tokens.long()
    with torch.no_grad():
        for stage in stages:
            hidden = stage.module(hidden)
    return hidden


# What goes in ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_folder_of_the_library_gives_its_logits_at_any_cut(model: str, tmp_path: Path) -> None:
    twin = save(tmp_path / "hf", model, shard="20KB" if model != "gpt2" else "5GB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (model != "gpt2")
    shas = set()
    for count in (1, 2, 3):
        spec = spec_of(tmp_path / "hf", stages=count)
        assert spec.model.family == MODELS[model][0]
        assert spec.model.init == "pretrained"
        stages = build_stages(spec, CPU)
        tokens, targets = (torch.from_numpy(array) for array in batches_of(spec).microbatch(0, 0))
        expected = twin(input_ids=tokens.long()).logits.detach()
        assert torch.equal(logits_of(stages, tokens), expected)
        shas.add(sha256_of(stages))

        x, loss = None, 0.0
        for stage in stages:
            x, loss = stage.forward(Microbatch(0, 0, 0), 0, portion=0, x=x, tokens=tokens, targets=targets)
        if model != "gpt2":  # whose config.json asks for dropout
            summed = nn.functional.cross_entropy(expected.flatten(0, 1), targets.long().flatten(), reduction="sum")
            assert loss == float(summed)
    assert len(shas) == 1


@pytest.mark.parametrize("model", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_what_was_trained_loads_as_the_same_architecture(model: str, tmp_path: Path) -> None:
    save(tmp_path / "hf", model)
    spec = spec_of(tmp_path / "hf", stages=2)
    before = sha256_of(build_stages(spec, CPU))
    trained = train_local(spec, batches_of(spec))
    assert trained.sha256 != before
    save_folder(trained.stages, spec, tmp_path / "out")
    twin, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", local_files_only=True, output_loading_info=True
    )
    assert not any(loading.values()), loading
    given, written = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "out"))
    for name in ("transformers_version", "dtype", "architectures"):
        given.pop(name, None)
    assert given.items() <= written.items()
    assert written["dtype"] == "float32"
    tokens = torch.from_numpy(batches_of(spec).microbatch(5, 0)[0])
    assert torch.equal(logits_of(list(trained.stages), tokens), twin.eval()(input_ids=tokens.long()).logits.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_become_float32_masters(dtype: torch.dtype, tmp_path: Path) -> None:
    twin = save(tmp_path / "hf", dtype=dtype)
    (stage,) = build_stages(spec_of(tmp_path / "hf"), CPU)
    ours = dict(stage.module.named_parameters())
    for name, parameter in twin.named_parameters():
        assert ours[name].dtype == torch.float32
        assert torch.equal(ours[name], parameter.detach().float()), name


def test_gpt2_files_without_the_trunks_name_and_with_old_tables_load(tmp_path: Path) -> None:
    twin = save(tmp_path / "hf", "gpt2")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    assert "h.0.attn.c_attn.bias" in tensors
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool) for layer in range(3)}
    tensors |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(3)}
    save_file(tensors, path)
    tokens = torch.arange(T).unsqueeze(0)
    stages = build_stages(spec_of(tmp_path / "hf", stages=3), CPU)
    assert torch.equal(logits_of(stages, tokens), twin(input_ids=tokens).logits.detach())


def test_a_tied_model_needs_no_head_and_takes_a_copy_of_the_embedding_for_it(tmp_path: Path) -> None:
    save(tmp_path / "hf", "llama-tied")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"].clone()
    assert "lm_head.weight" not in tensors
    plain = sha256_of(build_stages(spec_of(tmp_path / "hf", stages=2), CPU))
    for dtype in (torch.float32, torch.float64):
        save_file(tensors | {"lm_head.weight": embedding.to(dtype)}, path)
        assert sha256_of(build_stages(spec_of(tmp_path / "hf", stages=2), CPU)) == plain
    save_file({"lm_head.weight": tensors.pop("model.embed_tokens.weight"), **tensors}, path)
    assert sha256_of(build_stages(spec_of(tmp_path / "hf", stages=2), CPU)) == plain, "the head alone is the embedding"


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_server_refuses_a_head_that_a_tied_job_would_lose(stage: int, tmp_path: Path) -> None:
    """The head of a tied model was not needed whatever its values: another model was trained than the file held."""
    save(tmp_path / "hf", "llama-tied")
    tied = spec_of(tmp_path / "hf", stages=2)
    path = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(path) | {"lm_head.weight": torch.zeros(VOCABULARY, 36)}, path)
    with pytest.raises(InvalidModel, match=r"lm_head.weight of .* differs from model.embed_tokens.weight"):
        read_files(tied, stage, weight_files(tied))


def test_random_builds_the_same_architecture_from_the_seed(tmp_path: Path) -> None:
    save(tmp_path / "hf", "mistral")
    (tmp_path / "hf" / "model.safetensors").unlink()
    seeds = [spec_of(tmp_path / "hf", model__init="random", training__seed=seed) for seed in (0, 0, 1)]
    first, again, other = (sha256_of(build_stages(spec, CPU)) for spec in seeds)
    assert first == again != other
    assert parameter_shapes(seeds[0]).keys() == parameter_shapes(seeds[2]).keys()


# How much is read -----------------------------------------------------------------------------------------------------


def read(spec: JobSpec, stage: int, folder: Path) -> tuple[StateReading, int]:
    """Read a stage's state as a stage server does; gives the reading, and how many spans it asked for."""
    files = {file.path: file for file in weight_files(spec)}
    assert {file.location.parent for file in files.values()} == {folder}
    reading = StateReading(spec, stage, [StateFile(path, file.size_bytes, "") for path, file in files.items()])
    count = 0
    for span in reading.spans():
        count += 1
        for chunk in read_span(files[span.path].location, span.start, span.stop):
            for byte in range(0, len(chunk), 1000):
                reading.feed(chunk[byte : byte + 1000])
    return reading, count


@pytest.mark.parametrize("shard", ["20KB", "5GB"])
def test_a_stage_reads_headers_and_its_own_tensors_in_few_spans_and_no_other_byte(shard: str, tmp_path: Path) -> None:
    save(tmp_path / "hf", "llama", dtype=torch.bfloat16, shard=shard)
    spec = spec_of(tmp_path / "hf", stages=3)
    paths = [file.location for file in weight_files(spec)]
    assert len(paths) == 1 if shard == "5GB" else len(paths) > 3
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in paths)
    for stage in range(3):
        reading, _ = read(spec, stage, tmp_path / "hf")
        elements = sum(torch.Size(shape).numel() for shape in parameter_shapes(spec, stage).values())
        assert reading.read_bytes == headers + 2 * elements
        assert reading.total_bytes == sum(path.stat().st_size for path in paths)
        assert reading.state().weights.keys() == parameter_shapes(spec, stage).keys()
    whole = spec_of(tmp_path / "hf")
    reading, spans = read(whole, 0, tmp_path / "hf")
    assert spans == 3 * len(paths), "of each file its length, its header, and its tensors in one"
    assert sha256_of([Stage(whole, 0, CPU, reading.state())]) == sha256_of(build_stages(whole, CPU))


# A checkpoint's state -------------------------------------------------------------------------------------------------


def checkpoint(spec: JobSpec, stages: list[Stage], folder: Path) -> None:
    """Write what the stages hold as a checkpoint's files: the tests' own writer."""
    weights: dict[str, Tensor] = {}
    files: dict[str, dict[str, Tensor]] = {}
    for stage in stages:
        buffers = [dict(buffer.module.named_parameters()) for buffer in stage.weights.buffers]
        old = [index for index, buffer in enumerate(stage.weights.buffers) if buffer.version != stage.version]
        previous = buffers[old[0]] if old else {}
        for name, parameter in stage.module.named_parameters():
            if spec.tied and name == "lm_head.weight":
                continue
            weights[name] = parameter.detach().clone()
            file = files.setdefault(f"optimizer/{part_file(spec, name)}", {})
            file |= {f"{name}@{key}": value.clone() for key, value in stage._optimizer.state_of(name).items()}
            if spec.pipeline.staleness:
                file[f"{name}@previous"] = previous[name].detach().clone()
    (folder / "model").mkdir(parents=True)
    (folder / "optimizer").mkdir()
    save_file(weights, folder / "model" / "model.safetensors")
    for path, tensors in files.items():
        save_file(tensors, folder / path)


def listed(folder: Path) -> list[WeightFile]:
    paths = sorted([*folder.glob("model/*.safetensors"), *folder.glob("optimizer/*")])
    return [WeightFile(str(path.relative_to(folder)), path, path.stat().st_size) for path in paths]


@pytest.mark.parametrize(
    ("tied", "staleness", "optimizer"),
    [(True, 1, "adamw"), (False, 0, "adamw"), (False, 1, "muon"), (True, 0, "sgd")],
)
def test_training_goes_on_from_a_checkpoint_at_another_cut_with_the_same_bits(
    tied: bool, staleness: int, optimizer: str, tmp_path: Path
) -> None:
    save(tmp_path / "hf", "llama-tied" if tied else "llama")
    changes = {"training__steps": 4, **stale(staleness), "training__optimizer": optimizer}
    whole = spec_of(tmp_path / "hf", stages=2, **changes)
    batches = batches_of(whole)
    stages = build_stages(whole, CPU)
    for step in range(2):
        train_step(stages, whole, batches, PLAIN.at(step))
    checkpoint(whole, stages, tmp_path / "saved")
    for step in range(2, 4):
        train_step(stages, whole, batches, PLAIN.at(step))
    for count in (1, 3):
        spec = spec_of(tmp_path / "hf", stages=count, **changes)
        files = listed(tmp_path / "saved")
        again = [Stage(spec, stage, CPU, read_files(spec, stage, files, 2)) for stage in range(count)]
        assert [stage.version for stage in again] == [2] * count
        for step in range(2, 4):
            train_step(again, spec, batches, PLAIN.at(step))
        assert sha256_of(again) == sha256_of(stages)


# Bad folders; configs and headers are in unit/swarm/hf/test_pretrained.py and property/test_safetensors_header.py -----


def test_a_checkpoint_whose_files_are_damaged_missing_or_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "hf")
    spec = spec_of(tmp_path / "hf", stages=2)
    stages = build_stages(spec, CPU)
    train_step(stages, spec, batches_of(spec), PLAIN.at(0))
    checkpoint(spec, stages, tmp_path / "saved")
    files = listed(tmp_path / "saved")
    where = {file.path: file.location for file in files}
    hashes = {path: hashlib.sha256(location.read_bytes()).hexdigest() for path, location in where.items()}

    def load(wrong: str) -> InitialState:
        """The last stage's state, where a file is another than the checkpoint says."""
        said = [StateFile(file.path, file.size_bytes, (hashes | {wrong: "0" * 64})[file.path]) for file in files]
        reading = StateReading(spec, 1, said)
        for span in reading.spans():
            for chunk in read_span(where[span.path], span.start, span.stop):
                reading.feed(chunk)
        return reading.state()

    assert load("").optimizer
    load("optimizer/embed.safetensors")  # another stage's
    for path in ("optimizer/layer-0002.safetensors", "optimizer/head.safetensors"):
        with pytest.raises(InvalidModel, match=f"{path} has sha256"):
            load(path)
    other = spec_of(tmp_path / "hf", stages=2, training__optimizer="sgd")
    with pytest.raises(InvalidModel, match="sgd keeps"):
        Stage(other, 1, CPU, read_files(other, 1, files))
    with pytest.raises(InvalidModel, match=r"lacks optimizer/head\.safetensors"):
        read_files(spec, 1, [file for file in files if "head" not in file.path])
    path = where["optimizer/head.safetensors"]
    save_file({name: value for name, value in load_file(path).items() if "@previous" not in name}, path)
    with pytest.raises(InvalidModel, match="previous weights, but not of"):
        read_files(spec, 1, listed(tmp_path / "saved"))


def as_index(folder: Path, **weight_map: Any) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
    "half a letter": (lambda f: (f / "config.json").write_text('{"model_type": "\\ud800"}'), "is no JSON"),
    "pickle only": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "only pytorch_model.bin: pickled",
    ),
    "pickle renamed": (lambda f: torch.save({}, f / "model.safetensors"), "is no safetensors file"),
    "short": (lambda f: os.truncate(f / "model.safetensors", 9999), r"ends at byte .*, before tensor"),
    "index of pickles": (lambda f: as_index(f, a="pytorch_model-00001.bin"), "no safetensors file beside it"),
    "index missing file": (lambda f: as_index(f, a="model-00001.safetensors"), "lacks model-00001.safetensors"),
    "file twice": (
        lambda f: (
            shutil.copy(f / "model.safetensors", f / "b.safetensors"),
            as_index(f, x="a.safetensors", y="b.safetensors"),
        ),
        "both hold",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_folder_is_refused_with_the_reason(bad: str, tmp_path: Path) -> None:
    save(tmp_path / "hf")
    spoil, words = BAD[bad]
    spoil(tmp_path / "hf")
    with pytest.raises(InvalidConfig, match=words):
        build_stages(spec_of(tmp_path / "hf"), CPU)


def test_an_id_that_is_no_folder_says_so(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "./none", "a/b/c", "~/none-such"):
        with pytest.raises(InvalidModel, match="there is no such folder"):
            ground(job(name))
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidModel, match="is a file"):
        ground(job(tmp_path / "file"))


# The job file ---------------------------------------------------------------------------------------------------------


def test_beside_an_id_only_dropout_and_positions_may_be_set(tmp_path: Path) -> None:
    save(tmp_path / "hf")
    spec = spec_of(tmp_path / "hf", config={"attention_dropout": 0.25})
    assert spec.model.config["attention_dropout"] == 0.25
    assert spec.model.config["rope_parameters"]["factor"] == 2.0
    assert ground(job(tmp_path / "hf", config={"hidden_size": 36})).layers == 3  # the same
    for fields in ({"hidden_size": 40}, {"num_hidden_layers": 2}, {"rope_theta": 1e6}, {"vocab_size": 257}):
        with pytest.raises(InvalidConfig, match=f"{next(iter(fields))} cannot be set beside model.id"):
            ground(job(tmp_path / "hf", config=fields))
    with pytest.raises(InvalidConfig, match="attention_dropout"):
        spec_of(tmp_path / "hf", config={"attention_dropout": 1.5})
    with pytest.raises(InvalidConfig, match=r'model\.family = "gpt2"'):
        ground(job(tmp_path / "hf", model__family="gpt2"))
    longer = spec_of(tmp_path / "hf", config={"rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert longer.model.config["rope_parameters"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 5000.0,
        "original_max_position_embeddings": 64,
    }
    assert ground(longer).model.config == longer.model.config
    save(tmp_path / "gpt2", "gpt2")
    with pytest.raises(SwarmError, match="allows 64 positions"):
        spec_of(tmp_path / "gpt2", data__sequence_length=65)
    with pytest.raises(InvalidConfig, match="cannot be set beside"):
        spec_of(tmp_path / "gpt2", config={"max_position_embeddings": 65})


def test_a_grounded_and_resolved_spec_is_itself_again(tmp_path: Path) -> None:
    for model in MODELS:
        save(tmp_path / model, model)
        once = ground(job(tmp_path / model))
        assert ground(once) == once
        spec = resolve(once, Basis(257, stages=2))
        assert resolve(spec, Basis(257)) == spec
        assert spec_from_json(spec.model_dump_json()) == spec
        layer, head = flops_per_token(spec)
        assert layer > 0
        assert head == 36 * VOCABULARY
        assert sum(balanced_split(spec, 3)) == 3


def test_dropout_that_a_config_leaves_out_is_the_librarys(tmp_path: Path) -> None:
    save(tmp_path / "hf", "gpt2")
    path = tmp_path / "hf" / "config.json"
    path.write_text(path.read_text().replace('"resid_pdrop"', '"other"'))
    assert spec_of(tmp_path / "hf").model.config["resid_pdrop"] == 0.1
