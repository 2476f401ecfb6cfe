"""Joining without a certificate: over HTTPS, as gRPC cannot ask only some callers for a certificate.

GET /v1/ca gives the authorities to anybody. POST /v1/join takes a token's secret and a request,
and gives a certificate. POST /v1/renew takes a certificate that has ended in the place of the secret.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from scheduler.storage.members.book import Members
from swarm.errors import Crowded, NotAdmitted, Refused, RetryElsewhere, SwarmError, UsageError
from swarm.limits import JOIN_BODY_BYTES_MAX, JOIN_FAILURES_AT_ONCE, JOIN_FAILURES_PER_S, Bucket
from swarm.pki.identity import Identity
from swarm.pki.joining import CA_PATH, JOIN_PATH, RENEW_PATH
from swarm.process.callers import Callers
from swarm.process.http import REQUEST_S_MAX, Answer, Door, HttpListener, MainLoop, Request, plain
from swarm.process.logs import get_logger

_ADDRESSES_MAX = 4096  # and tokens, whose failures are counted


class JoinEndpoint:
    """Takes joins at `host:port` on a thread of its own; the book of members is asked on the event loop."""

    def __init__(
        self,
        members: Members,
        scheduler: Callable[[], str],
        loop: asyncio.AbstractEventLoop,
        door: Door,
        heard: Callable[[str, str, str, str, SwarmError | None], None] = lambda *_: None,
    ) -> None:
        """`scheduler` gives the address where members go. `heard` hears the method, who asked as whom, from which
        address, and the error."""
        self._members, self._scheduler, self._door, self._heard = members, scheduler, door, heard
        self._loop, self._main = loop, MainLoop(loop)
        self._listener: HttpListener | None = None
        self._failures: dict[str, Bucket] = {}
        self._log = get_logger("join")

    def start(self, host: str, port: int) -> int:
        """Listen and give the port; InvalidConfig if it is taken or not allowed."""
        self._listener = HttpListener(host, port, plain(self._serve), self._door, flags="--join-listen")
        return self._listener.start()

    def close(self) -> None:
        """Stop listening, if it began."""
        if self._listener is not None:
            self._listener.close()

    async def _serve(self, request: Request) -> Answer:
        if request.method == "GET":
            if request.path == CA_PATH:
                return _json(200, self.authority())
            return _failed(404, Refused(f"here are {CA_PATH}, {JOIN_PATH} and {RENEW_PATH}"))
        if fault := Callers(is_local=False).site_fault(request.header):  # it would use up its visitor's tries
            return _failed(403, Refused(fault))
        length = request.header("content-length") or ""
        # As many digits as int() reads, and only those that it knows.
        is_number = length.isascii() and length.isdigit() and len(length) < 10
        take = {JOIN_PATH: self.join, RENEW_PATH: self.renew}.get(request.path)
        if take is None or not is_number or int(length) > JOIN_BODY_BYTES_MAX:
            return _failed(400, Refused(f"post at most {JOIN_BODY_BYTES_MAX} bytes to {JOIN_PATH} or {RENEW_PATH}"))
        try:
            address, _ = request.connection.ends()
            return _json(200, await take(await request.read(int(length)), str(address[0])))
        except (Crowded, RetryElsewhere) as error:
            return _failed(429, error)
        except SwarmError as error:
            return _failed(403, error)

    def authority(self) -> dict[str, str]:
        return {"ca": self._members.authority.pem.decode(), "proof": ""}  # members of before want a proof

    async def join(self, body: bytes, address: str) -> dict[str, str]:
        """The answer to a join; BadToken, Crowded, Refused, RetryElsewhere. Runs on the listener's loop."""
        asked = _asked(body, ("id", "secret", "name", "csr"), {"verb": ""})

        async def work() -> bytes:
            csr = asked["csr"].encode()
            return await self._members.join(asked["id"], asked["secret"], asked["name"], csr, asked["verb"])

        return await self._ask_loop(
            self._answer(work, "Join", f"token {asked['id'][:20]}", asked["name"], address, asked["id"])
        )

    async def renew(self, body: bytes, address: str) -> dict[str, str]:
        """The answer to a member that comes back with an ended certificate; errors as for `join`, and NotAdmitted."""
        asked = _asked(body, ("certificate", "csr"))

        async def work() -> bytes:
            return await self._members.renew_ended(asked["certificate"].encode(), asked["csr"].encode())

        return await self._ask_loop(self._answer(work, "RenewEnded", "a certificate", "", address))

    async def _answer(
        self, work: Callable[[], Awaitable[bytes]], method: str, who: str, name: str, address: str, id: str = ""
    ) -> dict[str, str]:
        """The answer to a request; what others did from its address does not matter.

        Only failures are counted, by token where there is one, else by address. A secret of 130 bits cannot be guessed
        and is checked with one hash, but each reported failure takes a line of the log and of the audit.
        """
        whose = f"with token {id}" if self._members.has_token(id) else f"from {address}"
        try:
            pem = await work()
        except (NotAdmitted, Refused, UsageError) as error:
            if not self._may_fail(whose):
                raise RetryElsewhere(f"too many joins failed {whose}", hint="wait a minute, then try again") from None
            self._log.warning("join refused", address=address, by=who, reason=error.message)
            self._heard(method, who, name, address, error)
            raise
        self._failures.pop(whose, None)
        joined = Identity(b"", pem, b"").principal
        self._log.info("joined", address=address, by=who, name=joined.name)
        self._heard(method, who, f"{joined.role}/{joined.name}", address, None)
        return {"certificate": pem.decode(), "ca": self._members.authority.pem.decode(), "scheduler": self._scheduler()}

    def _may_fail(self, whose: str) -> bool:
        """Whether one more failure is reported to its caller, and written down; the first always is."""
        if (failures := self._failures.get(whose)) is not None:
            return failures.take(self._loop.time())
        if len(self._failures) >= _ADDRESSES_MAX:
            self._failures.clear()
        self._failures[whose] = Bucket(JOIN_FAILURES_PER_S, JOIN_FAILURES_AT_ONCE)
        return True

    async def _ask_loop(self, question: Coroutine[Any, Any, dict[str, str]]) -> dict[str, str]:
        try:
            return await self._main.ask(question, REQUEST_S_MAX)
        except TimeoutError:
            raise RetryElsewhere("the scheduler is busy", hint="try again") from None


def _asked(body: bytes, keys: Sequence[str], others: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """The values of `keys`, and of `others` where they are not given; Refused."""
    try:
        asked = {**others, **json.loads(body)}
        wanted = {key: asked[key] for key in (*keys, *others)}
    except (ValueError, KeyError, TypeError, RecursionError):
        wanted = {}
    if not wanted or not all(isinstance(value, str) and value.isascii() for value in wanted.values()):
        raise Refused(f"this request is JSON with {', '.join(keys)}, all of them ASCII")
    return wanted


def _json(status: int, content: object) -> Answer:
    return status, "application/json", json.dumps(content).encode()


def _failed(status: int, error: SwarmError) -> Answer:
    return _json(status, {"code": error.code, "message": error.message, "hint": error.hint})
