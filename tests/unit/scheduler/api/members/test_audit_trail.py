"""What is written into the audit log, and what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.api.members.audit_trail import DENIALS_AT_ONCE, AuditTrail
from scheduler.brain.members.enrolment import Member
from swarm.errors import BadToken, NotOwner, QuotaReached
from swarm.pki.names import Principal, Role
from swarm.process.audit import Audit, verify
from swarm.process.logs import get_logger
from swarm.rpc.guard import Caller
from swarm.wire import jobs_pb2, members_pb2
from tests.support.members import Clock

ANN = Caller(Principal("a" * 16, Role.SUBMITTER, "ann"), "f")


class Log:
    """A log, and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "audit.jsonl"
        self.clock = Clock(0.0)
        audit = Audit(self.path, self.clock)
        self.trail = AuditTrail(audit, get_logger("test"), self.clock)

    def lines(self) -> list[dict[str, Any]]:
        assert list(verify(self.path)) == []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


@pytest.mark.parametrize(
    ("method", "request_", "target"),
    [
        ("Jobs/Cancel", jobs_pb2.CancelRequest(job="demo-1"), "demo-1"),
        ("Jobs/Drain", jobs_pb2.DrainRequest(peer="gpu-1"), "gpu-1"),
        ("Jobs/Submit", jobs_pb2.SubmitRequest(), None),
        ("Members/Issue", members_pb2.IssueRequest(role="viewer", name="bob"), "viewer/bob"),
        ("Members/CreateToken", members_pb2.CreateTokenRequest(role="viewer", names="b*"), "viewer/b*"),
        ("Members/RevokeToken", members_pb2.RevokeTokenRequest(id="abc"), "abc"),
    ],
)
def test_a_call_that_changes_something_has_a_line_that_says_what(
    log: Log, method: str, request_: Any, target: str | None
) -> None:
    log.trail.begins(f"/swarm.wire.{method}", ANN, request_)
    (line,) = log.lines()
    assert (line["actor"], line["action"]) == (ANN.principal.uri, method.partition("/")[2])
    assert (line["result"], line.get("target")) == ("allowed", target)


def test_a_call_that_only_reads_has_none(log: Log) -> None:
    log.trail.begins("/swarm.wire.Jobs/Get", ANN, jobs_pb2.JobRequest(job="demo-1"))
    log.trail.failed("/swarm.wire.Jobs/Get", ANN, "E0700", "there is none")
    assert log.lines() == []


def test_a_call_that_was_allowed_and_failed_has_one_more_line(log: Log) -> None:
    log.trail.begins("/swarm.wire.Jobs/Submit", ANN, None)
    log.trail.failed("/swarm.wire.Jobs/Submit", ANN, QuotaReached.code, "there are 4 jobs")
    log.trail.failed("/swarm.wire.Jobs/Checkpoints", ANN, NotOwner.code, "it is bob's")
    results = [line["result"] for line in log.lines()]
    assert results == ["allowed", f"{QuotaReached.code} there are 4 jobs", f"{NotOwner.code} it is bob's"]


def test_refused_calls_and_refused_joins_have_their_own_bounds(log: Log) -> None:
    for _ in range(2 * DENIALS_AT_ONCE):
        log.trail.joined("Join", "token abc", "gpu-1", "10.0.0.1", BadToken("no"))
        log.trail.denied("/swarm.wire.Jobs/Get", "nobody", BadToken("no"))
    log.trail.joined("Join", "token abc", "gpu-1", "10.0.0.1")
    assert len(log.lines()) == 2 * DENIALS_AT_ONCE + 1
    log.clock.unix_s += 1.0
    log.trail.denied("/swarm.wire.Jobs/Get", "nobody", BadToken("no"))
    assert log.lines()[-1]["action"] == "Get"


def test_a_revocation_names_who_is_out_and_why(log: Log) -> None:
    log.trail.revoked(Member(Role.STAGE_SERVER, "gpu-1", revoked_unix_s=1.0, reason="two machines"))
    (line,) = log.lines()
    assert (line["actor"], line["target"], line["result"]) == ("the scheduler", "stage-server/gpu-1", "two machines")


def test_what_cannot_be_written_keeps_nobody_from_acting(log: Log) -> None:
    log.trail.close()
    log.trail.begins("/swarm.wire.Jobs/Cancel", ANN, jobs_pb2.CancelRequest(job="demo-1"))
    assert log.lines() == []
