"""A step as Perfetto reads it: stages are processes, replicas are threads."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from client.shell import Shell
from client.verbs.watching import trace as verb
from client.verbs.watching.trace import chrome_trace, summary
from swarm.errors import CorruptFrame
from swarm.wire import jobs_pb2 as pb

STEP = pb.StepTrace(
    job="j-1",
    step=13,
    every=1,
    begin_unix_s=1000.0,
    spans=[
        pb.StepSpan(name="route", track="scheduler", begin_s=0.0, stage=-1, index=3, attempt=1),
        pb.StepSpan(name="forward", track="vm-a", begin_s=0.001, duration_s=0.002, stage=0, index=3, attempt=1),
        pb.StepSpan(
            name="boundary forward", track="vm-b", begin_s=0.003, duration_s=0.001, stage=1, index=3, beside=True
        ),
        pb.StepSpan(name="forward", track="vm-b", begin_s=0.004, duration_s=0.004, stage=1, index=3, attempt=1),
        pb.StepSpan(name="average stage-0", track="vm-a", begin_s=0.01, duration_s=0.001, index=-1, beside=True),
        pb.StepSpan(name="row", track="scheduler", begin_s=0.011, duration_s=0.002, stage=-1, index=-1),
    ],
)


def test_each_replica_is_a_thread_of_its_stage_and_times_are_microseconds() -> None:
    events = chrome_trace(STEP)["traceEvents"]
    names = {(one["pid"], one.get("tid")): one["args"]["name"] for one in events if one["ph"] == "M"}
    assert names == {
        (0, None): "scheduler",
        (1, None): "stage 0",
        (2, None): "stage 1",
        (0, 0): "scheduler",
        (1, 1): "vm-a",
        (2, 2): "vm-b",
    }
    whole = [one for one in events if one["ph"] == "X"]
    assert [(one["name"], names[one["pid"], one["tid"]], one["ts"], one["dur"]) for one in whole] == [
        ("route 3", "scheduler", 0.0, 0.0),
        ("forward 3", "vm-a", 1000.0, 2000.0),
        ("forward 3", "vm-b", 4000.0, 4000.0),
        ("row", "scheduler", 11000.0, 2000.0),
    ]
    assert whole[1]["args"] == {"microbatch": "12:3", "attempt": 1}, "as swarm explain --microbatch takes it"


def test_what_may_overlap_is_shown_beside_its_track() -> None:
    events = [one for one in chrome_trace(STEP)["traceEvents"] if one["ph"] in "be"]
    assert [(one["ph"], one["name"], one["ts"], one["id"]) for one in events] == [
        ("b", "boundary forward 3", 3000.0, 2),
        ("e", "boundary forward 3", 4000.0, 2),
        ("b", "average stage-0", 10000.0, 4),
        ("e", "average stage-0", 11000.0, 4),
    ]


def test_the_summary_has_each_kind_once() -> None:
    parts = summary(STEP)
    assert list(parts) == ["route", "forward", "boundary forward", "average", "row"]
    assert parts["forward"] == {"spans": 2, "median_s": 0.003, "longest_s": 0.004}


def test_a_job_with_the_name_of_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar:
        def call(self, method: str, request: pb.TraceRequest) -> pb.StepTrace:
            return pb.StepTrace(job=str(tmp_path / "j"), step=13)

    monkeypatch.setattr(verb, "dial", lambda shell: nullcontext(Liar()))
    context: Any = type("Context", (), {"obj": Shell()})
    with pytest.raises(CorruptFrame):
        verb.trace(context, "tiny", None, None)
    assert list(tmp_path.iterdir()) == []
