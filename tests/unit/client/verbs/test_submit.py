"""`swarm submit --plan` takes the cut of a plan, and nothing else for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client.verbs.submit import cut_of
from scheduler.planning.plan import Plan, document
from swarm.errors import InvalidConfig
from swarm.job.spec import apply_overrides

PLAN = document(Plan((2, 2), (("a",), ("b",)), 4, 8, recompute=True), "t")


def test_the_cut_of_a_plan_becomes_values_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    assert apply_overrides({"model": {"id": "x"}}, cut_of(tmp_path / "plan.json")) == {
        "model": {"id": "x", "recompute": True},
        "pipeline": {"split": [2, 2], "overlap": 8},
        "training": {"microbatch_sequences": 4},
    }
    assert cut_of(None) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps(PLAN | {"schema": "swarm.plan/2"}), None])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InvalidConfig, match=r"plan\.json") as refused:
        cut_of(tmp_path / "plan.json")
    assert "swarm plan JOB" in refused.value.hint
