"""The paths of the scheduler's HTTP port.

    /metrics /sd            for scrapers: the roles metrics and admin, off loopback
    /healthz /readyz        for everybody; asked of the scheduler's own loop, so that a stuck one is noticed

The application runs on the thread of the HttpListener. It asks the scheduler's loop for all facts about the scheduler.

Targets for Prometheus at /sd: the scheduler and every stage server whose metrics other machines can reach.

The format is the one of http_sd_configs: groups of targets with labels. A label that begins with two underscores steers
the scrape; the others stand on every series.

Not chosen: a proxy in the scheduler for the others, because every reader of metrics could then make it dial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from scheduler.brain.fleet.membership import Peer
from scheduler.web.listener import CONNECTION
from swarm.errors import SwarmError
from swarm.pki.names import Role
from swarm.process.callers import Callers, Logins
from swarm.process.http import SCRAPERS_ONLY, STUCK, Door, HttpConnection, MainLoop, Probes
from swarm.text import is_loopback, is_wildcard
from swarm.types import PeerState

_PATHS = "here are /, /metrics, /healthz, /readyz and /sd"


class Site:
    """Makes the application. `targets` gives what /sd answers; like the probes it is asked on the scheduler's loop."""

    def __init__(
        self,
        loop: MainLoop,
        registry: CollectorRegistry,
        probes: Probes,
        door: Door | None,
        targets: Callable[[], list[dict[str, Any]]],
        pages: Sequence[BaseRoute] = (),
        check_member: Callable[[bytes | None], None] = lambda certificate: None,
        *,
        is_local: bool = False,
        logins: Logins | None = None,
    ) -> None:
        """`check_member` raises a SwarmError unless the holder of the certificate (DER) is a member still.

        `is_local`: only this machine reaches the port, and `logins` may read metrics there.
        """
        self._loop, self._registry, self._probes, self._door = loop, registry, probes, door
        self._targets, self._pages, self._check_member = targets, pages, check_member
        self._callers = Callers(is_local, Logins() if logins is None else logins)

    def application(self) -> Starlette:
        routes = [
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._serve_metrics),
            Route("/sd", self._sd),
            *self._pages,
        ]
        site = Starlette(routes=routes, exception_handlers={404: _refused, 405: _refused, 403: _refused})
        site.router.redirect_slashes = False
        return site

    async def _healthz(self, request: Request) -> Response:
        _check(self._callers.site_fault(request.headers.get))
        return text(*await self._probes.answer("/healthz"))

    async def _readyz(self, request: Request) -> Response:
        _check(self._callers.site_fault(request.headers.get) or self._callers.name_fault(request.headers.get))
        return text(*await self._probes.answer("/readyz"))

    async def _serve_metrics(self, request: Request) -> Response:
        self._check_scraper(request)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})

    async def _sd(self, request: Request) -> Response:
        self._check_scraper(request)

        async def ask() -> list[dict[str, Any]]:
            return self._targets()

        try:
            return JSONResponse(await self._loop.ask(ask()))
        except TimeoutError:
            return text(503, STUCK)

    def _check_scraper(self, request: Request) -> None:
        connection = connection_of(request.scope)
        _check(self._callers.fault(request.headers.get, *connection.ends()))
        if self._door is None:
            return
        if not self._door.admits(connection.names()):
            raise HTTPException(403, SCRAPERS_ONLY)
        try:
            self._check_member(connection.certificate())
        except SwarmError as error:
            raise HTTPException(403, error.message) from error


def connection_of(scope: Scope) -> HttpConnection:
    connection: HttpConnection = scope["extensions"][CONNECTION]
    return connection


def _check(fault: str) -> None:
    if fault:
        raise HTTPException(403, fault)


def text(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: _PATHS, 405: "only GET"}.get(error.status_code, error.detail)
    return text(error.status_code, said)


def targets(own: str, address: str, peers: Iterable[Peer], *, insecure: bool) -> list[dict[str, Any]]:
    """All targets of the moment: this scheduler, which serves HTTP at `own` and is dialled at `address`, and its peers.

    A process that listens at every address is scraped where it is dialled. One that listens on loopback only, on
    another machine than this scheduler's, is left out: only its own machine reaches it.
    """
    found = [_target(Role.SCHEDULER, "scheduler", "", _reached(own, address), insecure=insecure)]
    for peer in sorted(peers, key=lambda one: one.hello.peer):
        hello = peer.hello
        if peer.state is PeerState.GONE or not hello.http_address:
            continue
        where = _reached(hello.http_address, hello.address)
        is_here = is_loopback(_host(hello.address)) and is_loopback(_host(own))
        if where and (is_here or not is_loopback(_host(where))):
            found.append(_target(Role.STAGE_SERVER, hello.peer, hello.peer, where, insecure=insecure))
    return found


def _reached(listens: str, dialled: str) -> str:
    """Where others reach what listens there; "" if that is not known."""
    if not is_wildcard(_host(listens)):
        return listens
    return f"{_host(dialled)}:{listens.rpartition(':')[2]}" if dialled else ""


def _target(role: Role, instance: str, peer: str, where: str, *, insecure: bool) -> dict[str, Any]:
    labels = {"role": role.value, "instance": instance, "peer": peer}
    scheme = "http" if insecure or is_loopback(_host(where)) else "https"
    return {"targets": [where], "labels": labels | {"__scheme__": scheme}}


def _host(address: str) -> str:
    return address.rpartition(":")[0]
