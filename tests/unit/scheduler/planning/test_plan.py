"""A plan is a document that comes back as it was written, and no other file is taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.planning.plan import Plan, Predicted, document, facts_hash, read_plan, spoken_s
from scheduler.planning.pool import NEAR, PeerPool, PoolPeer
from swarm.errors import InvalidConfig
from tests.support.pools import planned_job

PREDICTED = Predicted("bound", 1234.5678, 0.25, 0.1, None)
PLAN = Plan((1, 1), (("a",), ("b", "c")), 2, 1, True, PREDICTED, ("why",), "f00", 3)


def test_a_plan_comes_back_with_four_digits(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document(PLAN, "t")))
    assert read_plan(file, planned_job(2)) == replace(PLAN, predicted=replace(PREDICTED, tokens_per_s=1235.0))


def test_a_short_time_is_told_in_milliseconds() -> None:
    told = [spoken_s(value) for value in (0.0, 0.00042, 0.0949, 0.0951, 185)]
    assert told == ["0.0 s", "0.42 ms", "95 ms", "0.1 s", "3 min 05 s"]


@pytest.mark.parametrize(
    "change",
    [{"schema": "swarm.plan/2"}, {"split": []}, {"places": [["a"]]}, {"overlap": -1}, {"else": 1}, {"predicted": 5},
     {"overlap": float("nan")}],
)  # fmt: skip
def test_another_document_is_no_plan(tmp_path: Path, change: dict[str, object]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document(PLAN, "t") | change))
    with pytest.raises(InvalidConfig, match="is no plan") as refused:
        read_plan(file, planned_job(2))
    assert "swarm plan JOB" in refused.value.hint


def test_a_plan_of_more_peers_than_the_job_takes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document(replace(PLAN, places=(("a", "d"), ("b", "c"))), "t")))
    assert read_plan(file, planned_job(2, limits={"max_replicas": 2}))
    with pytest.raises(InvalidConfig, match=r"has 4 peers, limits\.max_replicas allows 2") as refused:
        read_plan(file, planned_job(2, limits={"max_replicas": 1}))
    assert "swarm plan JOB" in refused.value.hint


def test_each_fact_changes_the_hash() -> None:
    one = PoolPeer("a", "cpu", 0, "x", 1e9, 1e8, 1e8)
    pools = [PeerPool((one,)), PeerPool((replace(one, speed=2e9),)), PeerPool((one,), {("x", "x"): NEAR})]
    specs = [planned_job(2), planned_job(3)]
    assert len({facts_hash(pool, spec) for pool in pools for spec in specs}) == 6
