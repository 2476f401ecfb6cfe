"""Writes the audit log: starts, joins, revocations, calls that change something, and refusals; one line a call.

`admin.jsonl` has starts, joins, tokens, revocations and what admins called; `audit.jsonl` has the rest, also who came
back with a certificate that had ended. So however many calls others make, they turn over no line of an admin. Lines of
failed calls are bounded for each principal; a line says how many were left out.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scheduler.brain.members.enrolment import Member
from swarm.errors import NotOwner, SwarmError
from swarm.limits import Bucket
from swarm.pki.names import Principal, Role
from swarm.process.audit import Audit
from swarm.process.logs import Logger
from swarm.rpc.guard import CALLER, Caller
from swarm.text import counted

FAILURES_PER_S, FAILURES_AT_ONCE = 1.0, 100  # that are written down, of one principal
PRINCIPALS_MAX = 4096  # whose failures are counted; of more the oldest are forgotten
ALLOWED = "allowed"
JOIN = "Join"
STREAMS = frozenset({"/swarm.wire.Jobs/Pull", "/swarm.wire.Jobs/Drain"})  # last long: they have a line as they begin
# Calls that change something, or take something away.
_JOBS = (
    "Submit",
    "PutShard",
    "Cancel",
    "Pause",
    "Resume",
    "Undrain",
    "FreePeer",
    "Remove",
    "Collect",
    "Probe",
)
AUDITED = (
    STREAMS
    | {f"/swarm.wire.Jobs/{name}" for name in _JOBS}
    | {f"/swarm.wire.Members/{name}" for name in ("Issue", "CreateToken", "RevokeToken", "RevokeMember", "Renew")}
)
_TARGETS = ("job", "peer", "id", "role", "name", "names")  # what requests call whom or what they mean


@dataclass(slots=True)
class _Failures:
    bucket: Bucket = field(default_factory=lambda: Bucket(FAILURES_PER_S, FAILURES_AT_ONCE))
    left_out: int = 0


@dataclass(eq=False)
class AuditTrail:
    """Writes the lines; a witness of the guard."""

    _audit: Audit
    _admins: Audit  # for lines that nobody else's calls turn over
    _log: Logger
    _clock_s: Callable[[], float] = time.monotonic
    _on_denied: Callable[[str], None] = lambda code: None  # hears the error code of everything refused
    _failures: OrderedDict[str, _Failures] = field(default_factory=OrderedDict)

    def started(self, scheduler: Principal, **facts: str) -> None:
        self._admins.write(scheduler.uri, "Start", ALLOWED, **facts)

    def begins(self, method: str, caller: Caller, request: Any) -> None:
        """A role allows the call."""
        if method in STREAMS:
            self._write(caller, method, ALLOWED, request)

    def answered(self, method: str, caller: Caller, request: Any, reply: Any) -> None:
        """The call was carried out."""
        if method in AUDITED - STREAMS:
            self._write(caller, method, ALLOWED, request, reply)

    def failed(self, method: str, caller: Caller, code: str, message: str, request: Any) -> None:
        """A call that the role allows ended with an error, such as that the job is another person's."""
        if code == NotOwner.code:
            self._on_denied(code)
        if (code == NotOwner.code or method in AUDITED) and self._may_fail(caller.principal.uri):
            self._write(caller, method, f"{code} {message}", request)

    def denied(self, method: str, who: str, error: SwarmError) -> None:
        """A call was refused because the caller is not admitted to it."""
        self._on_denied(error.code)
        if self._may_fail(who):
            self._audit.write(who, _word(method), f"{error.code} {error.message}")
            self._log.warning("refused", method=method, who=who, reason=error.message)

    def joined(self, method: str, who: str, name: str, address: str, error: SwarmError | None = None) -> None:
        """Somebody joined with a token, or came back with a certificate that had ended, or was refused."""
        facts = {key: value for key, value in (("target", name), ("address", address)) if value}
        if error is None:
            (self._admins if method == JOIN else self._audit).write(who, method, ALLOWED, **facts)
            return
        self._on_denied(error.code)
        if self._may_fail("who joins"):
            self._audit.write(who, method, f"{error.code} {error.message}", **facts)

    def revoked(self, member: Member) -> None:
        """A member was taken out of the book, by an admin's call or by the scheduler itself."""
        caller = CALLER.get()
        by = "the scheduler" if caller is None else caller.principal.uri
        self._admins.write(by, "Revoked", member.reason or "no reason given", target=f"{member.role}/{member.name}")

    def flush(self) -> None:
        """Wait until all lines are on the disk."""
        self._audit.flush()
        self._admins.flush()

    def close(self) -> None:
        self._audit.close()
        self._admins.close()

    def _write(self, caller: Caller, method: str, result: str, request: Any, reply: Any = None) -> None:
        file = self._admins if caller.principal.role is Role.ADMIN else self._audit
        target = {"target": found} if (found := _target(request, reply)) else {}
        file.write(caller.principal.uri, _word(method), result, **target)

    def _may_fail(self, who: str) -> bool:
        """Whether one more failure of this principal has a line; the next line says how many had none."""
        known = self._failures.setdefault(who, _Failures())
        self._failures.move_to_end(who)
        if len(self._failures) > PRINCIPALS_MAX:
            self._failures.popitem(last=False)
        if not known.bucket.take(self._clock_s()):
            known.left_out += 1
            return False
        if known.left_out:
            self._audit.write(who, "LeftOut", f"{counted(known.left_out, 'failed call')} left out")
            known.left_out = 0
        return True


def _word(method: str) -> str:
    return method.rpartition("/")[2]


def _target(request: Any, reply: Any) -> str:
    """The member or thing that a call is about, as its sender named it; of a Submit the job that it made."""
    named = "/".join(str(found) for key in _TARGETS if (found := getattr(request, key, "")))
    shard = getattr(getattr(request, "shard", None), "sha256", "")
    return named or shard or str(getattr(reply, "id", ""))
