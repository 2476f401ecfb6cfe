"""Every family is the library's model, bit for bit, wherever it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from swarm.job.families import FAMILIES, HEAD
from swarm.job.model_config import hugging_face_config
from swarm.job.spec import JobSpec
from swarm.reference.trainer import build_stages, save_folder, train_local
from tests.support.scenes import resolved
from tests.support.specs import batches_of, quick_spec
from tests.support.unsplit_model import assert_equals_unsplit, loss_of

CPU = torch.device("cpu")
T = 16
# Odd sizes on purpose: no tensor ends where a vector register does. One key/value head for three query heads.
BASE = {"hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3}
GATED = BASE | {"intermediate_size": 50, "num_key_value_heads": 1}
GPT2 = {"n_embd": 36, "n_layer": 3, "n_head": 3}
NEOX = BASE | {"intermediate_size": 50, "rotary_pct": 0.5}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SHORT, LONG = {"sliding_window": 5}, {"sliding_window": T + 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GATED),
    "llama-tied-biased": ("llama", GATED | TIED | {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", GATED | LONG | {"head_dim": 10}),
    "mistral-window": ("mistral", GATED | TIED | SHORT),
    "qwen2": ("qwen2", GATED),
    "qwen2-window": ("qwen2", GATED | TIED | SHORT | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", GATED | {"head_dim": 10}),
    "qwen3-window": ("qwen3", GATED | TIED | SHORT | {"use_sliding_window": True, "max_window_layers": 0}),
    "gemma2": ("gemma2", GATED | {"head_dim": 10, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5}),
    "gemma2-untied-window": ("gemma2", GATED | UNTIED | SHORT),
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied": ("gpt2", GPT2 | UNTIED | {"n_inner": 50, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox-tied-serial": ("gpt_neox", NEOX | TIED | {"use_parallel_residual": False, "attention_bias": False}),
}
TIES = {"llama-tied-biased", "mistral-window", "qwen2-window", "qwen3-window", "gemma2", "gpt2", "gpt_neox-tied-serial"}


def spec_of(model: str, stages: int, *, reproducible: bool = True, dtype: str = "float32", **config: Any) -> JobSpec:
    family, fields = MODELS[model]
    spec = quick_spec(
        model__family=family,
        model__dtype=dtype,
        model__config=fields | config,
        training__reproducible=reproducible,
        pipeline__stages=stages,
    )
    return resolved(spec)


@torch.no_grad()
def perturb(stages: list[Any], tied: str | None) -> None:
    """Move every parameter off its start: zero biases and neutral norms would hide a mix-up."""
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            name = tied if tied is not None and name == HEAD else name
            generator = torch.Generator().manual_seed(sum(name.encode()))
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_logits_loss_and_gradients_are_those_of_the_unsplit_model(model: str, stages: int, tmp_path: Path) -> None:
    spec = spec_of(model, stages, reproducible=False)
    assert spec.tied == (model in TIES)
    family = FAMILIES[spec.model.family]
    held = build_stages(spec, CPU)
    perturb(held, family.embedding_name if spec.tied else None)
    save_folder(held, spec, tmp_path / "model")
    twin, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", local_files_only=True, output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert twin.config.model_type == spec.model.family
    assert twin.config._attn_implementation == family.attention

    assert_equals_unsplit(held, batches_of(spec), twin, family.embedding_name if spec.tied else None)


@pytest.mark.parametrize("model", MODELS)
def test_trained_weights_do_not_depend_on_the_cut_and_load_with_the_same_loss(model: str, tmp_path: Path) -> None:
    dtype = "bfloat16" if model in TIES else "float32"
    runs = [
        train_local(spec, batches_of(spec)) for spec in (spec_of(model, stages, dtype=dtype) for stages in (1, 2, 3))
    ]
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert runs[0].sha256 == runs[1].sha256 == runs[2].sha256

    spec = spec_of(model, 3)
    save_folder(runs[2].stages, spec, tmp_path / "model")
    twin: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    tokens, targets = (torch.from_numpy(array) for array in batches_of(spec).microbatch(5, 0))
    hidden: Tensor = tokens.long()
    with torch.no_grad():
        for stage in runs[2].stages:
            hidden = stage.module(hidden)
        assert float(loss_of(twin(input_ids=tokens.long()).logits, targets)) == float(loss_of(hidden, targets))


@pytest.mark.parametrize("model", sorted(TIES))
def test_bfloat16_parameters_do_not_depend_on_the_cut(model: str) -> None:
    runs = [
        train_local(spec, batches_of(spec))
        for spec in (spec_of(model, stages, dtype="bfloat16_parameters") for stages in (1, 3))
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[0].sha256 == runs[1].sha256


@pytest.mark.parametrize("model", MODELS)
def test_weights_start_as_in_transformers(model: str) -> None:
    spec = spec_of(model, 2, vocab_size=300, pad_token_id=256, initializer_range=0.05)
    torch.manual_seed(0)
    twin = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(spec.model.family, **hugging_face_config(spec)), dtype=torch.float32
    )
    expected = {name: parameter.detach() for name, parameter in twin.named_parameters()}
    ours = {
        name: parameter.detach()
        for stage in build_stages(spec, CPU)
        for name, parameter in stage.module.named_parameters()
    }
    if spec.tied:
        assert torch.equal(ours.pop(HEAD), ours[FAMILIES[spec.model.family].embedding_name])
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        assert ours[name].shape == weight.shape
        if weight.dim() < 2:
            assert torch.equal(ours[name], weight), name
        else:
            sampling = 6 / (2 * weight.numel()) ** 0.5  # six standard deviations of a standard deviation
            assert float(ours[name].std()) == pytest.approx(float(weight.std()), rel=sampling), name
            assert torch.equal(ours[name].eq(0).all(1), weight.eq(0).all(1)), name


@pytest.mark.parametrize("model", ["mistral", "qwen2", "gemma2"])
def test_a_window_shorter_than_the_sequence_changes_the_logits(model: str) -> None:
    tokens = torch.from_numpy(batches_of(spec_of(model, 1)).microbatch(0, 0)[0]).long()
    on: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 0} if model == "qwen2" else {}
    logits = []
    for window in (3, T, 2 * T):
        (stage,) = build_stages(spec_of(model, 1, sliding_window=window, **on), CPU)
        with torch.no_grad():
            logits.append(stage.module(tokens))
    torch.testing.assert_close(logits[1], logits[2])  # an explicit mask that hides nothing may round differently
    torch.testing.assert_close(logits[0][:, :3], logits[2][:, :3])
    assert not torch.allclose(logits[0][:, 3:], logits[2][:, 3:])
