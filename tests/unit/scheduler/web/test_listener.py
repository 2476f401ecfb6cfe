"""The scheduler's HTTP port reads strange requests, long answers and half handshakes right.

What it has in common with the port of a stage server is in tests/unit/swarm/process/test_http.py.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from scheduler.web.site import connection_of
from swarm.pki.authority import Authority
from swarm.pki.https import Https
from swarm.pki.identity import Wallet
from swarm.pki.names import Role
from swarm.process import http as http_module
from swarm.process.http import CONNECTIONS_MAX, HEADERS_BYTES_MAX
from tests.support.members import identity_of
from tests.support.web import get, get_over_tls, serving, site_of

SERVER = identity_of(Authority.new(1_700_000_000.0), Role.STAGE_SERVER, "gpu-1")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: \xff\xfe\r\n\r\n",
        b"GET /metrics?name[]=\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%ff%00?%ff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://x/metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /sd HTTP/1.1\r\nHost: x\r\nX: " + b"y" * (2 * HEADERS_BYTES_MAX) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
    ],
)
async def test_a_strange_request_is_answered_and_not_called_a_fault_of_ours(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
            line.sendall(request_bytes)
            return line.recv(64)

    with serving(site_of()) as port:
        answer = await asyncio.to_thread(ask, port)
        assert answer.startswith(b"HTTP/1.1 ")
        assert not answer.startswith(b"HTTP/1.1 5")
        assert (await asyncio.to_thread(get, port, "/healthz"))[0] == 200
    assert caplog.records == []


async def test_a_request_that_is_being_answered_makes_no_room_for_others() -> None:
    """A flood took every place within 32 ms, and a probe that the scheduler's loop answered later than that was cut."""
    asked, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def slow(request: Request) -> Response:
        loop.call_soon_threadsafe(asked.set)
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        return Response("done")

    with serving(site_of(pages=[Route("/slow", slow)])) as port:
        answer = asyncio.create_task(asyncio.to_thread(get, port, "/slow"))
        await asked.wait()
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * CONNECTIONS_MAX)]
        try:
            assert (await asyncio.to_thread(get, port, "/healthz"))[0] == 200
            go_on.set()
            assert await answer == (200, "done")
        finally:
            for connection in held:
                connection.close()


async def test_an_answer_that_lasts_has_no_deadline_and_takes_nobodys_place() -> None:
    found, together = list[tuple[bool, bool]](), threading.Barrier(3)

    async def endless(request: Request) -> Response:
        connection = connection_of(request.scope)
        connection.lasts()
        service = connection._service
        found.append((connection._deadline.cancelled(), connection in service.lasting))
        found.append((connection in service.silent, connection in service.answered))

        async def lines() -> AsyncIterator[bytes]:
            while True:
                yield b"x\n"
                await asyncio.sleep(0.05)

        return StreamingResponse(lines())

    def listen(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
            line.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = line.recv(12)
            together.wait()
        return answer

    with serving(site_of(pages=[Route("/endless", endless)])) as port:
        listening = [asyncio.to_thread(listen, port) for _ in range(3)]
        assert await asyncio.gather(*listening) == [b"HTTP/1.1 200"] * 3
        assert (await asyncio.to_thread(get, port, "/healthz"))[0] == 200
    assert found == [(True, True), (False, False)] * 3


async def test_who_leaves_before_his_answer_begins_to_last_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page was opened and closed while the scheduler was busy: each such connection was held for ever."""
    asked, lasting = threading.Event(), []

    async def late(request: Request) -> Response:
        asked.set()
        connection = connection_of(request.scope)
        while connection in connection._service.answered:  # until its end is heard
            await asyncio.sleep(0.01)
        connection.lasts()
        lasting.append(len(connection._service.lasting))
        return Response()

    def leave(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n")
            asked.wait()

    with serving(site_of(pages=[Route("/late", late)])) as port:
        await asyncio.to_thread(leave, port)
        while not lasting:
            await asyncio.sleep(0.01)
    assert lasting == [0]


async def test_a_handshake_that_never_ends_is_cut_and_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "HANDSHAKES_AT_ONCE", 1000.0)
    door = Https(Wallet(SERVER), tmp_path / "https.pem")
    with serving(site_of(door=door), door) as port:
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * CONNECTIONS_MAX)]
        try:
            assert await asyncio.to_thread(get_over_tls, port, "/healthz", SERVER, None, tmp_path) == (200, "ok\n")
        finally:
            for connection in held:
                connection.close()
