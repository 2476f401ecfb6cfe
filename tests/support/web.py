"""HTTP ports for tests, on a free port of loopback, and callers with and without certificates."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge
from starlette.routing import BaseRoute

from scheduler.web.listener import Asgi
from scheduler.web.site import Site
from swarm.pki.identity import Identity
from swarm.pki.names import any_of
from swarm.process.callers import Logins
from swarm.process.http import Door, HttpEndpoint, HttpListener, MainLoop, Probes, Readiness

TARGETS: list[dict[str, Any]] = [{"targets": ["127.0.0.1:9464"], "labels": {"role": "scheduler"}}]


def site_of(
    not_ready: Readiness = list,
    remarks: Readiness = list,
    door: Door | None = None,
    pages: Sequence[BaseRoute] = (),
    check_member: Callable[[bytes | None], None] = lambda certificate: None,
    *,
    is_local: bool = False,
    logins: Logins | None = None,
) -> Site:
    """A site that asks the loop that runs now."""
    loop = MainLoop(asyncio.get_running_loop())
    health = Probes(loop, not_ready, remarks)
    return Site(loop, _registry(), health, door, lambda: TARGETS, pages, check_member, is_local=is_local, logins=logins)


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("swarm_test", "x", registry=registry).set(7)
    return registry


@contextmanager
def limits(turn_s: float = 60.0, request_s: float = 60.0) -> Iterator[None]:
    """How long an HTTP port waits for a turn of the loop and for a request; unless said, longer than machines stall."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MainLoop.ask, "__defaults__", (turn_s,))
        patch.setattr("swarm.process.http.REQUEST_S_MAX", request_s)
        yield


def stage_server_port(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    not_ready: Readiness = list,
    remarks: Readiness = list,
    door: Door | None = None,
    logins: Logins | None = None,
    next_free: bool = False,
) -> HttpEndpoint:
    """The HTTP port that a stage server has; its health is the health of the loop that runs now."""
    loop = asyncio.get_running_loop()
    return HttpEndpoint(
        host, port, _registry(), not_ready, loop, next_free=next_free, door=door, remarks=remarks, logins=logins
    )


def scheduler_port(host: str = "127.0.0.1", port: int = 0, *, door: Door | None = None, **facts: Any) -> HttpListener:
    """The same of the scheduler, without pages."""
    return HttpListener(host, port, Asgi(site_of(door=door, is_local=door is None, **facts).application()), door)


@contextmanager
def open_port(made: HttpEndpoint | HttpListener, *, turn_s: float = 60.0, request_s: float = 60.0) -> Iterator[int]:
    """Serve there; gives the port's number."""
    with limits(turn_s, request_s):
        try:
            yield made.start()
        finally:
            made.close()


def serving(site: Site, door: Door | None = None, *, request_s: float = 60.0) -> AbstractContextManager[int]:
    """Serve the site."""
    return open_port(HttpListener("127.0.0.1", 0, Asgi(site.application()), door), request_s=request_s)


def get(
    port: int, path: str, method: str = "GET", host: str = "", headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str]:
    """Status and text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={**headers, **({"Host": host} if host else {})})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def get_over_tls(
    port: int, path: str, server: Identity, caller: Identity | None, folder: Path, source: str = "127.0.0.1"
) -> tuple[int, str]:
    """The same from `source`, with the caller's certificate; the server must bear the name of its role."""
    context = ssl.create_default_context(cadata=server.ca_pem.decode())
    if caller is not None:
        caller.save(folder / "caller")
        context.load_cert_chain(folder / "caller/cert.pem", folder / "caller/key.pem")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, source_address=(source, 0), context=context)
    wrap: Callable[..., ssl.SSLSocket] = context.wrap_socket
    name = any_of(server.principal.cluster, server.principal.role)
    context.wrap_socket = lambda sock, **_: wrap(sock, server_hostname=name)  # type: ignore[method-assign]
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
