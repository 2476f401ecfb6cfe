"""What a client is told has the names of the messages, whichever of the two was changed last."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from client.records import (
    Checkpoint,
    Explanation,
    Fact,
    Job,
    LogLine,
    Peer,
    Stage,
    Step,
    file_name,
    raise_unless_succeeded,
    record,
)
from swarm.errors import CorruptFrame, JobDidNotFit, JobEnded
from swarm.wire import jobs_pb2 as pb

PAIRS = [
    (Job, pb.JobView),
    (Stage, pb.StageView),
    (Peer, pb.PeerView),
    (Checkpoint, pb.CheckpointView),
    (Step, pb.StepView),
    (LogLine, pb.LogEntry),
    (Explanation, pb.Explanation),
    (Fact, pb.Fact),
]


@pytest.mark.parametrize(("kind", "message"), PAIRS, ids=lambda one: one.__name__)
def test_a_record_has_the_fields_of_its_message(kind: Any, message: Any) -> None:
    assert [field.name for field in fields(kind)] == [field.name for field in message.DESCRIPTOR.fields]
    assert isinstance(record(kind, message()), kind)


def test_parts_lists_and_maps_become_values() -> None:
    view = pb.JobView(id="a", step=3, stages=[pb.StageView(stage=1, peers=["p", "q"])], spec_json='{"name": "a"}')
    job = record(Job, view)
    assert (job.id, job.step, job.spec) == ("a", 3, {"name": "a"})
    assert job.stages == (Stage(stage=1, peers=("p", "q")),)
    fact = pb.Fact(topic="pace", text="slow", numbers={"pace_s": 0.5})
    assert record(Explanation, pb.Explanation(kind="peer", facts=[fact])).facts == (
        Fact("pace", "slow", {"pace_s": 0.5}),
    )
    assert "spec_json" not in repr(job), "a notebook shows the job, not the whole job file"


@pytest.mark.parametrize(("state", "ended"), [("running", False), ("succeeded", True), ("resting", False)])
def test_a_state_of_a_newer_scheduler_is_no_end(state: str, ended: bool) -> None:
    assert Job(state=state).has_ended is ended


def test_whoever_waits_for_success_hears_why_there_was_none() -> None:
    raise_unless_succeeded(Job(state="succeeded"))
    with pytest.raises(JobEnded, match="job a failed: the disk is full"):
        raise_unless_succeeded(Job(id="a", state="failed", reason="the disk is full"))
    with pytest.raises(JobDidNotFit):
        raise_unless_succeeded(Job(state="failed", error_code="E0900"))


def test_the_name_of_a_job_is_no_path() -> None:
    assert file_name("tiny-1") == "tiny-1"
    for text in ("", ".", "..", "/etc/cron.d/x", "../x", "a/b", "a\\b", "a\0b"):
        with pytest.raises(CorruptFrame, match="a job named"):
            file_name(text)


@pytest.mark.parametrize("sent", ["[" * 200_000, '{"a":' * 5000 + "1" + "}" * 5000, "[1]", "{"])
def test_a_job_file_that_is_none_is_an_error_of_the_scheduler(sent: str) -> None:
    with pytest.raises(CorruptFrame):
        _ = Job(id="demo", spec_json=sent).spec
