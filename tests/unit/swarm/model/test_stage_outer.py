"""swarm.model.stage with outer steps: what a replica proposes, merges, hands to a joiner and says of itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from swarm.job.families import HEAD
from swarm.job.outer import REPLACE, MergeRule, OuterUpdate
from swarm.job.spec import JobSpec
from swarm.model.families import EMBEDDING
from swarm.model.islands.outer import Merge, compose
from swarm.model.stage import Stage
from swarm.types import Microbatch
from tests.support.whole_steps import CPU, B, T, commit, means_of, run, spec_of, stages_of, text

UPDATE = OuterUpdate(0.7, 0.9)


def outer_spec(stages: int = 1, **changes: object) -> JobSpec:
    spec = spec_of(stages, **changes)  # type: ignore[arg-type]
    averaging = spec.averaging.model_copy(update={"mode": "diloco"})
    values = {"every_steps": 1, "learning_rate": 0.7, "momentum": 0.9, "fragments": 1}
    outer = spec.outer.model_copy(update=values | {"overlap_steps": 0, "mixing": 0.0, "compression": "bfloat16"})
    return spec.model_copy(update={"averaging": averaging, "outer": outer})


def trained(stage: Stage, step: int, seed: int) -> None:
    """An inner step."""
    for index in range(2):
        run([stage], Microbatch(0, step, index), version=step, seed=seed + index)
    commit([stage], step)


def names_of(stage: Stage) -> list[str]:
    return [name for name, _ in stage.parameter_sizes()]


def exchange(stages: list[Stage], rule: MergeRule = REPLACE) -> Merge:
    """What the islands merge after all have proposed everything."""
    proposals = [stage.propose(names_of(stage)) for stage in stages]
    shares = [1.0 / len(stages)] * len(stages)
    deltas = {name: compose([proposal[name] for proposal in proposals], shares) for name in proposals[0]}
    return Merge(deltas, UPDATE, rule)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16_parameters"])
def test_a_merge_makes_a_version_like_any_other(dtype: str) -> None:
    """The weights before stay in the older buffer, and neither other parameters nor the optimizer's state change."""
    stages = stages_of(outer_spec(staleness=1, dtype=dtype))
    (stage,) = stages
    trained(stage, 0, 0)
    tokens, targets = text(9)
    before, loss = stage.capture(optimizer=True), stage.evaluate(1, tokens=tokens, targets=targets)[1]
    trained_to = {name: value.clone() for name, value in stage.weights.newest().items()}
    start = stage.propose([HEAD])[HEAD] + trained_to[HEAD]  # the outer weights, but for the code's rounding
    stage.merge(1, Merge({HEAD: start}, OuterUpdate(1.0, 0.0), REPLACE))
    digest = stage.digest()
    assert (stage.version, stage.digest()) == (2, digest)
    assert stage.evaluate(1, tokens=tokens, targets=targets)[1] == loss
    # Outer weights minus themselves: a head of almost nothing.
    assert stage.evaluate(2, tokens=tokens, targets=targets)[1] == pytest.approx(B * T * math.log(257), rel=1e-2)
    after = stage.capture(optimizer=True)
    newest = stage.weights.newest()
    assert [name for name, value in newest.items() if not torch.equal(value, trained_to[name])] == [HEAD]
    for name, state in before.optimizer.items():
        assert all(torch.equal(value, after.optimizer[name][key]) for key, value in state.items())


def test_what_does_not_come_from_finite_proposals_leaves_the_outer_weights_as_they_are() -> None:
    (stage,) = stages_of(outer_spec())
    start, outer = stage.capture(optimizer=False).weights, stage.digest().partition("-")[2]
    trained(stage, 0, 0)
    nan = {name: torch.full_like(value, math.nan) for name, value in start.items()}
    stage.merge(1, Merge(nan, None, REPLACE))
    assert stage.digest().partition("-")[2] == outer
    assert all(torch.equal(value, start[name]) for name, value in stage.weights.newest().items())


def test_the_digest_names_the_outer_state_too() -> None:
    one, two = (stages_of(outer_spec())[0] for _ in range(2))
    assert one.digest() == two.digest()
    held: dict[str, Tensor] = one.propose([EMBEDDING])
    zeros = {EMBEDDING: torch.zeros_like(held[EMBEDDING])}
    # The weights stay, as everything of them is kept; the outer state moves.
    for stage, update in ((one, UPDATE), (two, OuterUpdate(0.5, 0.9))):
        stage.merge(0, Merge({EMBEDDING: zeros[EMBEDDING] + 1}, update, MergeRule(1.0, 0.0)))
    inner, outer = zip(*(stage.digest().split("-") for stage in (one, two)), strict=True)
    assert inner[0] == inner[1]
    assert outer[0] != outer[1]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_joiner_gets_the_outer_state_with_the_snapshot_and_replays_merges_with_the_same_bits(staleness: int) -> None:
    """Snapshot in two parts, taken before and behind the same outer step, as a joiner may get them."""
    spec = outer_spec(staleness=staleness)
    donor, other, joiner = (Stage(spec, 0, CPU) for _ in range(3))
    for step in range(2):
        for number, stage in enumerate((donor, other)):
            trained(stage, 2 * step, 10 * number + step)
        merge = exchange([donor, other], MergeRule(0.25, 0.0))
        names = names_of(donor)
        early, late = names[::2], names[1::2]
        before = donor.snapshot(early)
        donor.merge(2 * step + 1, merge)
        other.merge(2 * step + 1, merge)
    joiner.absorb(early, 3, memoryview(before))
    joiner.absorb(late, 4, memoryview(donor.snapshot(late)))
    joiner.replay_merge(3, early, merge)
    assert joiner.settle(4) == donor.digest()
    for stage in (donor, joiner):
        trained(stage, 4, 5)
    both = [stage.propose(names) for stage in (donor, joiner)]
    assert all(torch.equal(both[0][name], both[1][name]) for name in names)
    assert donor.state_bytes(names) == len(donor.snapshot(names))


# Fragments -----------------------------------------------------------------------------------------------------------


def streaming_spec(code: str = "int8") -> JobSpec:
    """Two fragments, merged two inner steps behind their capture; outer steps 5, 8 and 11 of 0 to 13 and the last."""
    spec = outer_spec()
    averaging = spec.averaging.model_copy(update={"mode": "streaming"})
    values = {"every_steps": 6, "fragments": 2, "overlap_steps": 2, "mixing": 0.5, "compression": code}
    return spec.model_copy(update={"averaging": averaging, "outer": spec.outer.model_copy(update=values)})


def follow(stages: list[Stage], stop: int) -> None:
    """Islands of one stage make the steps before `stop`."""
    assert stages[0].proposals is not None
    course = stages[0].proposals.course
    for step in range(stages[0].version, stop):
        if course.is_outer(step):
            names = sorted(stages[0].proposals.merged_at(step))
            proposed = [stage.propose(names) for stage in stages]
            deltas = {
                name: compose([each[name] for each in proposed], [1.0 / len(stages)] * len(stages)) for name in names
            }
            for each in stages:
                each.merge(step, Merge(deltas, UPDATE, MergeRule(0.5, 0.0)))
            continue
        for number, one in enumerate(stages):
            trained(one, step, 10 * number + step)


def test_what_is_captured_is_proposed_as_it_was_while_training_goes_on() -> None:
    stages = [Stage(streaming_spec(), 0, CPU) for _ in range(2)]
    one = stages[0]
    assert one.proposals is not None
    captured = one.proposals.course.outer[0]
    follow(stages, captured.captured_version)
    names = sorted(one.proposals.merged_at(captured.step))
    proposed, digest = one.propose(names), one.proposals.digest()
    assert digest
    follow(stages, captured.step)
    assert all(torch.equal(proposed[name], value) for name, value in one.propose(names).items())
    assert one.proposals.digest() == digest in one.digest()
    follow(stages, captured.step + 1)
    assert one.proposals.digest() == ""
    newest = one.propose(names)
    assert not any(torch.equal(proposed[name], newest[name]) for name in names)


def test_a_joiner_gets_what_is_proposed_with_the_snapshot_or_by_replaying_the_capture() -> None:
    """The first half comes from between capture and merge, the other from before the capture."""
    donor, other, joiner = (Stage(streaming_spec(), 0, CPU) for _ in range(3))
    assert donor.proposals is not None
    assert joiner.proposals is not None
    captured = donor.proposals.course.outer[0]
    names = names_of(donor)
    early, late = names[::2], names[1::2]
    before = captured.captured_version - 1
    follow([donor, other], before)
    joiner.absorb(early, before, memoryview(donor.snapshot(early)))
    assert donor.state_bytes(early, before) == len(donor.snapshot(early)) < donor.state_bytes(early)
    for index in range(2):
        run([donor], Microbatch(0, before, index), version=before, seed=index)
    gradients = donor.places.gradients_of(means_of([donor], before))
    commit([donor], before)
    joiner.replay(before, early, gradients, learning_rate=1e-2, scale=1.0, skip=False)
    snapshot = donor.snapshot(late)
    assert len(snapshot) == joiner.state_bytes(late, captured.captured_version)
    joiner.absorb(late, captured.captured_version, memoryview(snapshot))
    assert joiner.settle(captured.captured_version) == donor.digest()
    assert joiner.proposals.digest() == donor.proposals.digest() != ""


def test_an_island_that_begins_anew_has_the_outer_weights_and_proposes_nothing() -> None:
    stages = [Stage(streaming_spec("none"), 0, CPU) for _ in range(2)]
    one = stages[0]
    assert one.proposals is not None
    follow(stages, one.proposals.course.level_from(3))
    names = names_of(one)
    outer = one.capture(optimizer=False).weights
    assert any(bool(value.any()) for value in one.propose(names).values())
    assert one.begin_anew() == one.digest()
    assert not any(bool(value.any()) for value in one.propose(names).values())
    assert all(torch.equal(value, outer[name]) for name, value in one.weights.newest().items())


def test_a_checkpoint_has_the_outer_weights_and_those_of_the_island() -> None:
    stages = [Stage(streaming_spec("none"), 0, CPU) for _ in range(2)]
    follow(stages, stages[0].proposals.course.level_from(3))  # type: ignore[union-attr]
    made = [stage.capture(optimizer=True) for stage in stages]
    assert all(torch.equal(made[0].weights[name], made[1].weights[name]) for name in made[0].weights)
    assert any(not torch.equal(made[0].trained[name], made[1].trained[name]) for name in made[0].trained)
    again = Stage(streaming_spec("none"), 0, CPU, made[0])
    assert (again.digest(), again.version) == (stages[0].digest(), stages[0].version)
    assert stages[0].capture(optimizer=False).trained == {}
