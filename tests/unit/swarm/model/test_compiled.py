"""swarm.model.compiled: layers are compiled before the first microbatch, once for all, or not at all.

A backend that counts stands for the real compiler, which takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.errors import InvalidConfig
from swarm.model import compiled
from swarm.model.compiled import compile_layers
from swarm.model.stage import Stage
from swarm.types import Microbatch
from tests.support.whole_steps import commit, run, spec_of, stages_of, text

ORDINARY = {"reproducible": False}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled."""
    made: list[Any] = []

    def count(graph: Any, _inputs: object) -> Callable[..., Any]:
        made.append(graph)
        forward: Callable[..., Any] = graph.forward
        return forward

    monkeypatch.setattr(compiled, "_BACKEND", count)
    return made


def trained(stages: list[Stage]) -> list[float]:
    """Losses of three steps with two microbatches each, the second with weights one step old."""
    losses = []
    for step in range(3):
        for index, version in enumerate((step, max(0, step - 1))):
            losses.append(run(stages, Microbatch(0, step, index), version=version))
        commit(stages, step)
    return losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16_parameters"])
def test_nothing_is_compiled_once_a_stage_takes_work(dtype: str, graphs: list[Any]) -> None:
    spec = spec_of(2, staleness=1, dtype=dtype, config={"attention_dropout": 0.1}, training=ORDINARY, compile=True)
    plain, fast = stages_of(spec), stages_of(spec)
    assert compile_layers(fast, spec) == ""
    assert len(graphs) in (1, 2), "one for all layers; one more if autograd sees the first layer otherwise"
    before = len(graphs)
    assert trained(fast) == pytest.approx(trained(plain), rel=1e-3)
    assert len(graphs) == before


def test_the_function_for_evaluations_is_compiled_beforehand_too(graphs: list[Any]) -> None:
    spec = spec_of(1, training=ORDINARY, compile=True)
    training = spec.training.model_copy(update={"eval_every_steps": 1})
    spec = spec.model_copy(update={"training": training})
    (stage,) = stages_of(spec)
    compile_layers([stage], spec)
    before = len(graphs)
    tokens, targets = text(0)
    stage.evaluate(0, tokens=tokens, targets=targets)
    run([stage], Microbatch(0, 0, 0))
    assert len(graphs) == before > 1


def test_layers_that_each_need_a_function_are_all_compiled(graphs: list[Any]) -> None:
    """torch stops after eight functions unless told otherwise, and these twelve layers divide by their own index."""
    shape = {"num_hidden_layers": 12, "scale_attn_by_inverse_layer_idx": True}
    spec = spec_of(1, staleness=1, family="gpt2", config=shape, training=ORDINARY, compile=True)
    plain, fast = stages_of(spec), stages_of(spec)
    assert compile_layers(fast, spec) == ""
    before = len(graphs)
    assert before >= 12
    assert trained(fast) == pytest.approx(trained(plain), rel=1e-3)
    assert len(graphs) == before


def test_layers_that_torch_leaves_uncompiled_are_told(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_FUNCTIONS_MAX", 0)
    shape = {"num_hidden_layers": 12, "scale_attn_by_inverse_layer_idx": True}
    spec = spec_of(1, staleness=1, family="gpt2", config=shape, training=ORDINARY, compile=True)
    plain, slow = stages_of(spec), stages_of(spec)
    assert "limit" in compile_layers(slow, spec)
    before = len(graphs)
    assert trained(slow) == trained(plain)
    assert len(graphs) == before


def test_zeros_leave_nothing_behind(graphs: list[Any]) -> None:
    spec = spec_of(1, training=ORDINARY, compile=True)
    (stage,) = stages_of(spec)
    digest = stage.digest()
    compile_layers([stage], spec)
    assert stage.digest() == digest
    assert not any(stage.part(step, unit).any() for step in (-1, 0) for unit in stage.units)
    assert {name for name, _ in stage.module.named_parameters()} == {name for name, _ in stage.parameter_sizes()}


def test_a_stage_without_a_compiler_computes_as_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_graph: object, _inputs: object) -> Callable[..., Tensor]:
        raise RuntimeError("no C++ compiler here")

    monkeypatch.setattr(compiled, "_BACKEND", missing)
    spec = spec_of(2, staleness=1, training=ORDINARY, compile=True)
    plain, slow = stages_of(spec), stages_of(spec)
    assert "no C++ compiler here" in compile_layers(slow, spec)
    assert trained(slow) == trained(plain)


def test_a_fault_that_is_none_of_the_compilers_is_not_hidden(
    graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(1, training=ORDINARY, compile=True)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Stage, "backward", full)
    with pytest.raises(torch.OutOfMemoryError):
        compile_layers(stages_of(spec), spec)


def test_compiled_layers_are_refused_where_bits_must_repeat() -> None:
    with pytest.raises(InvalidConfig, match=r"model\.compile = true fuses operations") as refused:
        spec_of(1, compile=True)
    assert refused.value.hint == "with training.reproducible = true set it to false"
    assert spec_of(1, compile=True, training=ORDINARY).model.compile
