"""How much a job file may say: it is counted before anything is made of it, and what is stored is not counted again."""

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
from swarm.job.lengths import CONFIG_VALUES_MAX, TEXT_CHARACTERS_MAX, VALUES_MAX
from swarm.job.overrides import put_value
from swarm.job.spec import load_job, read_job, spec_from_caller, spec_from_json
from swarm.limits import SPEC_BYTES_MAX, STAGES_MAX
from tests.support.turns import UNITS_MAX, cost_s, held_up_s, unit

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
