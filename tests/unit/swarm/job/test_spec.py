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
from tests.support.turns import UNITS_MAX, held_up_units


def job(training: dict[str, Any] | None = None, **sections: dict[str, Any]) -> JobSpec:
    """A small job with these values, by section."""
    model = {"config": {"num_hidden_layers": 2}}
    return parse_job({"name": "t", "model": model, "data": {"source": "x"}, "training": training or {}} | sections)


@pytest.mark.parametrize(
    ("training", "warmup"), [({}, 100), ({"steps": 20}, 20), ({"steps": 20, "warmup_steps": 5}, 5)]
)
def test_a_short_job_warms_up_over_all_its_steps_if_nobody_says_otherwise(training: Any, warmup: int) -> None:
    spec = job(training)
    assert spec.training.warmup_steps == warmup
    assert spec_from_json(spec.model_dump_json()) == spec


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


EXACT: dict[str, Any] = {"training": {"reproducible": True}, "pipeline": {"compression": "none"}}
CLIPPED: dict[str, Any] = {"averaging": {"aggregate": "centered_clip"}, "limits": {"min_replicas": 4}}


@pytest.mark.parametrize(
    ("sections", "told", "hint"),
    [
        ({"training": {"steps": 20, "warmup_steps": 21}}, "warmup_steps = 21 is more than steps = 20", "raise"),
        *(({"pipeline": {"overlap": late}}, r"pipeline\.overlap", "see: ") for late in (-1, "some", 1.0, -0.25)),
        ({"pipeline": {"sync_steps": -1}}, r"pipeline\.sync_steps", "see: "),
        (
            EXACT | {"pipeline": {"compression": "auto"}},
            "measured speed of links",
            'reproducible = true set it to "none"',
        ),
        (EXACT | {"averaging": {"compression": "int8"}}, "other bits for each number of replicas", 'set it to "none"'),
        (EXACT | CLIPPED, "another gradient than the mean", 'set it to "mean"'),
        ({"averaging": CLIPPED["averaging"]}, "at least 4 replicas of a stage", "limits.min_replicas = 4"),
        *(
            (EXACT | {"trust": {"spot_check": share}}, r"trust\.spot_check", "see: ")
            for share in (-0.1, 1.5, "0.1", float("nan"))
        ),
        ({"trust": {"spot_check": 0.02}}, "compares results bit for bit", "set that"),
        ({"trust": {"recount": 0.1}}, r"trust\.recount = 0\.1 compares results bit for bit", "set that"),
        (
            {"trust": {"second_owner": 0.1}, "averaging": {"compression": "int8"}},
            "compression changes",
            'set averaging.compression = "none"',
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_what_to_do(sections: dict[str, Any], told: str, hint: str) -> None:
    """Two runs measure different speeds, so their tensors would be rounded differently."""
    with pytest.raises(InvalidConfig, match=told) as refused:
        job(**sections)
    assert hint in f"{refused.value} {refused.value.hint}"


def test_nobody_is_checked_unless_the_job_file_says_so() -> None:
    assert not job().trust.hashes_hops
    for key in ("spot_check", "recount"):
        assert job(**EXACT, trust={key: 0.02}).trust.hashes_hops
    for key in ("second_hash", "second_owner"):  # of which any job's may be compared
        assert not job(trust={key: 1 if key == "second_owner" else True}).trust.hashes_hops
    assert job(**CLIPPED).averaging.aggregate == "centered_clip"


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
    spec = job(model={"config": {"num_hidden_layers": 2}, "dtype": dtype}, pipeline={"compression": compression})
    assert spec.unmeasured_compression == codec


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

    units = held_up_units(read)
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
