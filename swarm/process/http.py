"""One small HTTP endpoint for every process: /metrics, /healthz, /readyz; anything else is 404.

It runs on a thread of its own, so a scrape does not disturb the event loop. Health and readiness are asked of the loop,
so an orchestrator notices a stuck loop. With a `Door` it speaks HTTPS: metrics are for callers that the door admits,
health and readiness are for everybody. On loopback metrics are for some logins of the machine (callers.py).
"""

from __future__ import annotations

import asyncio
import errno
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, MetricsHandler

from swarm.errors import InvalidConfig
from swarm.limits import HANDSHAKES_AT_ONCE, HANDSHAKES_PER_S, Buckets
from swarm.listening import FILES_HINT
from swarm.process.callers import Callers, Header, Logins, SocketAddress
from swarm.text import is_loopback

# Why the process is not ready; empty means ready. Called on the event loop.
Readiness = Callable[[], Sequence[str]]

LOOP_TURN_S_MAX = 1.0
REQUEST_S_MAX = 5.0
CONNECTIONS_MAX = 32
PORTS_TRIED_MAX = 100
HANDSHAKE_ADDRESSES_MAX = 4096
_STUCK = "the event loop does not turn"


def cannot_listen(host: str, ports: str, error: OSError) -> InvalidConfig:
    """The error for a person whose --http-host or --http-port cannot be listened at."""
    if error.errno == errno.EADDRINUSE:
        return InvalidConfig(
            f"HTTP port {ports} of {host} is in use", hint="choose another with --http-port, or 0 for any free port"
        )
    hint = "choose an address of this machine with --http-host"
    if error.errno in (errno.EMFILE, errno.ENFILE):  # no address helps
        hint = FILES_HINT
    return InvalidConfig(f"cannot serve HTTP at {host}:{ports}: {error.strerror or error}", hint=hint)


class Handshakes:
    """How many TLS handshakes an address may begin: each costs a signature, and its caller next to nothing."""

    def __init__(self) -> None:
        self._buckets = Buckets(HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE, HANDSHAKE_ADDRESSES_MAX)

    def may_begin(self, host: str) -> bool:
        """Whether one more from this address may begin now."""
        return self._buckets.take(host, time.monotonic())


class Door(Protocol):
    """The TLS of an endpoint, and the check of callers that ask for more than health."""

    def context(self) -> ssl.SSLContext:
        """The TLS context of the next handshake."""

    def admits(self, certificate: Mapping[str, Any] | None) -> bool:
        """Whether the holder of this certificate (as getpeercert gives it; None or {}: there is none) may."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, and by whom: `certificate` as getpeercert gives it, the two ends of the connection."""

    path: str
    header: Header
    certificate: Mapping[str, Any] | None
    caller: SocketAddress
    here: SocketAddress


class HttpEndpoint:
    """Serves metrics and health at `host:port`.

    Port 0 is any free port. With `next_free`, a busy port is followed by the next one: stage servers share machines.
    """

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
        self._remarks = remarks
        self._callers = Callers(is_loopback(host), Logins() if logins is None else logins)
        self._host = host
        self._port = port
        self._next_free = next_free
        self._loop = loop
        self._readiness = readiness
        self._door = door
        self._handler = type("Handler", (_Handler,), {"endpoint": self, "registry": registry})
        self._server: BoundedServer | None = None

    def start(self) -> int:
        """Listen and give the port; InvalidConfig if the port is busy or the address is not this machine's."""
        self._server = self._bind()
        self._server.begin("http")
        return self._server.server_port

    def close(self) -> None:
        """Stop listening; requests under way are dropped. Closing twice is the same as once."""
        if self._server is not None:
            self._server.end()

    def _bind(self) -> BoundedServer:
        last = min(self._port + PORTS_TRIED_MAX, 65535) if self._next_free and self._port else self._port
        for port in range(self._port, last + 1):
            try:
                return BoundedServer((self._host.strip("[]"), port), self._handler, self._door)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise cannot_listen(self._host, str(port), error) from None
                busy = error
        tried = str(self._port) if last == self._port else f"{self._port} to {last}"
        raise cannot_listen(self._host, tried, busy)

    def answer(self, method: str, request: Request) -> tuple[int, str] | None:
        """Status and text for a request; None: the metrics."""
        if request.path not in ("/metrics", "/healthz", "/readyz"):
            return 404, "here are /metrics, /healthz and /readyz"
        if method not in ("GET", "HEAD"):
            return 405, "only GET"
        if fault := self._fault(request):
            return 403, fault
        match request.path:
            case "/healthz":
                return (503, _STUCK) if self._ask_loop(list) is None else (200, "ok")
            case "/readyz":
                reasons = self._ask_loop(self._readiness)
                if reasons != []:
                    return 503, "\n".join(reasons or [_STUCK])
                return 200, "\n".join(["ready", *(self._ask_loop(self._remarks) or [])])
            case _:
                return None

    def _fault(self, request: Request) -> str:
        """Why this caller gets no answer; "" if it does."""
        fault = self._callers.site_fault(request.header)
        if not fault and request.path != "/healthz":
            fault = self._callers.name_fault(request.header)
        if fault or request.path != "/metrics":
            return fault
        if self._door is not None and not self._door.admits(request.certificate):
            return "metrics are for the roles metrics and admin: show a certificate"
        return self._callers.login_fault(request.caller, request.here)

    def _ask_loop(self, question: Readiness) -> list[str] | None:
        """The loop's answer; None if it gives none within a second."""

        async def ask() -> list[str]:
            return list(question())

        coroutine = ask()
        try:
            answer = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            return None
        try:
            return answer.result(LOOP_TURN_S_MAX)
        except TimeoutError:
            answer.cancel()
            return None
        except Exception as error:
            return [f"readiness unknown: {error}"]


class BoundedServer(ThreadingHTTPServer):
    """A thread per request, so that one slow reader does not hold up the probes, and a bound on their number.

    With a `door` it speaks HTTPS; the handshake is part of the request, and shares its deadline.
    """

    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], door: Door | None = None
    ) -> None:
        self._door = door
        self._thread: threading.Thread | None = None
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._lock = threading.Lock()
        self._held: dict[Any, None] = {}  # connections, the oldest first
        self._deadlines: dict[Any, threading.Timer] = {}
        self._handshakes = Handshakes()
        super().__init__(address, handler)

    def begin(self, name: str) -> None:
        """Serve on a thread of this name."""
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.1}, name=name, daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Stop listening; requests under way are dropped. Ending twice is the same as once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self.shutdown()
            self.server_close()
            thread.join(timeout=REQUEST_S_MAX)

    def server_bind(self) -> None:
        # HTTPServer.server_bind looks up the host's name, which can take many seconds without working DNS.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[Any, Any]:
        request, client_address = super().get_request()
        if self._door is not None:
            if not self._handshakes.may_begin(client_address[0]):
                request.close()
                raise ConnectionRefusedError("too many handshakes from this address")
            request = self._door.context().wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, client_address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread; when all places are taken, the oldest connection makes room: a probe must get through."""
        with self._lock:
            oldest = next(iter(self._held)) if len(self._held) >= CONNECTIONS_MAX else None
            if oldest is not None:
                del self._held[oldest]
            self._held[request] = None
        if oldest is not None:
            self._cut(oldest)
        deadline = threading.Timer(REQUEST_S_MAX, self._cut, (request,))
        deadline.daemon = True
        self._deadlines[request] = deadline
        deadline.start()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._deadlines.pop(request).cancel()
            with self._lock:
                self._held.pop(request, None)

    def _cut(self, request: Any) -> None:
        """End a connection; its thread meets the end of the stream."""
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that went away."""


class _Handler(MetricsHandler):
    """Answers one request; `HttpEndpoint` gives its class the endpoint and the registry."""

    timeout = REQUEST_S_MAX
    endpoint: HttpEndpoint

    def do_GET(self) -> None:
        tls = self.connection if isinstance(self.connection, ssl.SSLSocket) else None
        certificate = None if tls is None else tls.getpeercert()
        path, ends = self.path.partition("?")[0], (self.client_address, self.connection.getsockname())
        answer = self.endpoint.answer(self.command, Request(path, self.headers.get, certificate, *ends))
        if answer is None:
            super().do_GET()
            return
        status, text = answer
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.end_headers()
        self.wfile.write(f"{text}\n".encode())

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET
