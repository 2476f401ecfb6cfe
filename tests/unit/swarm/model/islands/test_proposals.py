"""swarm.model.islands.proposals: what is captured stays as it was until it is merged, on every replica."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import CorruptFrame
from swarm.job.spec import JobSpec
from swarm.model.islands.proposals import Proposals
from swarm.model.stage import Stage
from tests.support.whole_steps import CPU, spec_of


def spec_with(fragments: int, overlap: int, code: str = "int8") -> JobSpec:
    spec = spec_of(1)
    averaging = spec.averaging.model_copy(update={"mode": "streaming"})
    values = {"every_steps": 6, "fragments": fragments, "overlap_steps": overlap, "mixing": 0.5, "compression": code}
    outer = spec.outer.model_copy(update=values | {"learning_rate": 0.4, "momentum": 0.9})
    return spec.model_copy(update={"averaging": averaging, "outer": outer})


def proposals_of(spec: JobSpec) -> tuple[Stage, Proposals]:
    stage = Stage(spec, 0, CPU)
    assert stage.proposals is not None
    return stage, stage.proposals


def test_an_outer_step_merges_the_layers_of_its_fragment() -> None:
    """Three layers in two fragments: embedding, 0 and 2; then 1, norm and head."""
    _, found = proposals_of(spec_with(2, 2))
    first, second = (next(merge.step for merge in found.course.outer if merge.fragment == p) for p in range(2))
    names = [found.merged_at(first), found.merged_at(second)]
    assert {name.split(".")[2] for name in names[0] if ".layers." in name} == {"0", "2"}
    assert {name.split(".")[2] for name in names[1] if ".layers." in name} == {"1"}
    assert ("model.embed_tokens.weight" in names[0], "lm_head.weight" in names[1]) == (True, True)
    assert not names[0] & names[1]


@pytest.mark.parametrize("code", ["none", "bfloat16", "int8", "fp4"])
def test_what_is_held_does_not_follow_the_weights(code: str) -> None:
    stage, found = proposals_of(spec_with(2, 2, code))
    captured = found.course.outer[0]
    newest = stage.weights.newest()
    name = min(found.merged_at(captured.step))
    with torch.no_grad():
        newest[name].add_(0.5)
    found.capture(newest.items(), captured.captured_version - 1)
    assert found.digest() == "", "nothing is captured there"
    found.capture(newest.items(), captured.captured_version)
    coded, digest = found.coded(name).clone(), found.digest()
    with torch.no_grad():
        newest[name].add_(1.0)
    assert torch.equal(found.coded(name), coded)
    assert found.digest() == digest != ""
    assert found.decoded(name, coded).mean() == pytest.approx(-0.5, abs=0.05)
    assert coded.numel() == found.size_bytes(name) == found.held_bytes(name, captured.captured_version)
    other = min(newest.keys() - found.merged_at(captured.step))
    assert found.tensors(other, captured.captured_version) == []
    assert [tensor.numel() for tensor in found.tensors(name, captured.step)] == [coded.numel()]
    assert found.tensors(name, captured.step + 1) == [], "merged"
    assert not torch.equal(found.coded(name), coded)


@pytest.mark.parametrize(("fragments", "overlap"), [(2, 0), (1, 0)])
def test_without_inner_steps_between_capture_and_merge_nothing_is_held(fragments: int, overlap: int) -> None:
    stage, found = proposals_of(spec_with(fragments, overlap))
    for version in range(found.course.steps + 1):
        found.capture(stage.weights.newest().items(), version)
        assert found.digest() == ""
    names = [name for name, _ in stage.parameter_sizes()]
    assert stage.state_bytes(names) == len(stage.snapshot(names))


def test_a_proposal_of_another_size_is_refused() -> None:
    _, found = proposals_of(spec_with(2, 2))
    with pytest.raises(CorruptFrame):
        found.decoded("lm_head.weight", torch.zeros(3, dtype=torch.uint8))
