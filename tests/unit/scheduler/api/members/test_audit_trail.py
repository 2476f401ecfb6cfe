"""What is written into the audit log, and what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.api.members.audit_trail import FAILURES_AT_ONCE, AuditTrail
from scheduler.brain.members.enrolment import Member
from swarm.errors import BadToken, NotOwner, QuotaReached
from swarm.pki.names import Principal, Role
from swarm.process.audit import Audit
from swarm.process.logs import get_logger
from swarm.rpc.guard import Caller
from swarm.wire import jobs_pb2, members_pb2
from tests.support.members import Clock

ANN, EVE = (Caller(Principal("a" * 16, Role.SUBMITTER, name), "f") for name in ("ann", "eve"))
ROOT = Caller(Principal("a" * 16, Role.ADMIN, "root"), "f")


class Log:
    """A log, and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.files = {name: folder / f"{name}.jsonl" for name in ("audit", "admin")}
        self.clock = Clock(0.0)
        audit, admins = (Audit(path, self.clock) for path in self.files.values())
        self.trail = AuditTrail(audit, admins, get_logger("test"), self.clock)

    def lines(self, name: str = "audit") -> list[dict[str, Any]]:
        self.trail.flush()
        return [json.loads(line) for line in self.files[name].read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


@pytest.mark.parametrize(
    ("method", "request_", "target"),
    [
        ("Jobs/Cancel", jobs_pb2.CancelRequest(job="demo-1"), "demo-1"),
        ("Jobs/Drain", jobs_pb2.DrainRequest(peer="gpu-1"), "gpu-1"),
        ("Jobs/Submit", jobs_pb2.SubmitRequest(), "made-1"),
        ("Jobs/PutShard", jobs_pb2.ShardChunk(shard=jobs_pb2.Shard(sha256="ab")), "ab"),
        ("Jobs/Probe", jobs_pb2.ProbeRequest(), None),
        ("Members/Renew", members_pb2.RenewRequest(), None),
        ("Members/Issue", members_pb2.IssueRequest(role="viewer", name="bob"), "viewer/bob"),
        ("Members/CreateToken", members_pb2.CreateTokenRequest(role="viewer", names="b*"), "viewer/b*"),
        ("Members/RevokeToken", members_pb2.RevokeTokenRequest(id="abc"), "abc"),
    ],
)
def test_a_call_that_changes_something_has_one_line_that_says_what(
    log: Log, method: str, request_: Any, target: str | None
) -> None:
    reply = jobs_pb2.JobView(id="made-1") if method == "Jobs/Submit" else None
    for name, caller in (("audit", ANN), ("admin", ROOT)):
        log.trail.begins(f"/swarm.wire.{method}", caller, request_)
        log.trail.answered(f"/swarm.wire.{method}", caller, request_, reply)
        (line,) = log.lines(name)
        assert (line["actor"], line["action"]) == (caller.principal.uri, method.partition("/")[2])
        assert (line["result"], line.get("target")) == ("allowed", target)


def test_a_call_that_only_reads_has_none(log: Log) -> None:
    log.trail.begins("/swarm.wire.Jobs/Get", ANN, jobs_pb2.JobRequest(job="demo-1"))
    log.trail.answered("/swarm.wire.Jobs/Get", ANN, jobs_pb2.JobRequest(job="demo-1"), jobs_pb2.JobView(id="demo-1"))
    log.trail.failed("/swarm.wire.Jobs/Get", ANN, "E0700", "there is none", None)
    assert log.lines() == []


def test_a_call_that_was_allowed_and_failed_has_a_line_with_the_error(log: Log) -> None:
    log.trail.failed("/swarm.wire.Jobs/Submit", ANN, QuotaReached.code, "there are 4 jobs", None)
    log.trail.failed("/swarm.wire.Jobs/Checkpoints", ANN, NotOwner.code, "it is bob's", jobs_pb2.JobRequest(job="j"))
    assert [(line["result"], line.get("target")) for line in log.lines()] == [
        (f"{QuotaReached.code} there are 4 jobs", None),
        (f"{NotOwner.code} it is bob's", "j"),
    ]


def test_failed_calls_of_one_principal_leave_room_for_the_lines_of_others(log: Log) -> None:
    """Whoever could submit could turn the whole log over with calls that failed."""
    for _ in range(2 * FAILURES_AT_ONCE):
        log.trail.joined("Join", "token abc", "gpu-1", "10.0.0.1", BadToken("no"))
        log.trail.denied("/swarm.wire.Jobs/Get", "nobody", BadToken("no"))
        log.trail.failed("/swarm.wire.Jobs/Cancel", ANN, "E0700", "there is none", None)
    assert len(log.lines()) == 3 * FAILURES_AT_ONCE
    log.trail.failed("/swarm.wire.Jobs/Cancel", EVE, "E0700", "there is none", None)
    assert log.lines()[-1]["actor"] == EVE.principal.uri
    log.clock.unix_s += 1.0
    log.trail.failed("/swarm.wire.Jobs/Cancel", ANN, "E0700", "there is none", None)
    told = [(line["action"], line["result"]) for line in log.lines()[-2:]]
    assert told == [("LeftOut", f"{FAILURES_AT_ONCE} failed calls left out"), ("Cancel", "E0700 there is none")]


def test_calls_of_others_turn_over_no_line_of_an_admin(log: Log) -> None:
    log.trail.joined("Join", "token abc", "viewer/eve", "10.0.0.1")
    log.trail.answered("/swarm.wire.Members/CreateToken", ROOT, members_pb2.CreateTokenRequest(), None)
    log.trail.revoked(Member(Role.VIEWER, "eve", revoked_unix_s=1.0, reason="left"))
    for _ in range(1000):
        log.trail.answered("/swarm.wire.Jobs/Cancel", ANN, jobs_pb2.CancelRequest(job="demo-1"), None)
        log.trail.joined("RenewEnded", "a certificate", "viewer/eve", "10.0.0.1")  # again and again with the same key
    assert [line["action"] for line in log.lines("admin")] == ["Join", "CreateToken", "Revoked"]
    assert len(log.lines()) == 2000


def test_a_revocation_names_who_is_out_and_why(log: Log) -> None:
    log.trail.revoked(Member(Role.STAGE_SERVER, "gpu-1", revoked_unix_s=1.0, reason="two machines"))
    (line,) = log.lines("admin")
    assert (line["actor"], line["target"], line["result"]) == ("the scheduler", "stage-server/gpu-1", "two machines")


def test_what_cannot_be_written_keeps_nobody_from_acting(log: Log) -> None:
    log.trail.close()
    log.trail.answered("/swarm.wire.Jobs/Cancel", ANN, jobs_pb2.CancelRequest(job="demo-1"), None)
    assert log.files["audit"].read_text() == ""
