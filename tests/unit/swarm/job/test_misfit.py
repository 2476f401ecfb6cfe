"""swarm.job.misfit: a value that does not fit is told in the words of a job file."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.errors import InvalidConfig
from swarm.job.spec import parse_job, put_value


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("averaging.timeout_s", "60s", "'60s': should be a number; write a number of seconds, without a unit"),
        ("model.recompute", 1, "1: should be 'auto' or true or false; see: "),
        ("pipeline.split", [1, "x"], ".1 = 'x': should be a whole number; see: "),
        ("pipeline", 3, "3: should be a section; see: "),
        ("training.betas", 0.9, "0.9: should be a list; see: "),
        ("name", "My run", "'My run': should be 1 to 40 of a-z, 0-9 and -; see: "),
    ],
)
def test_a_wrong_type_is_told_in_the_words_of_a_job_file(key: str, value: Any, told: str) -> None:
    """It said "a valid dictionary or instance of PipelineSection", and "string should match pattern"."""
    values: dict[str, Any] = {"name": "t", "data": {"source": "x"}}
    put_value(values, key, value)
    with pytest.raises(InvalidConfig) as caught:
        parse_job(values)
    assert f"{key}{'' if told.startswith('.') else ' = '}{told}" in f"{caught.value.message}; {caught.value.hint}"
