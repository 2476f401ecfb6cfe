"""Dropout is a function of (seed, portion, microbatch, layer): neither the cut nor doing it again changes a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.job.spec import JobSpec
from swarm.model.families import Draw
from swarm.model.stage import Stage
from swarm.reference.trainer import Trained, build_stages, train_local
from swarm.types import Microbatch
from tests.support.scenes import resolved
from tests.support.specs import batches_of, quick_spec

CPU = torch.device("cpu")
T = 16
SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
GATED = SMALL | {"intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", GATED, ("attention_dropout",)),
    "gemma2": ("gemma2", GATED, ("attention_dropout",)),
    "gpt2": ("gpt2", SMALL, ("embd_pdrop", "attn_pdrop", "resid_pdrop")),
    "gpt_neox": ("gpt_neox", GATED | {"rotary_pct": 0.5}, ("attention_dropout", "hidden_dropout")),
}


def spec_of(
    model: str, stages: int = 1, *, share: float | dict[str, float] = 0.2, recompute: bool = False, **training: Any
) -> JobSpec:
    family, config, dropouts = MODELS[model]
    shares = share if isinstance(share, dict) else dict.fromkeys(dropouts, share)
    spec = quick_spec(
        model__family=family,
        model__recompute=recompute,
        model__config=config | shares,
        pipeline__stages=stages,
        **{f"training__{key}": value for key, value in training.items()},
    )
    return resolved(spec)


def train(spec: JobSpec) -> Trained:
    return train_local(spec, batches_of(spec))


@pytest.mark.parametrize("model", MODELS)
def test_neither_the_cut_nor_recomputing_changes_a_bit(model: str) -> None:
    runs = [
        train(spec_of(model, stages, recompute=recompute)) for stages, recompute in ((1, False), (2, True), (3, False))
    ]
    assert len({run.losses for run in runs}) == 1
    assert len({run.sha256 for run in runs}) == 1
    assert runs[0].sha256 != train(spec_of(model, share=0.0)).sha256
    assert runs[0].sha256 != train(spec_of(model, seed=1)).sha256


@pytest.mark.parametrize(("model", "key"), [(model, key) for model, entry in MODELS.items() for key in entry[2]])
def test_each_kind_of_dropout_acts_by_itself_in_training_and_not_in_evaluation(model: str, key: str) -> None:
    (plain,), (dropping,) = (build_stages(spec_of(model, share=share), CPU) for share in (0.0, {key: 0.5}))
    tokens, targets = (torch.from_numpy(array) for array in batches_of(spec_of(model)).microbatch(0, 0))

    def loss(stage: Stage, portion: int, index: int) -> float:
        return stage.forward(Microbatch(0, 0, index), 0, portion=portion, tokens=tokens, targets=targets)[1]

    assert loss(dropping, 0, 0) != loss(plain, 0, 0)
    assert dropping.evaluate(0, tokens=tokens, targets=targets) == plain.evaluate(0, tokens=tokens, targets=targets)
    # Every microbatch of every portion has masks of its own, the same again whoever computes it as which step.
    losses = [loss(dropping, portion, index) for portion in (0, 1) for index in (0, 1)]
    assert len(set(losses)) == 4
    assert [loss(dropping, portion, index) for portion in (0, 1) for index in (0, 1)] == losses
    later = dropping.forward(Microbatch(3, 1, 1), 0, portion=1, tokens=tokens, targets=targets)[1]
    assert later == losses[3]


def test_every_layer_and_row_drops_something_else() -> None:
    masks = []
    for site in (-1, 0, 1):
        Draw(0, 5, 7).begin(site, CPU)
        masks.append(torch.nn.functional.dropout(torch.ones(4, 64)))
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 3
    assert len({tuple(row.tolist()) for row in masks[0]}) == 4


def test_what_else_draws_random_numbers_changes_no_mask() -> None:
    spec = spec_of("gpt2", 2)
    tokens, targets = (torch.from_numpy(array) for array in batches_of(spec).microbatch(0, 0))
    seen = []
    for disturbance in (0, 5):
        first, last = build_stages(spec, CPU)
        torch.rand(disturbance)
        y, _ = first.forward(Microbatch(0, 0, 0), 0, portion=0, tokens=tokens)
        torch.rand(disturbance)
        last.forward(Microbatch(0, 0, 0), 0, portion=0, x=y, targets=targets)
        torch.manual_seed(disturbance)
        dx, _ = last.backward(Microbatch(0, 0, 0))
        first.backward(Microbatch(0, 0, 0), dx)
        seen.append([stage.part(0, unit) for stage in (first, last) for unit in stage.units])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_the_library_drops_the_same_share() -> None:
    """Against the unsplit model, mask for mask, where one generator serves both: the embedding's site alone."""
    spec = spec_of("gpt2", share={"embd_pdrop": 0.5, "attn_pdrop": 0.0, "resid_pdrop": 0.0})
    (stage,) = build_stages(spec, CPU)
    seen: list[Tensor] = []
    layers = stage.module.get_submodule("transformer.h")
    next(iter(layers.children())).register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    tokens, targets = (torch.from_numpy(array) for array in batches_of(spec).microbatch(0, 0))
    stage.evaluate(0, tokens=tokens, targets=targets)
    stage.forward(Microbatch(0, 0, 0), 0, portion=0, tokens=tokens, targets=targets)
    plain, dropped = seen
    kept = dropped != 0
    assert 0.4 < float(kept.float().mean()) < 0.6
    assert torch.equal(dropped[kept], 2 * plain[kept])
