"""Narrow places are part of the model: the same bits in every cut, in a swarm that breaks, and in Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.errors import InvalidConfig, InvalidModel
from swarm.hf.model_folder import NARROW_CODE
from swarm.hf.pretrained import ground, look_at_model
from swarm.job.families import FAMILIES, HEAD
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.model.narrow import handed_over
from swarm.model.stage import Stage
from swarm.reference.trainer import build_stages, save_folder, sha256_of, train_local
from tests.support.effort import others
from tests.support.families import MODELS
from tests.support.scenes import Run, resolved, training
from tests.support.specs import batches_of, quick_spec
from tests.support.unsplit_model import assert_equals_unsplit

CPU = torch.device("cpu")
KINDS = ("maxout", "bottleneck", "anchor")
TRIED = ("llama", "gemma2", "gpt2", *others("mistral", "qwen2", "qwen3", "gpt_neox"))


def of_four_layers(family: str) -> dict[str, Any]:
    return {
        "model__family": family,
        "model__config": MODELS[family] | {"n_layer" if family == "gpt2" else "num_hidden_layers": 4},
    }


def spec_of(
    family: str, split: tuple[int, ...], *, kind: str = "maxout", every: int = 1, rank: int = 0, **changes: Any
) -> JobSpec:
    narrow = {"model__narrow": {"kind": kind, "factor": 4, "every": every, "rank": rank}}
    return resolved(quick_spec(**(of_four_layers(family) | narrow | {"pipeline__split": split} | changes)))


@torch.no_grad()
def perturbed(stages: list[Stage], tied: str | None) -> list[Stage]:
    """The stages, every parameter moved off its start: neutral norms would hide a mix-up."""
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            named = tied if tied is not None and name == HEAD else name
            generator = torch.Generator().manual_seed(sum(named.encode()))
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return stages


def tied_name(spec: JobSpec) -> str | None:
    return FAMILIES[spec.model.family].embedding_name if spec.tied else None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16_parameters"])
@pytest.mark.parametrize("family", TRIED)
def test_no_cut_on_places_changes_a_bit(family: str, dtype: str, kind: str) -> None:
    runs = [
        train_local(spec, batches_of(spec))
        for number, split in enumerate(((4,), (1, 3), (2, 2), (1, 1, 1, 1)))
        for spec in (
            spec_of(
                family, split, kind=kind, model__dtype=dtype, model__recompute=number == 2, pipeline__overlap=1,
                training__steps=3, training__optimizer="adamw" if kind == "maxout" else "muon",
            ),
        )
    ]  # fmt: skip
    assert len({run.sha256 for run in runs}) == len({run.losses for run in runs}) == 1
    assert runs[0].sha256 != sha256_of(build_stages(spec_of(family, (4,), kind=kind), CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_place_hands_over_what_a_cut_does(dtype: torch.dtype) -> None:
    """Kernels may round otherwise for other strides, although the ones here gave the same bits."""
    z, gradients = torch.randn(4, 3).t().to(dtype).requires_grad_(), list[torch.Tensor]()
    z.register_hook(gradients.append)
    over = handed_over(z)
    over.sum().backward()  # its gradient has no strides
    assert (over.dtype, over.is_contiguous(), gradients[0].is_contiguous()) == (torch.float32, True, True)


def test_every_key_of_places_makes_another_model() -> None:
    wide = resolved(quick_spec(**of_four_layers("llama")))
    ones = [spec_of("llama", (4,), kind=kind, every=every) for kind in KINDS for every in (1, 2)]
    ones.append(spec_of("llama", (4,), model__narrow={"kind": "maxout", "factor": 2, "every": 2}))
    ones.append(spec_of("llama", (4,), kind="anchor", rank=2))
    assert len({sha256_of(build_stages(spec, CPU)) for spec in (wide, *ones)}) == 9


def test_what_is_behind_an_anchor_starts_as_the_transpose_of_what_is_before_it() -> None:
    stages = build_stages(spec_of("llama", (2, 2), kind="anchor"), CPU)
    first, last = ({name: one.detach() for name, one in stage.module.named_parameters()} for stage in stages)
    down, up = first["model.layers.1.narrow_out.down.weight"], last["model.layers.2.narrow_in.up.weight"]
    assert torch.equal(down.t(), up)
    assert 0.8 < float(down.std()) * down.shape[1] ** 0.5 < 1.2


@pytest.mark.parametrize("kind", ["maxout", "bottleneck"])
def test_the_hidden_state_behind_a_norm_starts_four_times_as_large(kind: str) -> None:
    (stage,) = build_stages(spec_of("llama", (4,), kind=kind), CPU)
    ups = [one.detach() for name, one in stage.module.named_parameters() if name.endswith("narrow_in.up.weight")]
    assert len(ups) == 3
    for up in ups:
        assert 3.0 < float(up.std()) * up.shape[1] ** 0.5 < 5.0


def test_norms_of_places_start_at_one_where_those_of_the_family_start_at_zero() -> None:
    (stage,) = build_stages(spec_of("gemma2", (4,)), CPU)
    norms = {name: parameter for name, parameter in stage.module.named_parameters() if parameter.dim() == 1}
    for name, parameter in norms.items():
        assert parameter.eq(float(".narrow_" in name and name.endswith("weight"))).all(), name
    assert sum(".narrow_" in name for name in norms) == 12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TRIED)
def test_the_exported_class_gives_the_bits_of_the_stages(family: str, kind: str, tmp_path: Path) -> None:
    spec = spec_of(family, (2, 2), kind=kind, every=2, rank=3 * (kind == "anchor"), training__reproducible=False)
    held = perturbed(build_stages(spec, CPU), tied_name(spec))
    save_folder(held, spec, tmp_path / "model")
    twin, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", local_files_only=True, trust_remote_code=True, output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert_equals_unsplit(held, batches_of(spec), twin, tied_name(spec))
    ids = torch.arange(8).unsqueeze(0)
    cached, anew = (twin.generate(ids, max_new_tokens=8, do_sample=False, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached, anew)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_leave_to_run_its_code_an_exported_model_is_refused(family: str, tmp_path: Path) -> None:
    """Under its family's name it would load, without its places: a wrong model."""
    spec = spec_of(family, (4,))
    save_folder(build_stages(spec, CPU), spec, tmp_path / "model")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True, trust_remote_code=False)


def start_of(folder: Path, **changes: Any) -> JobSpec:
    """A job that starts from an exported folder."""
    model = {"model__id": str(folder), "model__config": {}, "model__tokenizer": "byte"}
    return resolve(ground(quick_spec(**(model | changes))), Basis(257))


@pytest.mark.parametrize("family", TRIED)
def test_an_exported_folder_is_a_start_with_its_places_and_gives_the_same_sha256_again(
    family: str, tmp_path: Path
) -> None:
    spec = spec_of(family, (4,), kind="anchor", every=2)
    held = perturbed(build_stages(spec, CPU), tied_name(spec))
    save_folder(held, spec, tmp_path / "model")
    again = start_of(tmp_path / "model", pipeline__stages=2)
    assert again.model.narrow == spec.model.narrow
    assert look_at_model(again) == ()
    assert sha256_of(build_stages(again, CPU)) == sha256_of(held)


def test_places_that_the_weights_do_not_have_are_refused(tmp_path: Path) -> None:
    plain, narrow = tmp_path / "plain", tmp_path / "narrow"
    wide = resolved(quick_spec(**of_four_layers("llama")))
    spec = spec_of("llama", (4,), every=2)
    for one, folder in ((wide, plain), (spec, narrow)):
        save_folder(build_stages(one, CPU), one, folder)
    with pytest.raises(InvalidConfig, match=r"the weights of model.id = .* have no narrow places") as refused:
        start_of(plain, model__narrow={"kind": "maxout"})
    assert 'set model.init = "random", or leave model.narrow out' in refused.value.hint
    fresh = start_of(plain, model__narrow={"kind": "maxout"}, model__init="random")
    assert fresh.model.narrow.every == 2
    with pytest.raises(InvalidConfig, match="kind = maxout, factor = 4, every = 2") as refused:
        start_of(narrow, model__narrow={"kind": "maxout", "factor": 2})
    assert refused.value.hint == "leave model.narrow out"
    config = json.loads((narrow / "config.json").read_text())
    for damaged in ({"kind": "maxout", "factor": 0}, 3):
        (narrow / "config.json").write_text(json.dumps(config | {"narrow": damaged}))
        with pytest.raises(InvalidModel, match="names narrow places that no model has"):
            start_of(narrow)
    assert (narrow / NARROW_CODE).is_file()


@training(
    6, 4, training__steps=12, pipeline__stages=2, pipeline__compression="int8", config__num_hidden_layers=4,
    model__narrow={"kind": "anchor", "factor": 4, "every": 1},
)  # fmt: skip
async def test_three_lost_replicas_of_a_narrow_model_change_no_bit(run: Run) -> None:
    for step in (2, 5, 8):
        await run.until_step(step)
        run.rig.kill(run.rng.choice(run.spare()))
