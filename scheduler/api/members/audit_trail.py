"""Writes the audit log: starts, joins, revocations, calls that change something, and refusals.

A call that a role allows has a line before it is carried out, and another one if it then fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from scheduler.brain.members.enrolment import Member
from swarm.errors import NotOwner, SwarmError
from swarm.limits import Bucket
from swarm.pki.names import Principal
from swarm.process.audit import Audit
from swarm.process.logs import Logger
from swarm.rpc.guard import CALLER, Caller

DENIALS_PER_S, DENIALS_AT_ONCE = 10.0, 100  # that are written down, of calls and of joins
ALLOWED = "allowed"
# Calls that change something.
_JOBS = ("Submit", "Cancel", "Pause", "Resume", "Drain", "Undrain", "FreePeer", "Chaos", "Pull", "Remove", "Collect")
AUDITED = frozenset(
    {f"/swarm.wire.Jobs/{name}" for name in _JOBS}
    | {f"/swarm.wire.Members/{name}" for name in ("Issue", "CreateToken", "RevokeToken", "RevokeMember")}
    | {f"/swarm.wire.Members/{name}" for name in ("RotateAuthority", "RetireAuthority")}
)
_TARGETS = ("job", "peer", "id", "role", "name", "names")  # what requests call whom or what they mean


class AuditTrail:
    """Writes the lines; a witness of the guard."""

    def __init__(
        self,
        audit: Audit,
        log: Logger,
        clock_s: Callable[[], float] = time.monotonic,
        on_denied: Callable[[str], None] = lambda code: None,
    ) -> None:
        """`on_denied` hears the error code of everything refused."""
        self._on_denied = on_denied
        self._audit = audit
        self._log = log
        self._clock_s = clock_s
        self._denials = Bucket(DENIALS_PER_S, DENIALS_AT_ONCE)
        self._refused_joins = Bucket(DENIALS_PER_S, DENIALS_AT_ONCE)

    def started(self, scheduler: Principal, **facts: str) -> None:
        self._write(scheduler.uri, "Start", ALLOWED, **facts)

    def begins(self, method: str, caller: Caller, request: Any) -> None:
        """A role allows the call."""
        if method in AUDITED:
            self._write(caller.principal.uri, method, ALLOWED, target=_target(request))

    def failed(self, method: str, caller: Caller, code: str, message: str) -> None:
        """A call that the role allows ended with an error, such as that the job is another person's."""
        if code == NotOwner.code:
            self.denied(method, caller.principal.uri, NotOwner(message))
        elif method in AUDITED:
            self._write(caller.principal.uri, method, f"{code} {message}")

    def denied(self, method: str, who: str, error: SwarmError) -> None:
        """A call was refused because the caller is not admitted to it."""
        self._on_denied(error.code)
        if self._denials.take(self._clock_s()):
            self._write(who, method, f"{error.code} {error.message}")
            self._log.warning("refused", method=method, who=who, reason=error.message)

    def joined(self, method: str, who: str, name: str, address: str, error: SwarmError | None = None) -> None:
        """Somebody joined with a token, or came back with a certificate that had ended, or was refused."""
        if error is not None:
            self._on_denied(error.code)
        if error is None or self._refused_joins.take(self._clock_s()):
            result = ALLOWED if error is None else f"{error.code} {error.message}"
            self._write(who, method, result, target=name, address=address)

    def revoked(self, member: Member) -> None:
        """A member was taken out of the book, by an admin's call or by the scheduler itself."""
        caller = CALLER.get()
        by = "the scheduler" if caller is None else caller.principal.uri
        self._write(by, "Revoked", member.reason or "no reason given", target=f"{member.role}/{member.name}")

    def succeeded(self, scheduler: Principal, phase: str, pins: str) -> None:
        """The next authority signs now, or the old one has left: by the clock, or by an admin's call before."""
        self._write(scheduler.uri, "Authority", phase, target=pins)

    def close(self) -> None:
        self._audit.close()

    def _write(self, who: str, method: str, result: str, **facts: str) -> None:
        """A full disk must not keep an admin from cancelling and revoking."""
        told = {key: value for key, value in facts.items() if value}
        try:
            self._audit.write(who, method.rpartition("/")[2], result, **told)
        except OSError as error:
            self._log.error("not in the audit log", who=who, method=method, result=result, reason=str(error))


def _target(request: Any) -> str:
    """The member or thing that a request is about, as its sender named it."""
    return "/".join(str(found) for key in _TARGETS if (found := getattr(request, key, "")))
