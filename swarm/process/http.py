"""The one HTTP server of every process: metrics and health, the scheduler's page (scheduler/web/), and joins.

     socket ──▶ HttpListener ──▶ TLS ──▶ a protocol for each connection: `plain` here, uvicorn's for the page
                   │ one request a connection, REQUEST_S_MAX for handshake, request and answer
                   │ CONNECTIONS_MAX at a time: the oldest makes room, first of those that have asked for nothing yet,
                   │ so a probe gets through
                   └ an answer that goes on asks for that with `lasts`, and counts elsewhere

It runs on the loop of a thread of its own, so a scrape does not disturb the process. Probes and readiness are asked of
the process's loop, so an orchestrator notices a stuck one. With a `Door` it speaks HTTPS: metrics are for callers that
the door admits, health and readiness are for everybody. On loopback metrics are for some logins of the machine
(callers.py).

Not chosen: the servers of uvicorn and of the standard library. They take connections before anybody can say no; the one
keeps the certificate that it began with, the other needs a thread for each connection.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import io
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from swarm.limits import HANDSHAKES_AT_ONCE, HANDSHAKES_PER_S, Buckets
from swarm.listening import cannot_listen
from swarm.process.callers import Callers, Header, Logins, SocketAddress
from swarm.text import is_loopback

T = TypeVar("T")

# Why the process is not ready; empty means ready. Called on the event loop.
Readiness = Callable[[], Sequence[str]]

LOOP_TURN_S_MAX = 1.0
REQUEST_S_MAX = 5.0
CONNECTIONS_MAX = 32
HEADERS_BYTES_MAX = 16 << 10
PORTS_TRIED_MAX = 100
HANDSHAKE_ADDRESSES_MAX = 4096
END_S_MAX = 2.0
BACKLOG = 1024  # a full one costs a probe the second until its SYN is sent again
PAUSE_S = 0.1  # after a connection could not be taken: no file descriptor is free
STUCK = "the event loop does not turn"
SCRAPERS_ONLY = "metrics are for the roles metrics and admin: show a certificate"


class Door(Protocol):
    """The TLS of a listener, and the check of callers that ask for more than health."""

    def context(self) -> ssl.SSLContext:
        """The TLS context of the next handshake."""

    def admits(self, certificate: Mapping[str, Any] | None) -> bool:
        """Whether the holder of this certificate (as getpeercert gives it; None or {}: there is none) may."""


class MainLoop:
    """The event loop of the process, asked from the listener's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def ask(self, question: Coroutine[Any, Any, T], wait_s: float = LOOP_TURN_S_MAX) -> T:
        """The answer; TimeoutError if the loop gives none in time or has ended."""
        try:
            asked = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError:  # the loop is closed
            question.close()
            raise TimeoutError from None
        async with asyncio.timeout(wait_s):
            return await asyncio.wrap_future(asked)


class Probes:
    """What /healthz and /readyz answer. `not_ready` and `remarks` (of a ready process) are asked on the main loop."""

    def __init__(self, loop: MainLoop, not_ready: Readiness, remarks: Readiness = list) -> None:
        self._loop = loop
        self._not_ready = not_ready
        self._remarks = remarks

    async def answer(self, path: str) -> tuple[int, str]:
        """Status and text."""
        if path == "/healthz":
            return (503, STUCK) if await self._asked(list) is None else (200, "ok")
        reasons = await self._asked(self._not_ready)
        if reasons != []:
            return 503, "\n".join(reasons or [STUCK])
        return 200, "\n".join(["ready", *(await self._asked(self._remarks) or [])])

    async def _asked(self, question: Readiness) -> list[str] | None:
        """The loop's answer; None if it gives none within a second."""

        async def ask() -> list[str]:
            return list(question())

        try:
            return await self._loop.ask(ask())
        except TimeoutError:
            return None
        except Exception as error:
            return [f"readiness unknown: {error}"]


class HttpEndpoint:
    """Serves /metrics, /healthz and /readyz at `host:port`; anything else is 404."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        readiness: Readiness,
        loop: asyncio.AbstractEventLoop,
        *,
        next_free: bool,
        door: Door | None = None,
        remarks: Readiness = list,
        logins: Logins | None = None,
    ) -> None:
        """`remarks`: what /readyz says of a ready process; `logins` read metrics on loopback."""
        self._probes = Probes(MainLoop(loop), readiness, remarks)
        self._callers = Callers(is_loopback(host), Logins() if logins is None else logins)
        self._registry = registry
        self._door = door
        listener = HttpListener(host, port, plain(self._answer), door, next_free=next_free)
        self.start, self.close = listener.start, listener.close

    async def _answer(self, request: Request) -> Answer:
        if request.path not in ("/metrics", "/healthz", "/readyz"):
            return _text(404, "here are /metrics, /healthz and /readyz")
        if request.method not in ("GET", "HEAD"):
            return _text(405, "only GET")
        if fault := self._fault(request):
            return _text(403, fault)
        if request.path != "/metrics":
            return _text(*await self._probes.answer(request.path))
        encode, content_type = choose_encoder(request.header("accept") or "")
        return 200, content_type, encode(self._registry)

    def _fault(self, request: Request) -> str:
        """Why this caller gets no answer; "" if it does."""
        fault = self._callers.site_fault(request.header)
        if not fault and request.path != "/healthz":
            fault = self._callers.name_fault(request.header)
        if fault or request.path != "/metrics":
            return fault
        if self._door is not None and not self._door.admits(request.connection.names()):
            return SCRAPERS_ONLY
        return self._callers.login_fault(*request.connection.ends())


# Taking connections --------------------------------------------------------------------------------------------------


class HttpListener:
    """Listens at `host:port`; port 0 is any free port. With a `door` it speaks HTTPS.

    `protocol` reads the request of a connection and answers it. With `next_free`, a busy port is followed by the next
    one: stage servers share machines.
    """

    def __init__(
        self,
        host: str,
        port: int,
        protocol: Callable[[HttpConnection], asyncio.BaseProtocol],
        door: Door | None = None,
        *,
        next_free: bool = False,
        flags: str = "--http-host, --http-port",
    ) -> None:
        """`flags` choose host and port."""
        self._host, self._port = host, port
        self._flags = flags
        self._last = min(port + PORTS_TRIED_MAX, 65535) if next_free and port else port
        self._protocol = protocol
        self._door = door
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen and give the port; InvalidConfig if it is busy or the address is not this machine's."""
        listening = self._listen()
        self._loop = asyncio.new_event_loop()
        self._service = Service(self._protocol, self._door)
        self._thread = threading.Thread(target=self._run, args=(listening,), name="http", daemon=True)
        self._thread.start()
        return int(listening.getsockname()[1])

    def close(self) -> None:
        """Stop listening; requests under way are dropped. Closing twice is the same as once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._loop.call_soon_threadsafe(self._service.end)
            thread.join(timeout=END_S_MAX + 1.0)

    def _listen(self) -> socket.socket:
        for port in range(self._port, self._last + 1):
            listening = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET, socket.SOCK_STREAM)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind((self._host.strip("[]"), port))
                listening.listen(BACKLOG)
            except OSError as error:
                listening.close()
                if error.errno != errno.EADDRINUSE or port == self._last:
                    tried = f"{self._port} to {port}" if port > self._port else str(port)
                    raise cannot_listen(f"{self._host}:{tried}", error, self._flags) from None
            else:
                break
        listening.setblocking(False)
        return listening

    def _run(self, listening: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, listening:
            runner.run(self._service.serve(listening))


class Service:
    """Takes connections on the loop of its thread."""

    def __init__(self, protocol: Callable[[HttpConnection], asyncio.BaseProtocol], door: Door | None) -> None:
        self._protocol = protocol
        self._door = door
        # For each address: a handshake costs a signature, and its caller next to nothing.
        self._handshakes = Buckets(HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE, HANDSHAKE_ADDRESSES_MAX)
        self._ended = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()
        self.silent: dict[HttpConnection, None] = {}  # those that have asked for nothing yet, the oldest first
        self.answered: dict[HttpConnection, None] = {}  # those whose request is whole, the oldest first
        self.lasting: set[HttpConnection] = set()

    def end(self) -> None:
        self._ended.set()

    async def serve(self, listening: socket.socket) -> None:
        """Take connections until `end`."""
        taking = asyncio.create_task(self._take(listening))
        await self._ended.wait()
        taking.cancel()
        for connection in [*self.silent, *self.answered, *self.lasting]:
            connection.cut()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=END_S_MAX)

    async def _take(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                taken, address = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            if self._door is not None and not self._handshakes.take(address[0], loop.time()):
                taken.close()
                continue
            if len(self.silent) + len(self.answered) >= CONNECTIONS_MAX:
                next(iter(self.silent or self.answered)).cut()
            task = loop.create_task(self._open(HttpConnection(self, taken)))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: HttpConnection) -> None:
        """Shake hands, if there is a door, and let the protocol read the request."""
        limits: dict[str, Any] = {}
        if self._door is not None:
            limits = {"ssl_handshake_timeout": REQUEST_S_MAX, "ssl_shutdown_timeout": 1.0}
        try:
            context = None if self._door is None else self._door.context()
            loop = asyncio.get_running_loop()
            protocol = self._protocol(connection)
            await loop.connect_accepted_socket(lambda: protocol, connection.socket, ssl=context, **limits)
        except OSError:  # it went away, or showed a certificate that is none here
            connection.ended()
            connection.socket.close()


class HttpConnection:
    """One connection, as whoever answers on it may use it."""

    def __init__(self, service: Service, taken: socket.socket) -> None:
        self._service = service
        self.socket = taken
        self.transport: asyncio.WriteTransport | None = None
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


# Reading a request ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for; `read` gives so many bytes of the body."""

    method: str
    path: str
    header: Header
    read: Callable[[int], Awaitable[bytes]]
    connection: HttpConnection


Answer = tuple[int, str, bytes]  # status, type of the content, content


def plain(answer: Callable[[Request], Awaitable[Answer]]) -> Callable[[HttpConnection], asyncio.BaseProtocol]:
    """A protocol for `HttpListener` that answers each request whole."""

    async def serve(connection: HttpConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection.transport = writer.transport
        method = ""
        try:
            try:
                method, path, header = _read_head(await reader.readuntil(b"\r\n\r\n"))
            except (asyncio.LimitOverrunError, ValueError, http.client.HTTPException):
                status, content_type, content = _text(400, "this is no request")
            else:
                if not header("content-length"):
                    connection.asks()

                async def body(length: int) -> bytes:
                    content = await reader.readexactly(length)
                    connection.asks()
                    return content

                request = Request(method, path, header, body, connection)
                status, content_type, content = await answer(request)
        except (OSError, asyncio.IncompleteReadError):  # it went away
            connection.cut()
            return
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
        head += f"Date: {formatdate(usegmt=True)}\r\n"  # who joins compares clocks
        head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + (b"" if method == "HEAD" else content))
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        connection.ended()

    def protocol(connection: HttpConnection) -> asyncio.BaseProtocol:
        reader = asyncio.StreamReader(HEADERS_BYTES_MAX)
        return asyncio.StreamReaderProtocol(reader, lambda *streams: serve(connection, *streams))

    return protocol


def _read_head(head: bytes) -> tuple[str, str, Header]:
    """Method, path and headers; ValueError or HTTPException for what is no request."""
    line, _, rest = head.partition(b"\r\n")
    method, target, _ = line.decode("latin-1").split(" ")
    return method, target.partition("?")[0], http.client.parse_headers(io.BytesIO(rest)).get


def _text(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()
