"""A step as Perfetto reads it: stages are processes, replicas are threads."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from client.shell import Shell
from client.verbs.watching import trace as verb
from client.verbs.watching.trace import chrome_trace, summary
from swarm.errors import CorruptFrame
from swarm.wire import jobs_pb2 as pb
from tests.support.golden import Golden

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


def test_each_replica_is_a_thread_of_its_stage_and_times_are_microseconds(golden: Golden) -> None:
    events = chrome_trace(STEP)["traceEvents"]
    golden(*("\n".join(json.dumps(event) for event in events if event["ph"] == kind) for kind in "MX"))


def test_what_may_overlap_is_shown_beside_its_track(golden: Golden) -> None:
    golden("\n".join(json.dumps(event) for event in chrome_trace(STEP)["traceEvents"] if event["ph"] in "be"))


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
