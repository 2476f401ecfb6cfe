"""swarm.model.weights: float32 masters and the bfloat16 copies that a stage computes with."""

from __future__ import annotations

import pytest
import torch

from swarm.model.families import EMBEDDING
from swarm.model.stage import Stage
from swarm.model.weights import Buffer
from swarm.types import Microbatch
from tests.support.whole_steps import CPU, commit, means_of, run, spec_of, text

LOWERED = "bfloat16_parameters"


def copies_of(buffer: Buffer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in buffer.module.named_parameters()}


def rounded(stage: Stage) -> dict[str, torch.Tensor]:
    return {name: master.to(torch.bfloat16) for name, master in stage.weights.newest().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(staleness: int, steps: int, learning_rate: float = 1e-2) -> Stage:
    """A whole model as one stage after some steps, with the newest weights in each."""
    stages = [Stage(spec_of(1, staleness=staleness, dtype=LOWERED), 0, CPU)]
    for step in range(steps):
        run(stages, Microbatch(0, step, 0), version=step, seed=step)
        commit(stages, step, learning_rate=learning_rate)
    return stages[0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_copies_are_the_rounded_masters_of_their_version(staleness: int) -> None:
    before = rounded(trained(staleness, 2))
    stage = trained(staleness, 3)
    assert {master.dtype for master in stage.weights.newest().values()} == {torch.float32}
    held = {buffer.version: copies_of(buffer) for buffer in stage.weights.buffers}
    assert held.keys() == {3} if staleness == 0 else {2, 3}
    assert {copy.dtype for copies in held.values() for copy in copies.values()} == {torch.bfloat16}
    assert equal(held[3], rounded(stage))
    assert not equal(held[3], before)
    if staleness:
        assert equal(held[2], before)


def test_masters_keep_steps_that_are_too_small_for_bfloat16() -> None:
    start, stage = trained(0, 0), trained(0, 1, learning_rate=1e-6)
    moved = stage.weights.newest()
    assert not torch.equal(moved[EMBEDDING], start.weights.newest()[EMBEDDING])
    kept = [torch.equal(copy, rounded(start)[name]) for name, copy in rounded(stage).items()]
    assert any(kept), "no step was too small"


@pytest.mark.parametrize("version", range(3))
def test_a_graph_survives_the_commit_of_the_version_after_its_own(version: int) -> None:
    stage, (tokens, targets) = trained(1, version), text(9)
    run([stage], Microbatch(0, version, 0), version=version)
    stage.forward(Microbatch(0, version + 1, 0), version, portion=0, tokens=tokens, targets=targets)
    commit([stage], version)
    assert stage.version == version + 1
    assert stage.backward(Microbatch(0, version + 1, 0)) == (None, True)


def test_the_computation_is_in_bfloat16_and_what_crosses_a_cut_is_not() -> None:
    first, last = (Stage(spec_of(2, dtype=LOWERED), stage, CPU) for stage in range(2))
    tokens, targets = text(0)
    y, _ = first.forward(Microbatch(0, 0, 0), 0, portion=0, tokens=tokens)
    assert y is not None
    assert y.dtype == torch.float32
    assert torch.equal(y, y.to(torch.bfloat16).float()), "bfloat16 boundary tensors lose nothing"
    last.forward(Microbatch(0, 0, 0), 0, portion=0, x=y, targets=targets)
    dx, _ = last.backward(Microbatch(0, 0, 0))
    assert dx is not None
    assert dx.dtype == torch.float32
    assert torch.equal(dx, dx.to(torch.bfloat16).float())


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_joiner_takes_over_masters_and_copies_and_follows_commits(staleness: int) -> None:
    """Parameters arrive at different versions, as chunks do, and are brought to the newest one by one."""
    donor = trained(staleness, 2)
    names = [name for name, _ in donor.parameter_sizes()]
    early, late = names[::2], names[1::2]
    joiner = Stage(spec_of(1, staleness=staleness, dtype=LOWERED, training={"seed": 1}), 0, CPU)
    joiner.absorb(early, 2, memoryview(donor.snapshot(early)))
    run([donor], Microbatch(0, 2, 0), version=2, seed=2)
    gradients = donor.places.gradients_of(means_of([donor], 2))
    commit([donor], 2)
    joiner.replay(2, early, gradients, learning_rate=1e-2, scale=1.0, skip=False)
    assert len(donor.snapshot(late)) == donor.state_bytes(late)
    joiner.absorb(late, 3, memoryview(donor.snapshot(late)))
    assert joiner.settle(3) == donor.digest()
    for version in (3, 2)[: 1 + staleness]:
        ours, theirs = (dict(stage.weights.of(version).named_parameters()) for stage in (joiner, donor))
        assert equal(ours, theirs)


def test_a_checkpoint_is_float32_and_comes_back_with_both_versions() -> None:
    stage = trained(1, 2)
    state = stage.capture(optimizer=True)
    kinds = {tensor.dtype for held in (state.weights, state.previous) for tensor in held.values()}
    assert kinds == {torch.float32}
    again = Stage(spec_of(1, staleness=1, dtype=LOWERED), 0, CPU, state)
    assert again.digest() == stage.digest()
    for version in (1, 2):
        one, other = (dict(each.weights.of(version).named_parameters()) for each in (again, stage))
        assert equal(one, other)
