"""The page at `/`, and the stream of events that it lives on.

    /            index.html, page.css and page.js: one file each, nothing from elsewhere
    /events      server-sent events: "all" once, then "change" with the news, at most two a second; ?job=ID

On loopback they are for the login that runs the scheduler, and for logins that it named (swarm/process/callers.py): the
kernel tells whose a connection is, so the page is opened as any other. Off loopback they are for people of the swarm,
by certificate, and each sees the same as in `swarm ls`. A page of another site opens no stream. The files alone may be
asked for from elsewhere, as by a link: they tell nothing, and no other site reads them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from scheduler.brain.members.persons import Person
from scheduler.brain.members.places import CallSlot, CallSlots
from scheduler.web.feed import Feed
from scheduler.web.site import connection_of, text
from scheduler.web.snapshot import Json, patch
from swarm.errors import NotAllowed, SwarmError
from swarm.limits import STREAMS_MAX, STREAMS_OF_ONE_MAX
from swarm.process.callers import Callers, Logins, login_of
from swarm.process.http import HttpConnection, MainLoop

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


class Pages:
    """Routes for the site; `is_local`: only this machine reaches the port, and `logins` may look there."""

    def __init__(self, loop: MainLoop, feed: Feed, *, is_local: bool, logins: Logins | None = None) -> None:
        self._loop = loop
        self._feed = feed
        self._callers = Callers(is_local, Logins() if logins is None else logins)
        self._streams = CallSlots(STREAMS_MAX, STREAMS_OF_ONE_MAX, "streams show this page")
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
        if fault := self._callers.site_fault(request.headers.get):
            return text(403, fault)
        if isinstance(person := await self._entering(request), Response):
            return person
        connection = connection_of(request.scope)
        person = _known(person, connection, is_local=self._callers.is_local)
        now_s = asyncio.get_running_loop().time()
        try:
            place = self._streams.take(person, now_s)
        except NotAllowed as error:
            self._streams.end_one(now_s)  # its stream sees that
            return text(503, f"{error.message}: {error.hint}")
        told = self._tell(connection, request.query_params.get("job", ""), place)
        return _EventStream(partial(self._streams.leave, place), connection, told)

    async def _entering(self, request: Request) -> Person | Response:
        """The caller, or the answer to one who may not look."""
        connection = connection_of(request.scope)
        callers = self._callers
        if fault := callers.name_fault(request.headers.get) or callers.login_fault(*connection.ends()):
            return text(403, fault)
        try:
            return await self._loop.ask(self._feed.enter(connection.certificate()))
        except SwarmError as error:
            return text(403, f"{error.message}\n{error.hint}".strip())
        except TimeoutError:
            return text(503, "the scheduler is busy: try again")

    async def _tell(self, connection: HttpConnection, job: str, place: CallSlot) -> AsyncIterator[bytes]:
        """Everything, then what has changed, until the visitor may no longer look, or others need the place."""
        certificate, clock = connection.certificate(), asyncio.get_running_loop()
        before: Json | None = None
        told_s = clock.time()
        while not place.is_ended:
            try:
                look = await self._loop.ask(self._feed.look(certificate, job), LOOK_S_MAX)
            except SwarmError as error:
                yield _event("refused", {"message": error.message, "hint": error.hint})
                return
            except TimeoutError:
                return
            state = look.state if before is None else patch(before, look.state)
            if state or clock.time() - told_s >= ALIVE_S:
                told_s = clock.time()
                times = {"now_unix_s": round(look.now_unix_s, 3), "clock_s": round(look.clock_s, 3)}
                yield _event("all" if before is None else "change", times | {"state": state})
            before = look.state
            await asyncio.sleep(TELL_S_MIN)


def _known(person: Person, connection: HttpConnection, *, is_local: bool) -> Person:
    """The person, or one for all without a name who call from the same place: they share what one may take."""
    if person.name:
        return person
    caller, here = connection.ends()
    return replace(person, name=f"login {login_of(caller, here)}" if is_local else f"at {caller[0] if caller else ''}")


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
                self._connection.cut()  # and so the stream ends

        self._connection.lasts()
        try:
            await super().__call__(scope, receive, in_time)
        finally:
            self._ended()


def _event(name: str, values: dict[str, Any]) -> bytes:
    # json writes no line break, so each event is one line of data.
    return f"event: {name}\ndata: {json.dumps(values, separators=(',', ':'))}\n\n".encode()
