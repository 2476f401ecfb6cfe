"""The scheduler's ASGI application behind an `HttpListener`: uvicorn reads HTTP, and takes no connection itself."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from swarm.process.http import HEADERS_BYTES_MAX, HttpConnection

CONNECTION = "swarm.connection"  # where an application finds its HttpConnection: among the extensions of the scope


class Asgi:
    """Makes the protocol of each connection."""

    def __init__(self, application: Any) -> None:
        self.state = ServerState()
        self.state.default_headers = [(b"connection", b"close")]
        self.config = uvicorn.Config(
            application,
            http=_Http,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
        )
        self.config.load()

    def __call__(self, connection: HttpConnection) -> asyncio.BaseProtocol:
        return _Http(self, connection)


class _Http(H11Protocol):
    """uvicorn's protocol, extended to give the application its connection."""

    def __init__(self, asgi: Asgi, connection: HttpConnection) -> None:
        super().__init__(asgi.config, asgi.state, {}, asyncio.get_running_loop())
        self._connection = connection
        inner: Any = self.app

        async def application(scope: Any, receive: Any, send: Any) -> None:
            connection.asks()
            await inner(scope | {"extensions": {CONNECTION: connection}}, receive, send)

        self.app = application

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connection.transport = transport
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.ended()
        super().connection_lost(exc)
