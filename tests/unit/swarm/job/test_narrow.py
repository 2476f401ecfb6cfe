"""Narrow places in a job file: where they are, how wide a cut is, where it may lie, and what is refused."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.storage.checkpoints.catalog import same_model
from swarm.errors import CheckpointDamaged, InvalidConfig, OutOfMemory
from swarm.job.changes import check_changes, check_state, places_of, with_places_of
from swarm.job.footprint import memory_by_stages, model_costs, stage_footprint
from swarm.job.memory_split import fit, needs
from swarm.job.partition import balanced_split, flops_per_token, shape_text
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, NarrowSection, apply_overrides, parse_job
from swarm.types import Memory


def job(layers: int = 8, narrow: dict[str, Any] | None = None, **sections: Any) -> JobSpec:
    config = {"hidden_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4}
    values = {
        "model": {"config": config, "narrow": {"kind": "maxout"} if narrow is None else narrow},
        "data": {"source": "x", "sequence_length": 64},
        "training": {"global_batch_sequences": 16, "microbatch_sequences": 2},
    }
    return parse_job({"name": "x"} | values | sections)


def resolved(spec: JobSpec, stages: int = 2, *offers: int) -> JobSpec:
    here = [Memory(size) for size in offers]
    return resolve(spec, Basis(2000, stages=stages, idle=here, present=here))


@pytest.mark.parametrize(
    ("layers", "narrow", "pipeline", "told", "hint"),
    [
        (8, {"factor": 8}, {}, 'factor = 8 does nothing with kind = "none"', "set model.narrow.kind, or remove it"),
        (8, {"every": 2}, {}, 'every = 2 does nothing with kind = "none"', "set model.narrow.kind, or remove it"),
        (
            *(8, {"kind": "maxout", "factor": 6}, {}),
            *("model.narrow.factor = 6 does not divide model.config.hidden_size = 128", "choose 2, 4, 8, 16, 32 or 64"),
        ),
        (
            *(8, {"kind": "maxout", "every": 3}, {}),
            *("model.narrow.every = 3 does not divide the model's 8 decoder layers", 'choose 1, 2, 4 or "auto"'),
        ),
        (
            *(8, {"kind": "bottleneck", "every": 8}, {}),
            *(
                "model.narrow.every = 8 leaves no place between the model's 8 decoder layers",
                'choose 1, 2, 4 or "auto"',
            ),
        ),
        (8, {"kind": "maxout", "rank": 4}, {}, 'rank = 4 does nothing with kind = "maxout"', "remove it"),
        (1, {"kind": "maxout"}, {}, "has no place in a model of 1 decoder layer", "leave model.narrow out"),
        (
            *(8, {"kind": "maxout", "every": 2}, {"split": [3, 5]}),
            "pipeline.split = [3, 5] would cut behind layer 3, where the model is not narrow",
            "cut behind 2, 4 or 6",
        ),
        (
            *(2, {"kind": "maxout"}, {"split": [0, 2]}),
            *("would cut off the embedding or the head, where the model is not narrow", "cut behind 1"),
        ),
        (
            *(8, {"kind": "maxout", "every": 2}, {"stages": 5}),
            "pipeline.stages = 5 is more than the 4 groups of layers between narrow places",
            "lower it; a new job may have more places",
        ),
        (8, {"kind": "maxout", "factor": 1}, {}, "model.narrow.factor = 1", "see: "),
        (8, {"kind": "residual"}, {}, "model.narrow.kind = 'residual'", "see: "),
    ],
)
def test_places_that_cannot_be_are_refused_with_what_to_do(
    layers: int, narrow: dict[str, Any], pipeline: dict[str, Any], told: str, hint: str
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        resolved(job(layers, narrow, pipeline=pipeline))
    assert told in refused.value.message
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("layers", "stages", "split", "every"),
    [
        (8, 1, "auto", 4), (8, 2, "auto", 4), (8, 3, "auto", 2), (8, 5, "auto", 1), (7, 2, "auto", 1),
        (12, 5, "auto", 2), (8, 2, [2, 6], 2), (8, 1, [8], 4), (6, 3, [1, 2, 3], 1),
    ],
)  # fmt: skip
def test_a_model_has_as_few_places_as_its_cut_asks_for(layers: int, stages: int, split: Any, every: int) -> None:
    spec = resolved(job(layers, pipeline={"split": split}), stages)
    assert spec.model.narrow.every == every
    assert list(spec.places) == list(range(every, layers, every))
    assert spec.boundary_width == 32
    assert resolved(spec) == spec


def test_people_read_where_the_model_is_narrow_and_what_a_cut_carries() -> None:
    spec = resolved(job(narrow={"kind": "bottleneck", "factor": 8}, pipeline={"compression": "int8"}), 4)
    told = "; bottleneck to 1/8 behind layers 2, 4, 6: 16 bytes per token and way instead of 131; "
    assert told in shape_text(spec)
    assert "behind" not in shape_text(resolved(job(narrow={})))


@pytest.mark.parametrize(
    "override", ['model.narrow.kind="bottleneck"', "model.narrow.factor=8", "model.narrow.every=2"]
)
def test_places_are_kept_for_life_while_stages_may_change(override: str) -> None:
    spec = resolved(job())
    values = spec.model_dump(mode="json")
    key = override.partition("=")[0]
    with pytest.raises(InvalidConfig, match=rf"{key} cannot change from .* the weights are of this model"):
        check_changes(spec, resolved(parse_job(apply_overrides(values, [override]))))
    open_cut = spec.having("pipeline", stages=1, split="auto")
    check_changes(spec, resolved(open_cut))


PLACES = {"kind": "maxout", "every": 2}
ANCHOR = {"kind": "anchor", "every": 2}


@pytest.mark.parametrize(
    ("ours", "held", "told", "hint"),
    [
        ({}, PLACES, 'kind = "none"', 'set in [model.narrow] kind = "maxout", factor = 4, every = 2, rank = 0'),
        (PLACES, {}, 'kind = "maxout"', "leave model.narrow out"),
        (PLACES, ANCHOR, 'kind = "maxout"', 'kind = "anchor", factor = 4, every = 2, rank = 0'),
        (PLACES | {"factor": 8}, PLACES, "factor = 8", 'kind = "maxout", factor = 4, every = 2, rank = 0'),
        (PLACES, PLACES | {"every": 4}, "every = 2", 'kind = "maxout", factor = 4, every = 4, rank = 0'),
        (ANCHOR, ANCHOR | {"rank": 3}, "rank = 0", 'kind = "anchor", factor = 4, every = 2, rank = 3'),
    ],
)
def test_a_job_starts_only_from_weights_with_its_places(
    ours: dict[str, Any], held: dict[str, Any], told: str, hint: str
) -> None:
    """A job without places ran on weights with some and dropped them; others failed once their stages were loaded."""
    spec, source = resolved(job(narrow=ours)), resolved(job(narrow=held))
    for refuses in (lambda: same_model(source, spec, "job a-1"), lambda: check_state({"narrow": held}, spec)):
        with pytest.raises(InvalidConfig) as refused:
            refuses()
        assert f"model.narrow.{told}, but " in refused.value.message
        assert refused.value.hint.endswith(hint)
    same_model(source, source, "job a-1")
    check_state({"narrow": held}, source)


def test_a_checkpoint_that_says_nothing_of_places_has_none_and_damaged_places_are_told() -> None:
    check_state({}, resolved(job(narrow={})))
    with pytest.raises(InvalidConfig, match=r"model\.narrow\.kind"):
        check_state({}, resolved(job()))
    for damaged in (None, 3, {"kind": "x"}, PLACES | {"every": 0}, PLACES | {"every": True}, {"factor": 8}):
        with pytest.raises(CheckpointDamaged, match="names narrow places that no model has"):
            check_state({"narrow": damaged}, resolved(job()))


@pytest.mark.parametrize(
    ("ours", "held", "every"),
    [
        ({"kind": "maxout"}, PLACES, 2),
        ({"kind": "maxout", "every": 1}, PLACES, 1),
        ({"kind": "anchor"}, PLACES, "auto"),
        ({"kind": "maxout"}, PLACES | {"every": 3}, "auto"),
        ({"kind": "maxout"}, {}, "auto"),
        ({}, PLACES, "auto"),
    ],
)
def test_places_left_open_are_those_of_the_weights(ours: dict[str, Any], held: dict[str, Any], every: Any) -> None:
    assert with_places_of(places_of({"narrow": held}), job(narrow=ours)).model.narrow.every == every


@given(data=st.data())
def test_a_cut_lies_on_places_and_is_the_cheapest_of_those_that_fit(data: st.DataObject) -> None:
    """Against every cut on places and every assignment of peers."""
    groups, every = data.draw(st.integers(3, 5)), data.draw(st.integers(1, 3))
    spec = resolved(job(groups * every, {"kind": "maxout", "every": every}, pipeline={"max_in_flight": 1}))

    def takes(layers: int, stage: int) -> int:
        return stage_footprint(spec, layers, stage, 3).total_bytes

    sizes = st.tuples(st.integers(1, groups), st.integers(0, 2))
    offered = [takes(every * count, stage) for count, stage in data.draw(st.lists(sizes, min_size=3, max_size=3))]
    cuts = [
        (every * a, every * b, every * (groups - a - b)) for a in range(1, groups - 1) for b in range(1, groups - a)
    ]

    def fits(cut: tuple[int, ...]) -> bool:
        wanted = [takes(layers, stage) for stage, layers in enumerate(cut)]
        return any(all(a <= b for a, b in zip(wanted, order, strict=True)) for order in permutations(offered))

    layer, head = flops_per_token(spec)
    costs = [max(a, b, c + head / layer) for a, b, c in cuts if fits((a, b, c))]
    plan = fit(model_costs(spec), [Memory(size) for size in offered], 3, 1)
    assert (plan is None) == (not costs)
    if plan is not None:
        assert fits(plan)
        assert max(plan[0], plan[1], plan[2] + head / layer) == min(costs)
        assert len(needs(model_costs(spec), plan, 3)) == 3
    a, b, c = balanced_split(spec, 3)
    assert max(a, b, c + head / layer) == min(max(a, b, c + head / layer) for a, b, c in cuts)


def test_short_memory_makes_more_places_where_the_job_file_leaves_them_open() -> None:
    plain = job(pipeline={"max_in_flight": 1, "overlap": 0}).having("training", optimizer_on="device")
    plain = plain.having("model", recompute=False)
    least = max(stage_footprint(resolved(plain, 4), 2, stage, 4).total_bytes for stage in range(4))
    offers = [least] * 8
    spec = resolved(plain, 2, *offers)
    assert (spec.model.narrow.every, spec.split) == (2, (2, 2, 2, 2))
    assert list(memory_by_stages(spec)) == [1, 2, 4]
    with pytest.raises(OutOfMemory, match="4 decoder layers with the head needs about"):
        resolved(plain.having("model", narrow=NarrowSection(kind="maxout", every=4)), 2, *offers)
    with pytest.raises(OutOfMemory, match="one decoder layer with the head needs about"):
        resolved(plain, 2, *[least // 4] * 8)


def test_what_crosses_a_cut_is_counted_narrow() -> None:
    wide, narrow = resolved(job(narrow={}), 2), resolved(job(narrow={"kind": "maxout", "factor": 4}), 2)
    assert wide.boundary_width == 4 * narrow.boundary_width
    was, now = (stage_footprint(spec, 4, 1, 2) for spec in (wide, narrow))
    assert (was.inputs, was.outputs) == (4 * now.inputs, 4 * now.outputs)
