"""The section [trust] of a job file."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.errors import InvalidConfig
from swarm.job.spec import JobSpec, parse_job


def job(trust: dict[str, Any], *, reproducible: bool = True) -> JobSpec:
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
    assert not job({}).trust.hashes_hops
    assert not job({"spot_check": 0.0}, reproducible=False).trust.hashes_hops
    assert job({"spot_check": 0.02}).trust.hashes_hops


def test_what_is_saved_can_be_compared_in_every_job() -> None:
    assert not job({}).trust.second_hash
    assert job({"second_hash": True}, reproducible=False).trust.second_hash


@pytest.mark.parametrize("value", [-0.1, 1.5, "0.1", float("nan")])
def test_a_share_is_a_number_between_0_and_1(value: object) -> None:
    with pytest.raises(InvalidConfig, match=r"trust\.spot_check"):
        job({"spot_check": value})


def test_results_that_need_not_be_equal_cannot_be_compared() -> None:
    with pytest.raises(InvalidConfig, match=r"compares results bit for bit") as refused:
        job({"spot_check": 0.02}, reproducible=False)
    assert "training.reproducible = true" in f"{refused.value}"


def test_sums_that_need_not_be_equal_cannot_be_recounted() -> None:
    with pytest.raises(InvalidConfig, match=r"trust\.recount = 0\.1 compares results bit for bit"):
        job({"recount": 0.1}, reproducible=False)
    assert job({"recount": 0.1}).trust.hashes_hops


def test_means_that_compression_has_changed_cannot_be_compared() -> None:
    values = {"trust": {"second_owner": 0.1}, "averaging": {"compression": "int8"}, "training": {}}
    with pytest.raises(InvalidConfig, match=r"compression changes") as refused:
        parse_job({"name": "t", "model": {"config": {"num_hidden_layers": 2}}, "data": {"source": "x"}, **values})
    assert 'averaging.compression = "none"' in f"{refused.value}"
    assert job({"second_owner": 0.1}, reproducible=False).trust.second_owner == 0.1
