"""swarm.job.spec: what a job file leaves out is filled in, what it says is checked."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.errors import InvalidConfig
from swarm.job.spec import JobSpec, parse_job, spec_from_json


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
