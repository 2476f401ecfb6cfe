"""swarm.job.spec: what a job file leaves out is filled in, what it says is checked."""

from __future__ import annotations

import json
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from client.api import _spec
from swarm.errors import InvalidConfig
from swarm.job.changes import changed_spec
from swarm.job.spec import (
    CONFIG_VALUES_MAX,
    GONE,
    GONE_VALUES,
    TEXT_CHARACTERS_MAX,
    VALUES_MAX,
    JobSpec,
    load_job,
    parse_job,
    put_value,
    read_job,
    spec_from_caller,
    spec_from_json,
)
from swarm.limits import SPEC_BYTES_MAX, STAGES_MAX
from tests.support.turns import UNITS_MAX, cost_s, held_up_s, unit


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


@pytest.mark.parametrize(("key", "value"), GONE_VALUES)
def test_a_value_that_is_gone_is_refused_by_name_with_what_to_do(key: str, value: object) -> None:
    values, (section, name) = job().model_dump(mode="json"), key.split(".")
    values[section][name] = value
    with pytest.raises(InvalidConfig, match=f"there is no {key} = '{value}' any more") as refused:
        parse_job(values)
    assert refused.value.hint == GONE_VALUES[key, value]


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
    lowered = spec.having("model", dtype=dtype)
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


LONG = "x" * (TEXT_CHARACTERS_MAX + 1)
GOOD: dict[str, Any] = {
    "name": "long",
    "model": {"family": "llama", "config": {"num_hidden_layers": 3}},
    "data": {"source": "text.txt"},
    "training": {"global_batch_sequences": 12, "microbatch_sequences": 2},
}
TOO_LONG: dict[str, Any] = {
    "pipeline.split": [1] * (VALUES_MAX + 1),
    "training.betas": ["a"] * 2000,
    "training.seed": [[[]] * 500] * 3,
    "training": {f"key{number}": number for number in range(VALUES_MAX + 1)},
    "data.source": LONG,
    "data.text_field": LONG,
    "nothing": LONG,
    "model.config.layer_types": ["full_attention"] * (CONFIG_VALUES_MAX + 1),
    "model.config.hidden_act": LONG,
    "model.config.labels": {LONG: 1},
}


def with_value(key: str, value: Any) -> dict[str, Any]:
    values = deepcopy(GOOD)
    put_value(values, key, value)
    return values


@pytest.mark.parametrize("key", TOO_LONG)
def test_what_is_too_long_is_refused_by_its_key(key: str, tmp_path: Path) -> None:
    values = with_value(key, TOO_LONG[key])
    with pytest.raises(InvalidConfig, match=rf"^job: .*{key}.* at most"):
        _spec(values, {})
    with pytest.raises(InvalidConfig, match=rf"^job spec: .*{key}.* at most"):
        spec_from_caller(json.dumps(values))


@pytest.mark.parametrize("key", ["pipeline.split", "data.source"])
def test_a_person_is_told_before_the_job_is_sent(key: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('name = "long"\n[model.config]\nnum_hidden_layers = 3\n[data]\nsource = "text.txt"\n')
    load_job(path)
    with pytest.raises(InvalidConfig, match=rf"^{path}: .*{key}.* at most"):
        load_job(path, [f"{key}={json.dumps(TOO_LONG[key])}"])


def test_the_longest_honest_job_is_taken() -> None:
    values = with_value("pipeline.split", [1] * STAGES_MAX)
    values["data"]["source"] = LONG[1:]
    labels = {f"{number}": f"label {number}" for number in range(2000)}
    values["model"]["config"] |= {"num_hidden_layers": STAGES_MAX, "id2label": labels, "layer_types": ["full"] * 10_000}
    values["model"]["config"]["label2id"] = {label: int(number) for number, label in labels.items()}
    assert spec_from_caller(json.dumps(values)) == spec_from_json(json.dumps(values))


def test_a_job_of_before_still_loads_and_keeps_its_long_texts() -> None:
    """Of a resume with other values the scheduler gets the whole spec again."""
    values = with_value("data.source", LONG)
    stored = spec_from_json(json.dumps(values))
    assert stored.data.source == LONG
    changed = deepcopy(stored.model_dump(mode="json"))
    changed["training"]["steps"] = 700
    sent = changed_spec(stored.model_dump(mode="json"), changed, "--set").model_dump_json()
    assert spec_from_caller(sent, stored).data.source == LONG
    changed["checkpoint"]["dir"] = f"/{LONG}"
    with pytest.raises(InvalidConfig, match=r"checkpoint\.dir .* at most"):
        changed_spec(stored.model_dump(mode="json"), changed, "--set")
    with pytest.raises(InvalidConfig, match=r"checkpoint\.dir .* at most"):
        spec_from_caller(json.dumps(changed), stored)


def filled(key: str, one: str, begin: str = "[", end: str = "]") -> str:
    """A spec of the greatest length, with something again and again in the place of a value."""
    before, behind = json.dumps(with_value(key, 12321)).split("12321")
    room = SPEC_BYTES_MAX - len(before) - len(behind) - len(begin) - len(end) - 1
    return f"{before}{begin}{','.join([one] * (room // (len(one) + 1)))}{end}{behind}"


DENSE = {
    "texts for a number": filled("training.betas", '"a"'),
    "a long cut": filled("pipeline.split", "1"),
    "texts for a cut": filled("pipeline.split", '"a"'),
    "tables for a number": filled("training.seed", "{}"),
    "lists in a config": filled("model.config.layer_types", "[]"),
    "fractions": filled("model.config.layer_types", "1.5"),
    "long numbers": filled("model.config.layer_types", "1" * 4300),
    "a long text": filled("data.source", "x" * (SPEC_BYTES_MAX - 1000), '"', '"'),
    "many unknown keys": json.dumps(GOOD | {f"{number}": 1 for number in range(40_000)}),
    "as many unknown keys as may be": json.dumps(GOOD | {f"{number}": 1 for number in range(VALUES_MAX - 20)}),
    "as many texts for numbers as may be": json.dumps(with_value("training.betas", ["a"] * (VALUES_MAX - 20))),
    "as many values as may be": json.dumps(with_value("model.config.x", [1] * (CONFIG_VALUES_MAX - 3))),
    "many long texts": json.dumps(with_value("model.config.x", [LONG[1:]] * 127)),
}


@pytest.mark.parametrize("what", DENSE)
def test_no_spec_holds_other_threads_up(what: str) -> None:
    """A list of 130,000 texts in the place of two numbers held up the whole scheduler for 80 ms."""
    assert len(DENSE[what]) <= SPEC_BYTES_MAX

    def read() -> None:
        with suppress(InvalidConfig):
            spec_from_caller(DENSE[what])

    units = min(held_up_s(read) for _ in range(2)) / cost_s(unit)
    assert units <= UNITS_MAX, f"{units:.0f} units"


def test_a_refused_value_is_shown_by_its_beginning() -> None:
    with pytest.raises(InvalidConfig, match="should be") as caught:
        spec_from_caller(json.dumps(with_value("training.steps", LONG[1:])))
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("text", ["steps = " + "1" * 5000, "steps = " + "[" * 100_000])
def test_toml_that_no_reader_takes_is_an_error_of_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match="is not TOML"):
        read_job(path)


@pytest.mark.parametrize("text", ["{", "{}", '{"data": []}', '{"data": {"spec": 3}}', "[" * 100_000, "{" * 100_000])
def test_json_that_holds_no_stored_job_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(InvalidConfig):
        load_job(tmp_path / "job.json")
