"""The guard before every service: identifies the caller and checks that it may make the call.

TLS has proved by then that the caller holds the key of a certificate that our authority signed. Left to check are the
name in the certificate and the rights of that name. Decisions: docs/decisions/047, 053.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio

from swarm.errors import InvalidConfig, NotAdmitted, Refused, Revoked, SwarmError
from swarm.pki import keys
from swarm.pki.names import Principal, principal_of
from swarm.rpc.channel import Interceptor, abort, told, within

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller, with its key."""

    principal: Principal
    fingerprint: str  # sha256 of the public key, hex


May: TypeAlias = Callable[[Caller, str], None]
"""Raise NotAdmitted, or a kind of it, unless the caller may call the method ("/package.Service/Method")."""

TRANSFERS = frozenset({"/swarm.wire.Session/Store", "/swarm.wire.Session/Fetch"}) | frozenset(
    {"/swarm.wire.Jobs/PutShard", "/swarm.wire.Jobs/Pull"}
)  # streams both ways, begun by a request
LAST_WORD_S = 0.5  # in which a call of a revoked member may end by itself: with a reason, or a session in order

# Whose call is being answered; None: over plaintext, from anybody.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


class Witness(Protocol):
    """Hears of the calls that a guard lets through."""

    def begins(self, method: str, caller: Caller, request: Any) -> None:
        """Before it is carried out; of a transfer the first request, and None of other streams of requests."""

    def answered(self, method: str, caller: Caller, request: Any, reply: Any) -> None:
        """It was carried out. Streams of replies have no such moment."""

    def failed(self, method: str, caller: Caller, code: str, message: str, request: Any) -> None:
        """It was answered with an error."""


@dataclass(slots=True)
class _Call:
    """A call under way; `request` is the first one, once it is here."""

    request: Any = None


class Guard(Interceptor):
    """Lets through the calls that `may` allows. `refused` hears of the others: method, caller, reason.

    `stays` raises once a caller may not go on, such as after it was revoked. It is asked before each message of a
    stream: a call that follows a job lasts for days. `cut_off` also ends calls that wait or stay unread.
    """

    def __init__(
        self,
        may: May,
        refused: Callable[[str, str, SwarmError], None] = lambda *_: None,
        witness: Witness | None = None,
        stays: Callable[[Caller], None] = lambda _: None,
    ) -> None:
        self._may = may
        self._refused = refused
        self._witness = witness
        self._stays = stays
        self._under_way: dict[asyncio.Timeout, tuple[Principal, asyncio.Task[Any] | None]] = {}

    def cut_off(self, principal: Principal) -> None:
        """The member was revoked: its calls end within LAST_WORD_S, but for the one with which it revokes itself."""
        ends_s = asyncio.get_running_loop().time() + LAST_WORD_S
        for call, (caller, task) in self._under_way.items():
            if caller == principal and task is not asyncio.current_task() and call.when() is None:
                call.reschedule(ends_s)

    def behaviour(self, handler: Any, behaviour: Any, method: str) -> tuple[Any, Any]:
        """The same behind the check, for each of the four combinations of streams."""

        def begun(caller: Caller, request: Any, call: _Call) -> Any:
            if (handler.request_streaming and not handler.response_streaming) or method in TRANSFERS:
                return self._requests(method, caller, request, call)
            call.request = None if handler.request_streaming else request
            if self._witness is not None:
                self._witness.begins(method, caller, call.request)
            return request

        async def answer(request: Any, context: _Context) -> Any:
            caller = await self._check(context, method)
            with self._witnessed(method, caller, context) as call:
                async with self._until_cut_off(method, caller, context):
                    reply = await behaviour(begun(caller, request, call), context)
                if self._witness is not None:
                    self._witness.answered(method, caller, call.request, reply)
                return reply

        async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
            caller = await self._check(context, method)
            with self._witnessed(method, caller, context) as call:
                until_cut_off = self._until_cut_off(method, caller, context)
                async with until_cut_off, aclosing(behaviour(begun(caller, request, call), context)) as replies:
                    async for reply in replies:
                        try:
                            self._stays(caller)
                        except SwarmError as error:
                            self._refused(method, caller.principal.uri, error)
                            await abort(context, error)
                        yield reply

        return stream if inspect.isasyncgenfunction(behaviour) else answer, handler.request_deserializer

    async def _requests(
        self, method: str, caller: Caller, requests: AsyncIterator[Any], call: _Call
    ) -> AsyncIterator[Any]:
        is_first = True
        async for request in requests:
            self._stays(caller)
            if is_first:
                call.request = request
                if self._witness is not None:
                    self._witness.begins(method, caller, request)
            is_first = False
            yield request

    @asynccontextmanager
    async def _until_cut_off(self, method: str, caller: Caller, context: _Context) -> AsyncIterator[None]:
        call = asyncio.timeout(None)
        self._under_way[call] = caller.principal, asyncio.current_task()
        try:
            async with call:
                yield
        except TimeoutError:
            if not call.expired():
                raise
            error = Revoked(f"{caller.principal} was revoked", hint="ask an admin")
            self._refused(method, caller.principal.uri, error)
            await abort(context, error)
        finally:
            del self._under_way[call]

    @contextmanager
    def _witnessed(self, method: str, caller: Caller, context: _Context) -> Iterator[_Call]:
        call = _Call()
        try:
            yield call
        except grpc.aio.AbortError:
            if self._witness is not None:
                self._witness.failed(method, caller, *told(context), call.request)
            raise

    async def _check(self, context: _Context, method: str) -> Caller:
        who = "nobody"
        try:
            caller = caller_of(context)
            who = caller.principal.uri
            self._may(caller, method)
        except SwarmError as error:
            self._refused(method, who, error)
            await abort(context, error)
        CALLER.set(caller)
        return caller


def caller_of(context: _Context) -> Caller:
    """The caller that this connection's certificate names; NotAdmitted without a certificate."""
    proved = context.auth_context()
    pem = next(iter(proved.get("x509_pem_cert", ())), b"")
    if not pem:
        raise NotAdmitted("this call came without a certificate", hint="join first: swarm login --join LINE")
    return _caller(bytes(pem))


def caller_with(certificate_der: bytes | None) -> Caller:
    """The caller with this certificate over HTTPS; NotAdmitted if there is none."""
    if certificate_der is None:
        raise NotAdmitted("no certificate was shown", hint="join first: swarm login --join LINE")
    return _caller(ssl.DER_cert_to_PEM_cert(certificate_der).encode())


def check_caller(name: str) -> None:
    """Refused if the caller proved to be another; over plaintext nothing is proved."""
    caller = CALLER.get()
    if caller is not None and caller.principal.name != name:
        raise Refused(f"{caller.principal} called itself {name}", hint="a member goes by the name in its certificate")


@lru_cache(maxsize=4096)
def _caller(pem: bytes) -> Caller:
    try:
        certificate = keys.read_certificate(pem)
        fingerprint = keys.fingerprint(keys.public_key(certificate)).hex()
    except InvalidConfig as error:
        raise NotAdmitted(error.message) from error
    return Caller(principal_of(keys.uris(certificate)), fingerprint)


Handled: TypeAlias = Callable[[str, str, float], None]
"""Hears of a call that ended: its method ("Jobs/Get"), the name of its status code, and how long it took, seconds."""

_OURS = "swarm.wire."


class Meter(Interceptor):
    """Reports every call of an existing method to `handled`, also calls that a guard refused."""

    def __init__(self, handled: Handled) -> None:
        self._handled = handled

    def behaviour(self, handler: Any, behaviour: Any, method: str) -> tuple[Any, Any]:
        timed = partial(self._timed, method.removeprefix("/").removeprefix(_OURS))
        return within(behaviour, timed), handler.request_deserializer

    @asynccontextmanager
    async def _timed(self, method: str, request: Any, context: Any) -> AsyncIterator[Any]:
        began_s, code = time.monotonic(), grpc.StatusCode.UNKNOWN.name
        try:
            yield request
            code = grpc.StatusCode.OK.name
        except grpc.aio.AbortError:
            code = context.code().name
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED.name
            raise
        finally:
            self._handled(method, code, time.monotonic() - began_s)
