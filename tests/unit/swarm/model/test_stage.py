"""swarm.model.stage: one stage's forward, backward, sums and optimizer.

That the cut changes no bit is the subject of tests/integration/test_cut_invariance.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from swarm.errors import InvalidConfig, NotFound, StaleMessage
from swarm.job.families import HEAD
from swarm.model.families import EMBEDDING
from swarm.model.runtime import choose_device
from swarm.model.stage import Stage
from swarm.model.state import parameter_hashes, weights_file
from swarm.types import Microbatch, UnitName
from tests.support.whole_steps import CPU, B, T, commit, means_of, run, spec_of, stages_of, text


def test_units_lay_out_every_parameter_once_without_gaps() -> None:
    for tied in (False, True):
        for stage in stages_of(spec_of(2, config={"tie_word_embeddings": tied})):
            for layout in stage.units.values():
                end = 0
                for _, offset, shape in layout.parameters:
                    assert offset == end
                    end += torch.Size(shape).numel()
                assert end == layout.elements
            names = {name for layout in stage.units.values() for name, _, _ in layout.parameters}
            module_names = {name for name, _ in stage.module.named_parameters()}
            assert names == {EMBEDDING if tied and name == HEAD else name for name in module_names}


def test_first_stage_gives_a_boundary_tensor_and_the_last_a_loss() -> None:
    first, last = stages_of(spec_of(2))
    tokens, targets = text(0)
    microbatch = Microbatch(0, 0, 0)
    y, nothing = first.forward(microbatch, 0, portion=0, tokens=tokens)
    assert y is not None
    assert (tuple(y.shape), nothing, y.dtype) == (first.boundary_shape(), 0.0, torch.float32)
    assert not y.requires_grad
    none, loss = last.forward(microbatch, 0, portion=0, x=y, targets=targets)
    assert none is None
    assert loss == pytest.approx(B * T * 5.55, rel=0.05)
    dx, finite = last.backward(microbatch)
    assert dx is not None
    assert finite
    assert tuple(dx.shape) == last.boundary_shape()
    assert first.backward(microbatch, dx) == (None, True)


def test_computing_again_gives_the_same_and_leaves_nothing_behind() -> None:
    first, last = stages_of(spec_of(2))
    tokens, targets = text(0)
    microbatch = Microbatch(0, 0, 0)
    y, _ = first.forward(microbatch, 0, portion=0, tokens=tokens)
    assert y is not None
    y_again, _, nothing, _ = first.recompute(
        microbatch, 0, portion=0, tokens=tokens, g=torch.ones_like(y), encode=torch.clone
    )
    assert nothing is None
    assert y_again is not None
    assert torch.equal(y_again, y)
    _, loss = last.forward(microbatch, 0, portion=0, x=y.clone(), targets=targets)
    _, loss_again, dx_again, finite = last.recompute(
        microbatch, 0, portion=0, x=y.clone(), targets=targets, encode=torch.clone
    )
    assert (loss_again, finite) == (loss, True)
    assert not last.part(0, UnitName("stage-1")).any(), "nothing is added"
    dx, _ = last.backward(microbatch)
    assert dx is not None
    assert dx_again is not None
    assert torch.equal(dx_again, dx), "and the graph of the first forward is still there"
    part, sums = last.part(0, UnitName("stage-1")).clone(), {}
    for times in (1, 2):
        last.recompute(microbatch, 0, portion=0, x=y.clone(), targets=targets, encode=torch.clone, into=sums)
        assert torch.equal(last.part_of(sums, UnitName("stage-1")), times * part), "a sum of its own"
    assert torch.equal(last.part(0, UnitName("stage-1")), part)


def test_masked_targets_neither_count_nor_teach() -> None:
    (stage,) = stages_of(spec_of(1))
    tokens, targets = text(0)
    targets[:] = -100
    microbatch = Microbatch(0, 0, 0)
    assert stage.forward(microbatch, 0, portion=0, tokens=tokens, targets=targets) == (None, 0.0)
    assert stage.backward(microbatch) == (None, True)
    assert not stage.part(0, UnitName("stage-0")).any()


def test_a_graph_is_used_once_and_can_be_dropped() -> None:
    (stage,) = stages_of(spec_of(1))
    microbatch = Microbatch(0, 0, 0)
    with pytest.raises(NotFound):
        stage.backward(microbatch)
    run([stage], microbatch)
    with pytest.raises(NotFound):
        stage.backward(microbatch)
    tokens, targets = text(0)
    stage.forward(microbatch, 0, portion=0, tokens=tokens, targets=targets)
    stage.drop(microbatch)
    stage.drop(microbatch)
    with pytest.raises(NotFound):
        stage.backward(microbatch)


def test_weights_of_another_version_are_refused() -> None:
    (stage,) = stages_of(spec_of(1))
    with pytest.raises(StaleMessage, match="asked for weights 1, it holds 0"):
        stage.forward(Microbatch(0, 1, 0), 1, portion=0, tokens=text(0)[0], targets=text(0)[1])


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_adds_nothing(reproducible: bool, bad: float) -> None:
    first, last = stages_of(spec_of(2, training={"reproducible": reproducible}))
    run([first, last], Microbatch(0, 0, 0))
    before = first.part(0, UnitName("stage-0")).clone()
    first.forward(Microbatch(0, 0, 1), 0, portion=0, tokens=text(1)[0])
    g = torch.zeros(first.boundary_shape())
    g[0, 0, 0] = bad
    assert first.backward(Microbatch(0, 0, 1), g) == (None, False)
    assert torch.equal(first.part(0, UnitName("stage-0")), before)


def test_a_gradient_out_of_the_fixed_point_range_adds_nothing() -> None:
    first, _ = stages_of(spec_of(2, training={"fixed_point_bits": 40}))
    first.forward(Microbatch(0, 0, 0), 0, portion=0, tokens=text(0)[0])
    g = torch.full(first.boundary_shape(), 1e6)
    assert first.backward(Microbatch(0, 0, 0), g) == (None, False)
    assert not first.part(0, UnitName("stage-0")).any()


def test_backward_without_accumulating_gives_the_same_dx_and_no_sum() -> None:
    first, last = stages_of(spec_of(2))
    tokens, targets = text(0)
    microbatch = Microbatch(0, 0, 0)
    y, _ = first.forward(microbatch, 0, portion=0, tokens=tokens)
    results = []
    for accumulate in (False, True):
        last.forward(microbatch, 0, portion=0, x=y, targets=targets)
        dx, _ = last.backward(microbatch, accumulate=accumulate)
        results.append((dx, bool(last.part(0, UnitName("stage-1")).any())))
    assert torch.equal(results[0][0], results[1][0])
    assert [added for _, added in results] == [False, True]


def test_sums_of_steps_are_apart_and_can_be_voided() -> None:
    stages = stages_of(spec_of(2))
    unit = UnitName("stage-1")
    run(stages, Microbatch(0, 0, 0), seed=5)
    run(stages, Microbatch(0, 1, 0), seed=5)
    assert torch.equal(stages[1].part(0, unit), stages[1].part(1, unit))
    kept = stages[1].part(1, unit).clone()
    stages[1].void(0)
    assert not stages[1].part(0, unit).any()
    assert torch.equal(stages[1].part(1, unit), kept)
    run(stages, Microbatch(0, 0, 0), seed=5)
    assert torch.equal(stages[1].part(0, unit), kept)


def test_recompute_changes_no_bit() -> None:
    digests = []
    for recompute in (False, True):
        stages = stages_of(spec_of(2, recompute=recompute, dtype="bfloat16"))
        losses = [run(stages, Microbatch(0, 0, index)) for index in (0, 1)]
        digests.append((losses, commit(stages, 0)))
    assert digests[0] == digests[1]


TWINS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (
        {"weight_decay": 0.1, "lookahead": 0.0},
        partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    ),
    "sgd": ({"weight_decay": 0.0}, torch.optim.SGD),
    "sgd momentum": (
        {"weight_decay": 0.01, "momentum": 0.9},
        partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01),
    ),
}


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_optimizer_is_torchs_bit_for_bit(name: str, staleness: int) -> None:
    training, make = TWINS[name]
    spec = spec_of(1, staleness=staleness, training={"optimizer": name.split()[0]} | training)
    ours, (twin,) = stages_of(spec), stages_of(spec)
    optimizer = make(twin.module.parameters(), lr=1e-2, foreach=False)
    for step in range(4):
        for index in (0, 1):
            run(ours, Microbatch(0, step, index), version=max(0, step - staleness))
        mean, layout = means_of(ours, step)[UnitName("stage-0")], ours[0].units[UnitName("stage-0")]
        parameters = dict(twin.module.named_parameters())
        for parameter, offset, shape in layout.parameters:
            size = torch.Size(shape).numel()
            parameters[parameter].grad = mean[offset : offset + size].view(shape) * 0.5
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.step()
        commit(ours, step, learning_rate=1e-2 / (step + 1), scale=0.5)
        assert all(torch.equal(held, parameters[name]) for name, held in ours[0].module.named_parameters())


def test_a_skipped_step_changes_the_version_only() -> None:
    stages = stages_of(spec_of(2))
    run(stages, Microbatch(0, 0, 0))
    before = [stage.digest() for stage in stages]
    for stage in stages:
        stage.apply(0, {}, learning_rate=1.0, scale=1.0, skip=True)
    assert [stage.digest() for stage in stages] == before
    assert [stage.version for stage in stages] == [1, 1]
    assert not stages[0].part(0, UnitName("stage-0")).any()


def test_apply_uses_up_the_sums_and_the_graphs_of_its_step() -> None:
    stages = stages_of(spec_of(2))
    run(stages, Microbatch(0, 0, 0))
    stages[0].forward(Microbatch(0, 0, 1), 0, portion=0, tokens=text(1)[0])
    commit(stages, 0)
    assert not stages[0].part(0, UnitName("stage-0")).any()
    with pytest.raises(NotFound):
        stages[0].backward(Microbatch(0, 0, 1), torch.zeros(stages[0].boundary_shape()))


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "sgd", "muon"])
def test_digest_tells_weights_and_optimizer_state_apart(optimizer: str) -> None:
    training = {"optimizer": optimizer} | ({"momentum": 0.5} if optimizer == "sgd" else {})
    one, two = stages_of(spec_of(1, training=training)), stages_of(spec_of(1, training=training))
    for stages in (one, two):
        run(stages, Microbatch(0, 0, 0))
    assert commit(one, 0, learning_rate=0.0) == commit(two, 0, learning_rate=0.0)
    run(one, Microbatch(0, 1, 0), version=1, seed=1)
    run(two, Microbatch(0, 1, 0), version=1, seed=2)
    assert commit(one, 1, learning_rate=0.0) != commit(two, 1, learning_rate=0.0)
    assert parameter_hashes(one[0].capture(optimizer=False)) == parameter_hashes(two[0].capture(optimizer=False))


def test_two_buffers_compute_with_weights_one_step_old() -> None:
    """w(t+1) = w(t) - update(gradient at w(t-1)); a graph of the newer version survives the commit of the older."""
    stale = stages_of(spec_of(1, staleness=1))
    (stage,) = stale
    tokens, targets = text(9)
    run(stale, Microbatch(0, 0, 0))
    commit(stale, 0)
    assert stage.version == 1
    weights_0, weights_1 = stages_of(spec_of(1))[0].module.state_dict(), stage.module.state_dict()
    assert not all(torch.equal(weights_0[name], weights_1[name]) for name in weights_0)

    _, loss_0 = stage.forward(Microbatch(0, 1, 0), 0, portion=0, tokens=tokens, targets=targets)
    _, loss_1 = stage.forward(Microbatch(0, 2, 0), 1, portion=0, tokens=tokens, targets=targets)
    fresh = stages_of(spec_of(1))[0]
    assert loss_0 == fresh.forward(Microbatch(0, 0, 0), 0, portion=0, tokens=tokens, targets=targets)[1]
    assert loss_1 != loss_0

    stage.backward(Microbatch(0, 1, 0))
    weights_1 = {name: tensor.clone() for name, tensor in weights_1.items()}
    commit(stale, 1)
    assert stage.version == 2
    kept = stage.weights.buffers[1].module.state_dict()
    assert all(torch.equal(kept[name], weights_1[name]) for name in kept)
    assert stage.backward(Microbatch(0, 2, 0)) == (None, True)
    with pytest.raises(StaleMessage):
        stage.forward(Microbatch(0, 3, 0), 0, portion=0, tokens=tokens, targets=targets)


def test_export_holds_the_hashed_tensors_under_their_names() -> None:
    stages = stages_of(spec_of(2, config={"tie_word_embeddings": True}))
    names = []
    for stage in stages:
        state = stage.capture(optimizer=False)
        assert weights_file(state)[:] == save(dict(state.weights), metadata={"format": "pt"})
        tensors = load(weights_file(state)[:])
        hashes = parameter_hashes(state)
        assert [parameter.name for parameter in hashes] == sorted(tensors)
        assert all(tuple(tensors[parameter.name].shape) == parameter.shape for parameter in hashes)
        names += sorted(tensors)
    assert len(names) == len(set(names))
    assert HEAD not in names


def test_initial_weights_come_from_the_seed_and_the_name() -> None:
    one = {name: tensor for stage in stages_of(spec_of(1)) for name, tensor in stage.module.named_parameters()}
    two = {name: tensor for stage in stages_of(spec_of(3)) for name, tensor in stage.module.named_parameters()}
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = stages_of(spec_of(1, training={"seed": 1}))[0].module.state_dict()
    assert not torch.equal(one[EMBEDDING], other[EMBEDDING])
    assert not torch.equal(one[EMBEDDING], one[HEAD])
    assert float(one[EMBEDDING].detach().std()) == pytest.approx(0.02, rel=0.05)
    tied = stages_of(spec_of(1, config={"tie_word_embeddings": True}))[0].module.state_dict()
    assert torch.equal(tied[EMBEDDING], tied[HEAD])


def test_a_config_that_the_library_refuses_is_a_config_error() -> None:
    spec = spec_of(1)
    broken = spec.model.model_copy(update={"config": spec.model.config | {"hidden_size": 30}})
    with pytest.raises(InvalidConfig, match="not a multiple"):
        Stage(spec.model_copy(update={"model": broken}), 0, CPU)


def test_a_device_that_is_not_there_is_named() -> None:
    assert choose_device("cpu") == CPU
    for name in ("cuda:99", "abacus"):
        with pytest.raises(InvalidConfig, match=name):
            choose_device(name)


def test_a_step_is_applied_to_the_version_that_it_follows() -> None:
    spec = spec_of()
    stages = stages_of(spec)
    run(stages, Microbatch(0, 0, 0))
    for step in (1, -1):
        with pytest.raises(AssertionError, match="is applied to version 0"):
            stages[0].apply(step, {}, learning_rate=1e-3, scale=1.0, skip=True)
    commit(stages, 0)
    with pytest.raises(AssertionError, match="step 0 is applied to version 1"):
        stages[0].apply(0, {}, learning_rate=1e-3, scale=1.0, skip=True)
