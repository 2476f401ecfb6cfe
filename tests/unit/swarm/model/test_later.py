"""swarm.model.later: gradients of the weights that are computed later than dx.

A stage whose layers would be compiled keeps the library's linear layers, so it is what the others are compared with.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from swarm.errors import NotFound
from swarm.model.stage import Stage
from swarm.types import Microbatch, UnitName
from tests.support.families import MODELS
from tests.support.whole_steps import CPU, spec_of, text

MICROBATCH = Microbatch(0, 0, 0)
CASES: list[tuple[str, dict[str, Any]]] = [
    *[(family, {"dtype": dtype}) for family in MODELS for dtype in ("float32", "bfloat16", "bfloat16_parameters")],
    ("llama", {"recompute": True, "config": MODELS["llama"] | {"attention_dropout": 0.1}}),
    ("gpt2", {"config": {"resid_pdrop": 0.1}}),
    ("llama", {"config": MODELS["llama"] | {"tie_word_embeddings": True}}),
    ("llama", {"dtype": "bfloat16", "narrow": {"kind": "anchor", "factor": 4, "every": 1, "rank": 4}}),
    ("gpt2", {"narrow": {"kind": "bottleneck", "factor": 4, "every": 1}}),
]


def stage_of(family: str, model: dict[str, Any], stage: int, stages: int, **training: Any) -> Stage:
    given: dict[str, Any] = {} if family == "gpt2" else MODELS[family]
    config = model.get("config", given) | {"num_hidden_layers": 3}
    spec = spec_of(stages, training=training, **(model | {"family": family, "config": config}))
    return Stage(spec, stage, CPU)


def forward(stage: Stage, *, scale: float = 1.0) -> tuple[Tensor | None, Tensor]:
    """The stage's output of random inputs, and a random gradient of it."""
    tokens, targets = text(0)
    x, g = torch.randn((2, *stage.boundary_shape()), generator=torch.Generator().manual_seed(1))
    y, _ = stage.forward(MICROBATCH, 0, portion=0, x=x, tokens=tokens, targets=targets)
    return y, scale * g


def parts(stage: Stage) -> dict[UnitName, Tensor]:
    return {unit: stage.part(0, unit).clone() for unit in stage.units}


def equal(some: Any, others: Any) -> bool:
    return some is others is None or torch.equal(some, others)


@pytest.mark.parametrize(("family", "model"), CASES, ids=[f"{name}-{'-'.join(keys)}" for name, keys in CASES])
def test_weights_later_have_the_bits_of_one_backward_call(family: str, model: dict[str, Any]) -> None:
    for stage, stages in ((1, 3), (2, 3), (0, 3), (0, 1)):
        plain = stage_of(family, model | {"compile": True}, stage, stages, reproducible=False)
        assert not plain.module.later
        y, g = forward(plain)
        dx, finite = plain.backward(MICROBATCH, g)
        assert finite
        once, later = (stage_of(family, model, stage, stages, reproducible=False) for _ in range(2))
        named = [each for layer in later.module.layers() for each in layer.named_parameters()]
        matrices = [name for name, each in named if each.dim() == 2 and not name.endswith("table.weight")]
        assert len(later.module.later) == (len(matrices) if stage else 0), "the first stage has no dx to send first"
        for made in (once, later):
            assert equal(forward(made)[0], y)
        assert equal(once.backward(MICROBATCH, g)[0], dx)
        assert equal(later.backward(MICROBATCH, g, keep=True)[0], dx)
        assert not any(part.any() for part in parts(later).values()), "nothing is added before"
        assert later.weigh(MICROBATCH)
        for unit, part in parts(plain).items():
            assert part.any()
            assert torch.equal(parts(once)[unit], part), unit
            assert torch.equal(parts(later)[unit], part), unit


def test_what_is_owed_is_weighed_once_and_goes_with_its_microbatch() -> None:
    stage = stage_of("llama", {}, 1, 2, reproducible=True)
    with pytest.raises(NotFound, match="owes no gradients"):
        stage.weigh(MICROBATCH)
    stage.backward(MICROBATCH, forward(stage)[1], keep=True)
    assert stage.weigh(MICROBATCH)
    part = parts(stage)
    with pytest.raises(NotFound):
        stage.weigh(MICROBATCH)
    stage.backward(MICROBATCH, forward(stage)[1], keep=True)
    stage.backward(MICROBATCH, forward(stage)[1], accumulate=False)
    assert stage.weigh(MICROBATCH), "dx may be asked for again meanwhile"
    assert all(torch.equal(2 * part[unit], twice) for unit, twice in parts(stage).items())
    stage.backward(MICROBATCH, forward(stage)[1], keep=True)
    stage.drop(MICROBATCH)
    with pytest.raises(NotFound):
        stage.weigh(MICROBATCH)
    stage.backward(MICROBATCH, forward(stage)[1], keep=True)
    means = {unit: torch.zeros(layout.elements) for unit, layout in stage.units.items()}
    stage.apply(0, means, learning_rate=0.1, scale=1.0, skip=False)
    with pytest.raises(NotFound):
        stage.weigh(MICROBATCH)


@pytest.mark.parametrize("recompute", [False, True])
def test_no_input_of_a_layer_outlives_its_part_of_the_graph(recompute: bool) -> None:
    stage, inputs, held = stage_of("llama", {"recompute": recompute}, 1, 3), list[ref[Tensor]](), list[int]()

    def watch(_: object, given: tuple[Tensor]) -> None:
        inputs.append(ref(given[0]))
        given[0].register_hook(lambda _: held.append(sum(x() is not None for x in inputs)))

    for name in stage.module.later:
        stage.module.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(watch)
    _, g = forward(stage)
    assert inputs
    assert all((x() is None) is recompute for x in inputs)
    stage.backward(MICROBATCH, g)
    assert held[0] > held[-1] == 0, "backward gives them back as it goes"
    assert all(x() is None for x in inputs)


@pytest.mark.parametrize("bad", [torch.nan, 1e12])
def test_a_gradient_that_is_not_acceptable_adds_nothing_later_either(bad: float) -> None:
    stage = stage_of("llama", {}, 1, 3, fixed_point_bits=40, reproducible=True)
    _, g = forward(stage, scale=bad)
    stage.backward(MICROBATCH, g, keep=True)
    assert not stage.weigh(MICROBATCH)
    assert not any(part.any() for part in parts(stage).values())
