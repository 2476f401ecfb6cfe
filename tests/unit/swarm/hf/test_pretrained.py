"""What headers and config tell of a model is said before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import InvalidConfig, InvalidModel
from swarm.hf.pretrained import ground, look_at_model
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.model.state import wanted_names
from tests.support.model_folders import Tensors, tensors_of, write_model

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 260}
LLAMA = SIZES | {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 260, "n_positions": 16}

EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


def job(path: Path) -> JobSpec:
    model = {"id": str(path), "tokenizer": "byte"}
    return ground(parse_job({"name": "t", "model": model, "data": {"source": "x", "sequence_length": 8}}))


def look(path: Path) -> tuple[str, ...]:
    return look_at_model(resolve(job(path), Basis(257)))


def folder(path: Path, config: dict[str, Any], edit: Callable[[Tensors], object] = lambda tensors: None) -> Path:
    """A folder of the tensors that this config needs, once `edit` has changed what they are."""
    tensors = tensors_of(config)
    edit(tensors)
    return write_model(path, config, tensors)


def renamed(before: str, after: str) -> Callable[[Tensors], None]:
    def edit(header: Tensors) -> None:
        for name in list(header):
            if name.startswith(before):
                header[after + name.removeprefix(before)] = header.pop(name)

    return edit


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_weights_of_the_config_pass_without_a_word(config: dict[str, Any], tmp_path: Path) -> None:
    assert look(folder(tmp_path / "hf", config)) == ()


def test_a_head_in_the_file_of_a_tied_model_is_its_own_unless_it_is_the_embedding(tmp_path: Path) -> None:
    """It was not needed, whatever its values: another model was trained than the file held."""
    tied = LLAMA | {"tie_word_embeddings": True}
    path = folder(tmp_path / "hf", tied, lambda tensors: tensors.update({HEAD: ("F32", [260, 8])}))
    assert job(path).tied
    assert look(path) == ()
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\x80\x3f")  # 1.0, in the head's last place
    assert not job(path).tied
    (line,) = look(path)
    assert line.startswith(f"{HEAD} of model/model.safetensors differs from {EMBEDDING}, to which config.json ties it")
    assert ground(job(path)) == job(path)


@pytest.mark.parametrize(
    ("config", "said", "words"),
    [
        (LLAMA, {"num_hidden_layers": 3}, "says num_hidden_layers = 3, and its weights have 2"),
        (LLAMA, {"num_hidden_layers": 1}, "says num_hidden_layers = 1, and its weights have 2"),
        (LLAMA, {"hidden_size": 16}, "says hidden_size = 16, and its weights have 8"),
        (LLAMA, {"vocab_size": 300}, r"shape \[260, 8\], this model needs \[300, 8\] .*vocab_size = 300"),
        (LLAMA, {"attention_bias": True}, r"lacks tensor model.layers.0.self_attn.q_proj.bias"),
        (LLAMA, {"model_type": "bert"}, "'bert', which this version cannot train"),
        (LLAMA, {"model_type": None}, "model_type = None"),
        (LLAMA, {"model_type": ["llama"]}, r"model_type = \['llama'\]"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantised"),
        (LLAMA, {"hidden_size": None}, "hidden_size = None"),
        (LLAMA, {"hidden_size": "36"}, "hidden_size = '36'"),
        (LLAMA, {"rope_parameters": {"rope_type": "linear"}}, "of the type linear without"),
        (LLAMA, {"hidden_act": "sine"}, "'sine', which Transformers does not know"),
        (GPT2, {"n_layer": 9}, "says num_hidden_layers = 9, and its weights have 2"),
        (GPT2, {"n_embd": 4}, "says n_embd = 4, and its weights have 8"),
        (GPT2, {"n_positions": 32}, "says n_positions = 32, and the weights have 16 rows"),
    ],
)
def test_weights_of_another_model_are_refused(
    config: dict[str, Any], said: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """They were found out when a stage server loaded them, after all had been tokenised and sent."""
    path = folder(tmp_path / "hf", config)
    whole = {key: value for key, value in (config | said).items() if value is not None}
    (path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(InvalidConfig, match=words):
        look(path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda h: h.pop(UP), f"lacks tensor {UP} .looked in model/model.safetensors"),
        (
            lambda h: h.pop(HEAD),
            "lacks tensor lm_head.weight .* tie_word_embeddings = true in config.json",
        ),
        (lambda h: h.update({UP: ("F32", [8, 12])}), f"{UP} .* has shape \\[8, 12\\], this model needs \\[12, 8\\]"),
        (lambda h: h.update({UP: ("I8", [12, 8])}), f"{UP} .* is I8, readable are F64, .*not quantised"),
        (lambda h: h.update({EMBEDDING: ("F32", [320, 8])}), r"has shape \[320, 8\], this model needs \[260, 8\]"),
        (lambda h: h.update({HEAD: ("F32", [300, 8])}), r"shape \[300, 8\], this model needs"),
        (lambda h: h.update({"lm_head.bias": ("F32", [260])}), "which the lm_head of a llama"),
        (lambda h: h.update({"model.norm.lora_A.weight": ("F32", [1, 8])}), "merge the adapter"),
        (renamed("model.norm.", "base_model.model.model.norm.base_layer."), "merge the adapter"),
        (lambda h: h.update({"model.norm.bias": ("F32", [8])}), "holds tensor model.norm.bias, which the model.norm"),
        (lambda h: h.update({"norm.weight": h["model.norm.weight"]}), "both hold model.norm.weight"),
        (renamed("", "_orig_mod."), "a wrapper put '_orig_mod.' before the names"),
        (renamed("", "module."), "a wrapper put 'module.' before the names"),
        (renamed("model.", "base_model.model.model."), "a wrapper put 'base_model.model.' before the names"),
        (renamed("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.qweight"), "not quantised or packed"),
        (renamed("model.layers.1.mlp.up_proj.", "model.layers.1.mlp.up_proj.base_layer."), "merge the adapter"),
    ],
)
def test_tensors_that_do_not_fit_are_named_with_their_cause(
    edit: Callable[[Tensors], object], words: str, tmp_path: Path
) -> None:
    path = folder(tmp_path / "hf", LLAMA, edit)
    with pytest.raises(InvalidModel, match=words):
        look(path)


def test_what_no_parameter_needs_is_left_out_with_a_line(tmp_path: Path) -> None:
    """The value head that training by reinforcement adds refused the whole model, after it had been sent."""
    extra: Tensors = {f"v_head.{name}": ("F32", [8]) for name in ("a", "b", "c", "d")}
    (line,) = look(folder(tmp_path / "hf", LLAMA, lambda header: header.update(extra)))
    assert line == "left out, as no parameter of a llama model needs it: v_head.a, v_head.b, v_head.c and 1 more"


def test_float64_is_read_with_a_line(tmp_path: Path) -> None:
    path = folder(tmp_path / "hf", LLAMA, lambda header: header.update({UP: ("F64", [12, 8])}))
    assert look(path) == (f"F64 becomes float32, as in Transformers: {UP}",)


def test_a_table_that_is_not_the_causal_mask_is_left_out_with_a_line(tmp_path: Path) -> None:
    """Tables called attn.bias were dropped by their name alone."""
    tables: Tensors = {"h.0.attn.bias": ("F32", [1, 1, 16, 16]), "h.1.attn.bias": ("F32", [16])}
    lines = look(folder(tmp_path / "hf", GPT2, lambda header: header.update(tables)))
    assert lines == (
        "left out, as no parameter of a gpt2 model needs it: h.1.attn.bias",
        "left out: h.0.attn.bias of model/model.safetensors, which is not the causal mask; Transformers has no use for "
        "it either",
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "more than max_position_embeddings = 4: without rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 1.5}}, "more than the 6 positions to which linear scaling"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ""),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 3}},
            "more than the 6 positions to which yarn scaling",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2}}, ""),
    ],
)
def test_sequences_beyond_rotary_positions_are_a_line_and_no_error(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A model with the scaling that its makers describe was refused for longer sequences."""
    lines = look(folder(tmp_path / "hf", LLAMA | {"max_position_embeddings": 4} | config))
    assert len(lines) == bool(words)
    assert words in "".join(lines)


@pytest.mark.parametrize(("is_tied", "stages"), [(False, [2]), (True, [0, 2])])
def test_only_stages_with_the_head_ask_the_hub_for_its_file(is_tied: bool, stages: list[int]) -> None:
    """Each stage server downloaded the file of the head, a gigabyte and more of a large model."""
    config = {"num_hidden_layers": 3, "vocab_size": 260, "tie_word_embeddings": is_tied}
    job = {"name": "t", "model": {"config": config}, "data": {"source": "x"}, "pipeline": {"stages": 3}}
    spec = resolve(parse_job(job), Basis(257))
    assert [stage for stage in range(3) if "lm_head.weight" in wanted_names(spec, stage)] == stages
