"""The endpoint answers probes truthfully, survives bad clients, and never takes another's port."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import pytest
from prometheus_client import CollectorRegistry, Gauge

from swarm.errors import InvalidConfig
from swarm.process.callers import Logins
from swarm.process.http import CONNECTIONS_MAX, HttpEndpoint
from tests.support.neighbours import ask_as
from tests.support.web import limits


@contextmanager
def _serving(
    loop: asyncio.AbstractEventLoop, readiness: Callable[[], Sequence[str]] = list, logins: Logins | None = None
) -> Iterator[tuple[HttpEndpoint, int]]:
    registry = CollectorRegistry()
    Gauge("swarm_test", "x", registry=registry).set(7)
    endpoint = HttpEndpoint("127.0.0.1", 0, registry, readiness, loop, next_free=False, logins=logins)
    port = endpoint.start()
    try:
        yield endpoint, port
    finally:
        endpoint.close()


def _get(
    port: int, path: str, method: str = "GET", host: str = "", headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={**headers, **({"Host": host} if host else {})})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    with limits():
        yield


async def test_metrics_are_served() -> None:
    with _serving(asyncio.get_running_loop()) as (_, port):
        status, text = await asyncio.to_thread(_get, port, "/metrics")
    assert status == 200
    assert "swarm_test 7.0" in text


async def test_on_loopback_a_name_that_may_be_somebody_elses_reads_no_metrics() -> None:
    with _serving(asyncio.get_running_loop()) as (_, port):
        for host, status in (("evil.example", 403), (f"evil.example:{port}", 403), (f"localhost:{port}", 200)):
            assert (await asyncio.to_thread(_get, port, "/metrics", "GET", host))[0] == status
            assert (await asyncio.to_thread(_get, port, "/healthz", "GET", host))[0] == 200


async def test_on_loopback_metrics_are_for_our_login_and_health_is_for_every_login() -> None:
    """Every login of the machine read which jobs run, with their losses."""
    with _serving(asyncio.get_running_loop()) as (_, port):
        for half_closed in (False, True):
            status, text = await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/metrics", half_closed=half_closed)
            assert (status, "login nobody may not look" in text, "swarm_test" in text) == (403, True, False)
        assert (await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/healthz")) == (200, "ok\n")
        assert (await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/readyz")) == (200, "ready\n")
    for names in (["nobody"], ["*"]):
        with _serving(asyncio.get_running_loop(), logins=Logins.named(names)) as (_, port):
            assert (await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/metrics"))[0] == 200


async def test_a_page_of_another_site_is_answered_nothing() -> None:
    with _serving(asyncio.get_running_loop()) as (_, port):
        for said in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "null"}):
            for path in ("/metrics", "/healthz", "/readyz"):
                assert (await asyncio.to_thread(_get, port, path, headers=said))[0] == 403, (path, said)
        assert (await asyncio.to_thread(_get, port, "/metrics", headers={"Sec-Fetch-Site": "none"}))[0] == 200
        assert (await asyncio.to_thread(_get, port, "/readyz", "GET", "evil.example"))[0] == 403


async def test_health_is_good_while_the_loop_turns() -> None:
    with _serving(asyncio.get_running_loop()) as (_, port):
        assert await asyncio.to_thread(_get, port, "/healthz") == (200, "ok\n")


async def test_health_is_bad_while_the_loop_is_blocked() -> None:
    with limits(turn_s=0.2), _serving(asyncio.get_running_loop()) as (_, port):
        answers: list[tuple[int, str]] = []
        probe = threading.Thread(target=lambda: answers.append(_get(port, "/healthz")))
        probe.start()
        probe.join()  # on the loop's own thread: this is what blocks it
        assert answers[0][0] == 503
        assert "does not turn" in answers[0][1]


async def test_readiness_gives_its_reasons() -> None:
    reasons = ["no scheduler", "no stage"]
    with _serving(asyncio.get_running_loop(), lambda: reasons) as (_, port):
        assert await asyncio.to_thread(_get, port, "/readyz") == (503, "no scheduler\nno stage\n")
        reasons.clear()
        assert await asyncio.to_thread(_get, port, "/readyz") == (200, "ready\n")


async def test_what_is_wrong_with_a_process_that_is_ready_is_told_without_a_refusal() -> None:
    loop, remarks = asyncio.get_running_loop(), ["no broker"]
    endpoint = HttpEndpoint("127.0.0.1", 0, CollectorRegistry(), list, loop, next_free=False, remarks=lambda: remarks)
    port = endpoint.start()
    try:
        assert await asyncio.to_thread(_get, port, "/readyz") == (200, "ready\nno broker\n")
        remarks.clear()
        assert await asyncio.to_thread(_get, port, "/readyz") == (200, "ready\n")
    finally:
        endpoint.close()


async def test_a_readiness_that_raises_is_not_ready() -> None:
    def broken() -> list[str]:
        raise RuntimeError("lost count")

    with _serving(asyncio.get_running_loop(), broken) as (_, port):
        status, text = await asyncio.to_thread(_get, port, "/readyz")
    assert status == 503
    assert "lost count" in text


async def test_other_paths_and_methods_are_refused() -> None:
    with _serving(asyncio.get_running_loop()) as (_, port):
        assert (await asyncio.to_thread(_get, port, "/"))[0] == 404
        assert (await asyncio.to_thread(_get, port, "/metrics/../etc"))[0] == 404
        assert (await asyncio.to_thread(_get, port, "/metrics", "POST"))[0] == 405


async def test_a_client_that_says_nothing_holds_nobody_up() -> None:
    with _serving(asyncio.get_running_loop()) as (_, port):
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as rude:
            rude.sendall(b"\x00\xff nonsense\r\n\r\n")
            assert (await asyncio.to_thread(_get, port, "/healthz"))[0] == 200


async def test_a_busy_port_is_an_error_that_names_the_flag() -> None:
    loop = asyncio.get_running_loop()
    with _serving(loop) as (_, port):
        second = HttpEndpoint("127.0.0.1", port, CollectorRegistry(), list, loop, next_free=False)
        with pytest.raises(InvalidConfig, match=str(port)) as caught:
            second.start()
        assert "--http-port" in caught.value.hint


async def test_a_busy_port_is_passed_over_where_that_is_allowed() -> None:
    loop = asyncio.get_running_loop()
    with _serving(loop) as (_, port):
        second = HttpEndpoint("127.0.0.1", port, CollectorRegistry(), list, loop, next_free=True)
        try:
            assert port < second.start() <= port + 100
        finally:
            second.close()


async def test_a_foreign_address_is_an_error_that_names_the_flag() -> None:
    endpoint = HttpEndpoint("192.0.2.1", 0, CollectorRegistry(), list, asyncio.get_running_loop(), next_free=True)
    with pytest.raises(InvalidConfig) as caught:
        endpoint.start()
    assert "--http-host" in caught.value.hint


async def test_closing_twice_is_the_same_as_once() -> None:
    with _serving(asyncio.get_running_loop()) as (endpoint, _):
        endpoint.close()


async def test_a_probe_is_answered_although_others_hold_every_place() -> None:
    with _serving(asyncio.get_running_loop()) as (_, port):
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * CONNECTIONS_MAX)]
        try:
            for path in ("/healthz", "/readyz", "/metrics"):
                assert (await asyncio.to_thread(_get, port, path))[0] == 200
        finally:
            for one in held:
                one.close()


async def test_a_request_that_trickles_in_is_cut_at_its_deadline() -> None:
    def trickle(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
            for _ in range(200):
                line.sendall(b"y")
                time.sleep(0.05)

    with limits(request_s=0.3), _serving(asyncio.get_running_loop()) as (_, port):
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(trickle, port)
