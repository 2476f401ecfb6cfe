"""One small HTTP endpoint for every process: /metrics, /healthz, /readyz; anything else is 404.

It runs on a thread of its own, so a scrape does not disturb the event loop. Health and readiness are asked of the loop,
because a loop that is stuck is what an orchestrator wants to find out.
"""

from __future__ import annotations

import asyncio
import errno
import socketserver
import threading
from collections.abc import Callable, Iterable, Sequence
from http.client import responses
from typing import IO, TYPE_CHECKING, Any, cast
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from swarm.errors import InvalidConfig

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

# Why the process is not ready; empty means ready. Called on the event loop.
Readiness = Callable[[], Sequence[str]]

LOOP_TURN_S_MAX = 1.0
REQUEST_S_MAX = 5.0
CONNECTIONS_MAX = 32
PORTS_TRIED_MAX = 100


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
    ) -> None:
        self._host = host
        self._port = port
        self._next_free = next_free
        self._loop = loop
        self._readiness = readiness
        self._metrics = make_wsgi_app(registry)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen and give the port; InvalidConfig if the port is busy or the address is not this machine's."""
        self._server = self._bind()
        self._server.set_app(self._answer)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True
        )
        self._thread.start()
        return self._server.server_port

    def close(self) -> None:
        """Stop listening; requests under way are dropped. Closing twice is the same as once."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.shutdown()
        server.server_close()
        self._thread.join(timeout=REQUEST_S_MAX)

    def _bind(self) -> _Server:
        last = min(self._port + PORTS_TRIED_MAX, 65535) if self._next_free and self._port else self._port
        for port in range(self._port, last + 1):
            try:
                return _Server((self._host, port), _Handler)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise InvalidConfig(
                        f"cannot serve HTTP at {self._host}:{port}: {error.strerror or error}",
                        hint="choose an address of this machine with --http-host",
                    ) from None
        tried = str(self._port) if last == self._port else f"{self._port} to {last}"
        raise InvalidConfig(
            f"HTTP port {tried} of {self._host} is in use",
            hint="choose another with --http-port, or 0 for any free port",
        )

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        match environ["PATH_INFO"], environ["REQUEST_METHOD"]:
            case "/metrics", "GET" | "HEAD":
                page: Iterable[bytes] = self._metrics(environ, start_response)
                return page
            case "/healthz", "GET" | "HEAD":
                healthy = self._ask_loop(list) is not None
                return _text(start_response, *((200, "ok") if healthy else (503, "the event loop does not turn")))
            case "/readyz", "GET" | "HEAD":
                reasons = self._ask_loop(self._readiness)
                if reasons is None:
                    reasons = ["the event loop does not turn"]
                return _text(start_response, *((503, "\n".join(reasons)) if reasons else (200, "ready")))
            case "/metrics" | "/healthz" | "/readyz", _:
                return _text(start_response, 405, "only GET")
            case _:
                return _text(start_response, 404, "here are /metrics, /healthz and /readyz")

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


def _text(start_response: StartResponse, status: int, text: str) -> list[bytes]:
    start_response(f"{status} {responses[status]}", [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread per request, so that one slow reader does not hold up the probes, and a bound on their number."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer.server_bind looks up the host's name, which can take many seconds without working DNS.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that went away."""


class _QuietServerHandler(ServerHandler):
    def log_exception(self, exc_info: Any) -> None:
        """Ignore broken pipes of scrapers that gave up; answer other errors with 500."""


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S_MAX

    def handle(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if len(self.raw_requestline) > 65536:
            self.requestline = self.request_version = self.command = ""
            self.send_error(414)
            return
        if not self.parse_request():
            return
        handler = _QuietServerHandler(
            cast(IO[bytes], self.rfile),
            cast(IO[bytes], self.wfile),
            self.get_stderr(),
            self.get_environ(),
            multithread=True,
        )
        handler.request_handler = self  # type: ignore[attr-defined]  # wsgiref's own back reference
        assert isinstance(self.server, WSGIServer)
        app = self.server.get_app()
        assert app is not None
        handler.run(app)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""
