"""The page at `/`, and the stream of events that it lives on.

    /            index.html, page.css and page.js: one file each, nothing from elsewhere
    /events      server-sent events: "all" once, then "change" with the news, at most two a second; ?job=ID

On loopback they are for the user of this machine, as the whole scheduler is. Off loopback they are for people of the
swarm, by certificate, and each sees the same as in `swarm ls`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib import resources
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from scheduler.brain.members.places import Places
from scheduler.brain.members.projects import Person
from scheduler.web.feed import Look
from scheduler.web.listener import HttpConnection
from scheduler.web.site import MainLoop, connection_of, text
from scheduler.web.snapshot import Json, patch
from swarm.errors import NotAllowed, SwarmError
from swarm.limits import STREAMS_MAX, STREAMS_OF_ONE_MAX
from swarm.text import names_this_machine

TELL_S_MIN = 0.5  # between two events of a stream
ALIVE_S = 10.0  # a stream says something so often, so that its reader knows that it lives
LOOK_S_MAX = 30.0
SLOW_S_MAX = 10.0  # a reader that takes nothing for so long is dropped

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


class Looks(Protocol):
    """Gives the content of the page for a visitor; asked on the scheduler's loop."""

    async def enter(self, certificate: bytes | None) -> Person:
        """The visitor with this certificate (DER), or without one; a SwarmError unless he may look."""

    async def look(self, certificate: bytes | None, reference: str) -> Look:
        """The visitor's content now, with the job that `reference` names; the same error as `enter`."""


class Pages:
    """Routes for the site; `is_local`: only this machine reaches the port, so every caller may look."""

    def __init__(self, loop: MainLoop, feed: Looks, *, is_local: bool) -> None:
        self._loop = loop
        self._feed = feed
        self._is_local = is_local
        self._streams = Places(STREAMS_MAX, STREAMS_OF_ONE_MAX, "streams show this page")
        folder = resources.files("scheduler.web") / "page"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}

    def routes(self) -> list[Route]:
        return [*(Route(path, self._file) for path in self._files), Route("/events", self._events)]

    async def _file(self, request: Request) -> Response:
        if isinstance(person := await self._entering(request), Response):
            return person
        content, kind = self._files[request.url.path]
        return Response(content, headers=HEADERS, media_type=kind)

    async def _events(self, request: Request) -> Response:
        if isinstance(person := await self._entering(request), Response):
            return person
        try:
            self._streams.take(person)
        except NotAllowed as error:
            return text(503, f"{error.message}: {error.hint}")
        connection = connection_of(request.scope)
        told = self._tell(connection, request.query_params.get("job", ""))
        return _EventStream(partial(self._streams.leave, person), connection, told)

    async def _entering(self, request: Request) -> Person | Response:
        """The caller, or the answer to one who may not look."""
        if self._is_local and not names_this_machine(request.headers.get("host", "")):
            # Another site's page could make a browser believe that its name leads here, and read everything.
            return text(403, "open this page by the name localhost, or by an address")
        try:
            return await self._loop.ask(self._feed.enter(connection_of(request.scope).certificate()))
        except SwarmError as error:
            return text(403, f"{error.message}\n{error.hint}".strip())
        except TimeoutError:
            return text(503, "the scheduler is busy: try again")

    async def _tell(self, connection: HttpConnection, job: str) -> AsyncIterator[bytes]:
        """Everything, then what has changed, until the visitor may no longer look."""
        certificate, clock = connection.certificate(), asyncio.get_running_loop()
        before: Json | None = None
        told_s = clock.time()
        while True:
            try:
                look = await self._loop.ask(self._feed.look(certificate, job), LOOK_S_MAX)
            except SwarmError as error:
                yield _event("refused", {"message": error.message, "hint": error.hint})
                return
            except TimeoutError:
                return  # the page dials again
            state = look.state if before is None else patch(before, look.state)
            if state or clock.time() - told_s >= ALIVE_S:
                told_s = clock.time()
                times = {"now_unix_s": round(look.now_unix_s, 3), "clock_s": round(look.clock_s, 3)}
                yield _event("all" if before is None else "change", times | {"state": state})
            before = look.state
            await asyncio.sleep(TELL_S_MIN)


class _EventStream(StreamingResponse):
    """A stream that is no request with a deadline any more; a reader that takes nothing is dropped."""

    def __init__(self, ended: Callable[[], None], connection: HttpConnection, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers=HEADERS, media_type="text/event-stream")
        self._ended = ended
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SLOW_S_MAX):
                    await send(message)
            except TimeoutError:
                self._connection.cut()  # and so the stream is told to end

        self._connection.lasts()
        try:
            await super().__call__(scope, receive, in_time)
        finally:
            self._ended()


def _event(name: str, values: dict[str, Any]) -> bytes:
    # json writes no line break, so each event is one line of data.
    return f"event: {name}\ndata: {json.dumps(values, separators=(',', ':'))}\n\n".encode()
