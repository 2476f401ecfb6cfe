"""The section [trust] of a job file."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.errors import InvalidConfig
from swarm.job.sections.trust import TrustSection
from swarm.job.spec import JobSpec, parse_job


def job(trust: dict[str, Any], *, reproducible: bool = True, min_replicas: int = 1) -> JobSpec:
    return parse_job(
        {
            "name": "t",
            "model": {"config": {"num_hidden_layers": 2}},
            "data": {"source": "x"},
            "training": {"reproducible": reproducible},
            "pipeline": {"compression": "none"},
            "limits": {"min_replicas": min_replicas},
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


@pytest.mark.parametrize(("key", "value"), [("newcomer_hops", 50), ("norm_band", True)])
def test_hops_are_hashed_where_newcomers_or_unusual_sizes_are_checked(key: str, value: object) -> None:
    assert job({key: value}).trust.hashes_hops
    with pytest.raises(InvalidConfig, match=rf"trust\.{key} = (50|true) compares results bit for bit"):
        job({key: value}, reproducible=False)


@pytest.mark.parametrize(("replicas", "most"), [(3, 1), (4, 1), (5, 2), (9, 4)])
def test_whoever_invited_several_has_a_minority_of_the_least_replicas(replicas: int, most: int) -> None:
    assert TrustSection(inviter_quota=True).per_inviter(replicas) == most < replicas / 2
    assert TrustSection().per_inviter(replicas) == 0


def test_two_replicas_leave_no_inviter_a_minority() -> None:
    with pytest.raises(InvalidConfig, match=r"no inviter a minority of 2 replicas") as refused:
        job({"inviter_quota": True}, min_replicas=2)
    assert "limits.min_replicas = 3" in f"{refused.value}"
    assert job({"inviter_quota": True}, min_replicas=3, reproducible=False).trust.inviter_quota


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
