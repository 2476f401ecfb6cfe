"""`swarm submit --plan` takes the cut of a plan of this job, says what it leaves out, and takes nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client.verbs.submit import cut_of
from scheduler.planning.plan import Plan, document
from swarm.errors import InvalidConfig
from swarm.job.spec import apply_overrides
from tests.support.pools import planned_job

LEFT_OUT = "left out: c: a step would take no less"
PLAN = document(Plan((2, 2), (("a",), ("b",)), 4, 8, recompute=True, reasons=("limits: x", LEFT_OUT)), "t")
JOB = planned_job(4)


def test_the_cut_of_a_plan_becomes_values_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    said = list[str]()
    assert apply_overrides(
        {"model": {"id": "x"}, "pipeline": {"stages": 3}}, cut_of(tmp_path / "plan.json", JOB, said.append)
    ) == {
        "model": {"id": "x", "recompute": True},
        "pipeline": {"stages": 2, "split": [2, 2], "overlap": 8},
        "training": {"microbatch_sequences": 4},
    }
    assert said[1:] == [LEFT_OUT]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", None,
     *(json.dumps(PLAN | change) for change in (
         {"schema": "swarm.plan/2"}, {"split": 4}, {"reasons": 1}, {"job": "other"}, {"split": [2, 1]},
     ))],
)  # fmt: skip
def test_a_file_that_is_no_plan_of_the_job_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InvalidConfig, match=r"plan\.json") as refused:
        cut_of(tmp_path / "plan.json", JOB, print)
    assert "swarm plan JOB" in refused.value.hint
