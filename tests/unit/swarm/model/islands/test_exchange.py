"""swarm.model.islands.exchange: islands that send each other coded bytes make the merge of one process, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from swarm.errors import CorruptFrame
from swarm.job.outer import REPLACE, SENT, OuterUpdate
from swarm.job.spec import JobSpec
from swarm.model.islands.exchange import (
    decoded,
    mean_proposal,
    merge_of,
    merge_of_deltas,
    proposal_bytes,
    proposal_sizes,
    proposed,
    restored,
    shortened,
)
from swarm.model.islands.outer import Merge, compose
from swarm.model.stage import Stage
from swarm.types import Microbatch
from tests.support.whole_steps import commit, run, spec_of, stages_of

TOKENS = (30, 50)


def outer_spec(stages: int, code: str, *, tied: bool = False, mode: str = "diloco", threshold: float = 0.0) -> JobSpec:
    spec = spec_of(stages, config={"tie_word_embeddings": tied})
    averaging = spec.averaging.model_copy(update={"mode": mode})
    values = {"every_steps": 1, "learning_rate": 0.7, "momentum": 0.9, "fragments": 1, "threshold": threshold}
    outer = spec.outer.model_copy(update=values | {"overlap_steps": 0, "mixing": 0.0, "compression": code})
    return spec.model_copy(update={"averaging": averaging, "outer": outer})


def islands(spec: JobSpec) -> list[list[Stage]]:
    """Two islands that trained a step on data of their own."""
    made = [stages_of(spec) for _ in TOKENS]
    for number, stages in enumerate(made):
        for index in range(2):
            run(stages, Microbatch(0, 0, index), version=0, seed=10 * number + index)
        commit(stages, 0)
    return made


@pytest.mark.parametrize("mode", ["diloco", "gaia"])
@pytest.mark.parametrize("code", ["none", "bfloat16", "int8", "fp4"])
@pytest.mark.parametrize(("stages", "tied"), [(1, True), (2, True), (2, False)])
def test_bytes_that_travel_make_the_merge_of_one_process(mode: str, code: str, stages: int, tied: bool) -> None:
    spec = outer_spec(stages, code, tied=tied, mode=mode, threshold=0.5 if mode == "gaia" else 0.0)
    ours, twins = islands(spec), islands(spec)
    shares = [tokens / sum(TOKENS) for tokens in TOKENS]
    for stage in range(stages):
        sent = {unit: [proposed(our[stage], unit, 1) for our in ours] for unit in ours[0][stage].units}
        for unit, payloads in sent.items():
            assert [payload.numel() for payload in payloads] == [proposal_bytes(ours[0][stage], unit, 1)] * 2
        names = [name for name, _ in twins[0][stage].parameter_sizes()]
        proposals = [twin[stage].propose(names) for twin in twins]
        deltas = {name: compose([proposal[name] for proposal in proposals], shares) for name in names}
        for island in range(2):
            at = ours[island][stage]
            means = {
                unit: mean_proposal((decoded(at, unit, 1, payload) for payload in payloads), TOKENS)
                for unit, payloads in sent.items()
            }
            at.merge(at.version, merge_of(at, spec, 1, means))
            twin = twins[island][stage]
            twin.merge(twin.version, Merge(deltas, OuterUpdate(0.7, 0.9), SENT if mode == "gaia" else REPLACE))
            assert at.digest() == twin.digest()


def test_without_means_all_go_back_to_the_outer_weights() -> None:
    spec = outer_spec(1, "none")
    (one,), (fresh,) = islands(spec)[0], stages_of(spec)
    before = one.digest()
    one.merge(one.version, merge_of(one, spec, 1, None))
    assert one.digest() != before
    weights, start = one.capture(optimizer=False).weights, fresh.capture(optimizer=False).weights
    assert all(torch.equal(weights[name], start[name]) for name in start)


@pytest.mark.parametrize("skip", [False, True])
def test_a_joiner_that_replays_an_outer_step_part_by_part_has_the_bits_of_who_made_it(skip: bool) -> None:
    spec = outer_spec(1, "none")
    (one,), (joiner,) = islands(spec)[0], islands(spec)[0]
    means = {} if skip else {unit: torch.full((layout.elements,), 1e-3) for unit, layout in one.units.items()}
    deltas = {name: delta.view(-1) for name, delta in one.places.gradients_of(means).items()} if means else {}
    step = one.version
    one.merge(step, merge_of(one, spec, step, means if deltas else None))
    names = [name for name, _ in joiner.parameter_sizes()]
    for part in (names[:3], names[3:]):
        of_part = {name: deltas[name] for name in part if deltas}
        joiner.replay_merge(step, part, merge_of_deltas(joiner, spec, step, part, of_part or None))
    assert joiner.settle(step + 1) == one.digest()


def test_a_proposal_that_is_not_finite_makes_the_mean_not_finite() -> None:
    spec = outer_spec(1, "fp4")
    (one,) = islands(spec)[0]
    (unit,) = one.units
    with torch.no_grad():
        next(iter(one.module.parameters())).view(-1)[0] = math.inf
    delta = decoded(one, unit, 1, proposed(one, unit, 1))
    assert not math.isfinite(sum(norm.squared_norm for norm in one.places.squared_norms(unit, delta)))


@pytest.mark.parametrize(("code", "code_bytes"), [("none", 4), ("bfloat16", 2), ("int8", 1)])
def test_with_gaia_a_bit_says_which_codes_travel_and_only_those_that_are_not_0_do(code: str, code_bytes: int) -> None:
    (one,) = islands(outer_spec(1, code, mode="gaia", threshold=0.5))[0]
    (unit,) = one.units
    coded = proposed(one, unit, 1)
    codes = coded.view(-1, code_bytes)
    sent, sizes = shortened(one, coded), proposal_sizes(one, unit, 1)
    assert sent.numel() == math.ceil(len(codes) / 8) + int(codes.any(dim=1).sum()) * code_bytes < coded.numel()
    assert torch.equal(restored(one, unit, 1, sent), coded)
    nothing = shortened(one, torch.zeros_like(coded))
    assert (nothing.numel(), coded.numel()) == (sizes[0], sizes[-1])
    assert not restored(one, unit, 1, nothing).any()
    full = torch.ones_like(coded)
    assert shortened(one, full) is full, "it would be longer"


def test_a_short_proposal_that_contradicts_itself_is_refused() -> None:
    (one,) = islands(outer_spec(1, "none", mode="gaia", threshold=0.5))[0]
    (unit,) = one.units
    sent = shortened(one, proposed(one, unit, 1))
    bits = math.ceil(one.units[unit].elements / 8)
    for wrong in (sent[:-4], sent[:-1], torch.cat([sent, sent[-4:]]), sent[: bits - 1], sent[:0]):
        with pytest.raises(CorruptFrame, match="does not list the codes"):
            restored(one, unit, 1, wrong)
    flipped = sent.clone()
    flipped[0] ^= 128
    with pytest.raises(CorruptFrame, match="does not list the codes"):
        restored(one, unit, 1, flipped)


def test_bytes_of_another_size_are_refused() -> None:
    (one,) = stages_of(outer_spec(1, "int8"))
    (unit,) = one.units
    for more in (-1, 1):
        with pytest.raises(CorruptFrame):
            decoded(one, unit, 1, torch.zeros(proposal_bytes(one, unit, 1) + more, dtype=torch.uint8))
