"""swarm.job.spec: what a job file leaves out is filled in, what it says is checked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarm.errors import InvalidConfig
from swarm.job.spec import GONE, JobSpec, parse_job, spec_from_json


def job(**training: Any) -> JobSpec:
    config = {"num_hidden_layers": 2}
    return parse_job({"name": "t", "model": {"config": config}, "data": {"source": "x"}, "training": training})


@pytest.mark.parametrize(
    ("training", "warmup"), [({}, 100), ({"steps": 20}, 20), ({"steps": 20, "warmup_steps": 5}, 5)]
)
def test_a_short_job_warms_up_over_all_its_steps_if_nobody_says_otherwise(training: Any, warmup: int) -> None:
    spec = job(**training)
    assert spec.training.warmup_steps == warmup
    assert spec_from_json(spec.model_dump_json()) == spec


def test_a_warmup_that_a_person_made_longer_than_the_job_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="warmup_steps = 21 is more than steps = 20"):
        job(steps=20, warmup_steps=21)


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_does_nothing_in_a_stored_spec_and_is_refused_by_name_where_it_did_something(
    key: str,
) -> None:
    stored, (section, name), (default, hint) = job().model_dump(mode="json"), key.split("."), GONE[key]
    for value in (default, "another"):
        stored[section][name] = value
        with pytest.raises(InvalidConfig, match=f"there is no key {key} any more") as refused:
            spec_from_json(json.dumps(stored)) if value == "another" else parse_job(stored)
        assert refused.value.hint == hint
    assert spec_from_json(json.dumps(stored | {section: stored[section] | {name: default}})) == job()


def test_an_optimizer_that_is_gone_is_refused_by_name_with_what_to_do() -> None:
    with pytest.raises(InvalidConfig, match=r"there is no training\.optimizer = 'nadamw' any more") as refused:
        job(optimizer="nadamw")
    assert "adamw" in refused.value.hint


def pipeline(**values: Any) -> JobSpec:
    return parse_job(
        {"name": "t", "model": {"config": {"num_hidden_layers": 2}}, "data": {"source": "x"}, "pipeline": values}
    )


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"overlap": -1}, "pipeline.overlap"),
        ({"overlap": "some"}, "pipeline.overlap"),
        ({"overlap": 1.0}, "pipeline.overlap"),
        ({"overlap": -0.25}, "pipeline.overlap"),
        ({"sync_steps": -1}, "pipeline.sync_steps"),
    ],
)
def test_an_overlap_that_makes_no_sense_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidConfig, match=told):
        pipeline(**values)


def test_a_codec_by_measured_speed_is_refused_where_bits_must_repeat() -> None:
    """Two runs measure different speeds, so their tensors would be rounded differently."""
    with pytest.raises(InvalidConfig, match='reproducible = true set it to "none"'):
        spec_from_json(
            pipeline(compression="auto").model_dump_json().replace('"reproducible":false', '"reproducible":true')
        )


def test_compressed_averaging_is_refused_where_bits_must_repeat() -> None:
    values = job(reproducible=True).model_dump(mode="json")
    assert parse_job(values).averaging.compression == "none"
    with pytest.raises(InvalidConfig, match="gives other bits for each number of replicas"):
        parse_job(values | {"averaging": {"compression": "int8"}})


def test_clipped_averaging_needs_replicas_to_compare_and_bits_that_need_not_repeat() -> None:
    values, clipped = job().model_dump(mode="json"), {"averaging": {"aggregate": "centered_clip"}}
    with pytest.raises(InvalidConfig, match=r"at least 4 replicas of a stage") as refused:
        parse_job(values | clipped)
    assert "limits.min_replicas = 4" in refused.value.hint
    four = clipped | {"limits": {"min_replicas": 4}}
    assert parse_job(values | four).averaging.aggregate == "centered_clip"
    with pytest.raises(InvalidConfig, match="another gradient than the mean"):
        parse_job(job(reproducible=True).model_dump(mode="json") | four)


@pytest.mark.parametrize(
    ("dtype", "compression", "codec"),
    [
        ("float32", "auto", "none"),
        ("bfloat16", "auto", "none"),
        ("bfloat16_parameters", "auto", "bfloat16"),
        ("bfloat16_parameters", "none", "none"),
        ("float32", "int8", "int8"),
    ],
)
def test_where_no_link_is_measured_the_smallest_exact_codec_stands_for_auto(
    dtype: str, compression: str, codec: str
) -> None:
    spec = pipeline(compression=compression)
    lowered = spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": dtype})})
    assert lowered.unmeasured_compression == codec


def trust_job(trust: dict[str, Any], *, reproducible: bool = True) -> JobSpec:
    return parse_job(
        {
            "name": "t",
            "model": {"config": {"num_hidden_layers": 2}},
            "data": {"source": "x"},
            "training": {"reproducible": reproducible},
            "pipeline": {"compression": "none"},
            "trust": trust,
        }
    )


def test_nobody_is_checked_unless_the_job_file_says_so() -> None:
    assert not trust_job({}).trust.hashes_hops
    assert not trust_job({"spot_check": 0.0}, reproducible=False).trust.hashes_hops
    assert trust_job({"spot_check": 0.02}).trust.hashes_hops


def test_what_is_saved_can_be_compared_in_every_job() -> None:
    assert not trust_job({}).trust.second_hash
    assert trust_job({"second_hash": True}, reproducible=False).trust.second_hash


@pytest.mark.parametrize("value", [-0.1, 1.5, "0.1", float("nan")])
def test_a_share_is_a_number_between_0_and_1(value: object) -> None:
    with pytest.raises(InvalidConfig, match=r"trust\.spot_check"):
        trust_job({"spot_check": value})


def test_results_that_need_not_be_equal_cannot_be_compared() -> None:
    with pytest.raises(InvalidConfig, match=r"compares results bit for bit") as refused:
        trust_job({"spot_check": 0.02}, reproducible=False)
    assert "training.reproducible = true" in f"{refused.value}"


def test_sums_that_need_not_be_equal_cannot_be_recounted() -> None:
    with pytest.raises(InvalidConfig, match=r"trust\.recount = 0\.1 compares results bit for bit"):
        trust_job({"recount": 0.1}, reproducible=False)
    assert trust_job({"recount": 0.1}).trust.hashes_hops


def test_means_that_compression_has_changed_cannot_be_compared() -> None:
    values = {"trust": {"second_owner": 0.1}, "averaging": {"compression": "int8"}, "training": {}}
    with pytest.raises(InvalidConfig, match=r"compression changes") as refused:
        parse_job({"name": "t", "model": {"config": {"num_hidden_layers": 2}}, "data": {"source": "x"}, **values})
    assert 'averaging.compression = "none"' in f"{refused.value}"
    assert trust_job({"second_owner": 0.1}, reproducible=False).trust.second_owner == 0.1
