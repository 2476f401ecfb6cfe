"""Serves an ASGI application on a thread of its own, as `swarm/process/http.py` serves a process's metrics.

     socket ──▶ Listener ──▶ TLS ──▶ uvicorn's HTTP ──▶ application
                   │ one request a connection, REQUEST_S_MAX for handshake, request and answer
                   │ CONNECTIONS_MAX at a time: the oldest makes room, first of those that have asked for nothing yet,
                   │ so a probe gets through
                   └ an answer that goes on asks for that with `lasts`, and counts elsewhere

uvicorn reads HTTP. Its own server takes the connections before anybody can say no, and keeps the certificate that it
began with, so taking them is done here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from swarm.process.callers import SocketAddress
from swarm.process.http import CONNECTIONS_MAX, REQUEST_S_MAX, Door, Handshakes, cannot_listen

CONNECTION = "swarm.connection"  # where an application finds its Connection: among the extensions of the scope
HEADERS_BYTES_MAX = 16 << 10
END_S_MAX = 2.0
BACKLOG = 1024  # a full one costs a probe the second until its SYN is sent again
PAUSE_S = 0.1  # after a connection could not be taken: no file descriptor is free


class HttpListener:
    """Listens at `host:port`; port 0 is any free port. With a `door` it speaks HTTPS."""

    def __init__(self, host: str, port: int, application: Any, door: Door | None = None) -> None:
        self._host, self._port = host, port
        self._application = application
        self._door = door
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    def start(self) -> int:
        """Listen and give the port; InvalidConfig if it is busy or the address is not this machine's."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((self._host.strip("[]"), self._port))
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            raise cannot_listen(self._host, str(self._port), error) from None
        self._socket.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._service = Service(self._application, self._door)
        self._thread = threading.Thread(target=self._run, args=(self._socket,), name="web", daemon=True)
        self._thread.start()
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Stop listening; requests under way are dropped. Closing twice is the same as once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._loop.call_soon_threadsafe(self._service.end)
            thread.join(timeout=END_S_MAX + 1.0)

    def _run(self, listening: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, listening:
            runner.run(self._service.serve(listening))


class Service:
    """Takes connections on the loop of its thread."""

    def __init__(self, application: Any, door: Door | None) -> None:
        self._door = door
        self._handshakes = Handshakes()
        self._ended = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()
        self.silent: dict[HttpConnection, None] = {}  # those that have asked for nothing yet, the oldest first
        self.answered: dict[HttpConnection, None] = {}  # those whose request is whole, the oldest first
        self.lasting: set[HttpConnection] = set()
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

    def end(self) -> None:
        self._ended.set()

    async def serve(self, listening: socket.socket) -> None:
        """Take connections until `end`."""
        taking = asyncio.create_task(self._take(listening))
        await self._ended.wait()
        taking.cancel()
        for one in [*self.silent, *self.answered, *self.lasting]:
            one.cut()
        tasks = {*self._opening, *self.state.tasks}
        if tasks:
            await asyncio.wait(tasks, timeout=END_S_MAX)

    async def _take(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                taken, address = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            if self._door is not None and not self._handshakes.may_begin(address[0]):
                taken.close()
                continue
            if len(self.silent) + len(self.answered) >= CONNECTIONS_MAX:
                next(iter(self.silent or self.answered)).cut()
            task = loop.create_task(self._open(HttpConnection(self, taken)))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, one: HttpConnection) -> None:
        """Shake hands, if there is a door, and let uvicorn read the request."""
        limits: dict[str, Any] = {}
        if self._door is not None:
            limits = {"ssl_handshake_timeout": REQUEST_S_MAX, "ssl_shutdown_timeout": 1.0}
        try:
            context = None if self._door is None else self._door.context()
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: _Http(self, one), one.socket, ssl=context, **limits)
        except OSError:  # it went away, or showed a certificate that is none here
            one.ended()
            one.socket.close()


class HttpConnection:
    """One connection, as an application may use it."""

    def __init__(self, service: Service, taken: socket.socket) -> None:
        self._service = service
        self.socket = taken
        self.transport: asyncio.Transport | None = None
        service.silent[self] = None
        self._deadline = asyncio.get_running_loop().call_later(REQUEST_S_MAX, self.cut)

    def certificate(self) -> bytes | None:
        """The caller's proven certificate, in DER; None if there is none."""
        tls = None if self.transport is None else self.transport.get_extra_info("ssl_object")
        return tls.getpeercert(binary_form=True) if isinstance(tls, ssl.SSLObject) else None

    def names(self) -> dict[str, Any] | None:
        """The same as `Door.admits` wants it."""
        return None if self.transport is None else self.transport.get_extra_info("peercert")

    def ends(self) -> tuple[SocketAddress, SocketAddress]:
        """The caller's end and ours; () where it is not known any more."""
        known = (lambda name: None) if self.transport is None else self.transport.get_extra_info
        return known("peername") or (), known("sockname") or ()

    def asks(self) -> None:
        """Its request is whole."""
        if self._service.silent.pop(self, self) is None:
            self._service.answered[self] = None

    def lasts(self) -> None:
        """The answer goes on: the application bounds the number of such answers, and the memory of a slow reader."""
        self._deadline.cancel()
        if self._service.answered.pop(self, self) is None:  # it may have ended meanwhile
            self._service.lasting.add(self)

    def cut(self) -> None:
        """End the connection, even with an answer under way."""
        if self.transport is not None:
            self.transport.abort()
        else:  # a handshake meets the end of the stream
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self.ended()

    def ended(self) -> None:
        self._deadline.cancel()
        self._service.silent.pop(self, None)
        self._service.answered.pop(self, None)
        self._service.lasting.discard(self)


class _Http(H11Protocol):
    """uvicorn's protocol, extended to give the application its connection."""

    def __init__(self, service: Service, connection: HttpConnection) -> None:
        super().__init__(service.config, service.state, {}, asyncio.get_running_loop())
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
