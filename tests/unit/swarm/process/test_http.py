"""The HTTP ports of stage servers and of the scheduler answer probes truthfully, survive bad clients, and take nobody's
port; metrics, and the scheduler's targets, are for whom the login or the certificate admits.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from swarm.errors import InvalidConfig
from swarm.pki.authority import Authority
from swarm.pki.https import Https
from swarm.pki.identity import Identity, Wallet
from swarm.pki.names import Role
from swarm.process import http as http_module
from swarm.process.callers import Logins
from swarm.process.http import CONNECTIONS_MAX
from tests.support.members import identity_of
from tests.support.neighbours import ask_as
from tests.support.web import (
    TARGETS,
    get,
    get_over_tls,
    open_port,
    scheduler_port,
    serving,
    site_of,
    stage_server_port,
)

NewPort: TypeAlias = Callable[..., Any]

OURS, OTHERS = Authority.new(1_700_000_000.0), Authority.new(1_700_000_000.0)
SERVER = identity_of(OURS, Role.STAGE_SERVER, "gpu-1")
CUT = r"(?i)alert|reset|eof|closed|pipe"  # what a client sees of a connection that was ended


@pytest.fixture(params=[stage_server_port, scheduler_port], ids=["stage server", "scheduler"])
def new(request: pytest.FixtureRequest) -> NewPort:
    """Makes a port of either kind."""
    made: NewPort = request.param
    return made


def guarded(new: NewPort) -> tuple[str, ...]:
    """What not everybody may read."""
    return ("/metrics",) if new is stage_server_port else ("/metrics", "/sd")


async def status(port: int, *request: str, **options: Any) -> int:
    return (await asyncio.to_thread(get, port, *request, **options))[0]


async def test_on_loopback_a_name_that_may_be_somebody_elses_reads_no_metrics(new: NewPort) -> None:
    """A page of another site could give its name this machine's address, and read the losses of all jobs."""
    with open_port(new()) as port:
        for path in guarded(new):
            for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example"):
                assert await status(port, path, "GET", host) == 403, (path, host)
            for host in ("localhost", f"127.0.0.1:{port}", f"[::1]:{port}"):
                assert await status(port, path, "GET", host) == 200, (path, host)
        assert await asyncio.to_thread(get, port, "/healthz", "GET", "evil.example") == (200, "ok\n")


async def test_on_loopback_metrics_are_for_our_login_and_health_is_for_every_login(new: NewPort) -> None:
    """Every login of the machine read which jobs run, with their losses, and where all stage servers are."""
    with open_port(new()) as port:
        for path in guarded(new):
            for half in {False, new is stage_server_port}:  # uvicorn answers none who has closed his half
                found, text = await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", path, half_closed=half)
                assert (found, "login nobody may not look" in text, "swarm_test" in text) == (403, True, False)
            assert await status(port, path) == 200
        assert await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/healthz") == (200, "ok\n")
        assert await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/readyz") == (200, "ready\n")
    for names in (["nobody"], ["*"]):
        with open_port(new(logins=Logins.named(names))) as port:
            assert (await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/metrics"))[0] == 200


async def test_beyond_loopback_every_name_and_login_reads_metrics_and_no_page_of_another_site() -> None:
    with serving(site_of(is_local=False)) as port:
        assert await status(port, "/metrics", "GET", "scheduler.lan") == 200
        assert (await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/metrics"))[0] == 200
        assert await status(port, "/sd", headers={"Origin": "null"}) == 403
        assert await status(port, "/readyz", "GET", "evil.example") == 200


async def test_a_page_of_another_site_is_answered_nothing(new: NewPort) -> None:
    said: tuple[dict[str, str], ...] = tuple({"Sec-Fetch-Site": f"{site}-site"} for site in ("cross", "same"))
    with open_port(new()) as port:
        for headers in (*said, {"Origin": "http://evil.example"}, {"Origin": "null"}):
            for path in (*guarded(new), "/healthz", "/readyz"):
                assert await status(port, path, headers=headers) == 403, (path, headers)
        assert await status(port, "/metrics", headers={"Sec-Fetch-Site": "none"}) == 200
        assert await status(port, "/readyz", "GET", "evil.example") == 403


async def test_health_is_good_and_readiness_gives_its_reasons_and_then_what_is_wrong_all_the_same(new: NewPort) -> None:
    reasons, remarks = ["no database", "no room"], ["no broker"]

    def not_ready() -> list[str]:
        if reasons == ["lost"]:
            raise RuntimeError("lost count")
        return reasons

    with open_port(new(not_ready=not_ready, remarks=lambda: remarks)) as port:
        assert await asyncio.to_thread(get, port, "/healthz") == (200, "ok\n")
        assert await asyncio.to_thread(get, port, "/healthz", "HEAD") == (200, "")
        assert await asyncio.to_thread(get, port, "/readyz") == (503, "no database\nno room\n")
        reasons[:] = ["lost"]
        found, text = await asyncio.to_thread(get, port, "/readyz")
        assert (found, "lost count" in text) == (503, True)
        reasons.clear()
        assert await asyncio.to_thread(get, port, "/readyz") == (200, "ready\nno broker\n")
        remarks.clear()
        assert await asyncio.to_thread(get, port, "/readyz") == (200, "ready\n")


async def test_health_is_bad_while_the_loop_is_blocked(new: NewPort) -> None:
    with open_port(new(), turn_s=0.2) as port:
        answers: list[tuple[int, str]] = []
        probe = threading.Thread(target=lambda: answers.extend(get(port, path) for path in ("/healthz", "/readyz")))
        probe.start()
        probe.join()  # on the loop's own thread: this is what blocks it
        assert [found for found, _ in answers] == [503, 503]
        assert "does not turn" in answers[0][1]


async def test_metrics_and_targets_are_served_and_nothing_else_and_nonsense_holds_nobody_up(new: NewPort) -> None:
    with open_port(new()) as port:
        found, text = await asyncio.to_thread(get, port, "/metrics")
        assert (found, "swarm_test 7.0" in text) == (200, True)
        if new is scheduler_port:
            found, text = await asyncio.to_thread(get, port, "/sd")
            assert (found, json.loads(text)) == (200, TARGETS)
        for path in ("/nothing", "/metrics/", "/metrics/../etc"):
            assert await status(port, path) == 404
        assert await status(port, "/metrics", "POST") == 405
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as rude:
            rude.sendall(b"\x00\xff nonsense\r\n\r\n")
            assert await status(port, "/healthz") == 200


async def test_a_busy_port_and_a_foreign_address_are_errors_that_name_the_flag(new: NewPort) -> None:
    made = new()
    with open_port(made) as port:
        with pytest.raises(InvalidConfig, match=f"{port}.* in use") as caught:
            new(port=port).start()
        assert "--http-port" in caught.value.hint
        with open_port(stage_server_port(port=port, next_free=True)) as next_port:
            assert port < next_port <= port + 100, "it may be passed over"
        made.close()  # the end of the block closes it once more
    with pytest.raises(ConnectionRefusedError):
        get(port, "/healthz")
    with pytest.raises(InvalidConfig) as caught:
        new("192.0.2.1").start()
    assert "--http-host" in caught.value.hint


async def test_a_probe_is_answered_although_others_hold_every_place(new: NewPort) -> None:
    with open_port(new()) as port:
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * CONNECTIONS_MAX)]
        try:
            for path in ("/healthz", "/readyz", "/metrics"):
                assert await status(port, path) == 200
        finally:
            for connection in held:
                connection.close()


async def test_a_request_that_trickles_in_is_cut_at_its_deadline(new: NewPort) -> None:
    def trickle(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
            for _ in range(200):
                line.sendall(b"y")
                time.sleep(0.05)

    with open_port(new(), request_s=0.3) as port:
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(trickle, port)


# HTTPS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def over_tls(new: NewPort, tmp_path: Path) -> Callable[[Wallet], Any]:
    """Opens a port that shows the certificate in a wallet."""
    return lambda wallet: open_port(new(door=Https(wallet, tmp_path / "https.pem")))


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Any]:
    """Status and text, as Prometheus asks: every stage server bears the name of its role."""

    async def ask(port: int, path: str, caller: Identity | None = None, source: str = "127.0.0.1") -> tuple[int, str]:
        return await asyncio.to_thread(get_over_tls, port, path, SERVER, caller, tmp_path, source)

    return ask


@pytest.mark.parametrize(
    ("caller", "admitted"),
    [
        (identity_of(OURS, Role.METRICS, "prometheus"), 200),
        (identity_of(OURS, Role.ADMIN, "me"), 200),
        (identity_of(OURS, Role.STAGE_SERVER, "gpu-2"), 403),
        (identity_of(OURS, Role.SUBMITTER, "me"), 403),
        (None, 403),
    ],
    ids=lambda value: str(value.principal) if isinstance(value, Identity) else str(value),
)
async def test_metrics_and_targets_are_for_some_roles_and_health_for_everybody(
    new: NewPort, over_tls: Any, ask: Any, caller: Identity | None, admitted: int
) -> None:
    with over_tls(Wallet(SERVER)) as port:
        for path, words in zip(guarded(new), ("swarm_test 7.0", "127.0.0.1:9464"), strict=False):
            found, text = await ask(port, path, caller)
            assert (found, words in text) == (admitted, admitted == 200)
        assert await ask(port, "/healthz", caller) == (200, "ok\n")
        assert await ask(port, "/readyz", caller) == (200, "ready\n")


@pytest.mark.parametrize(
    "caller",
    [identity_of(OTHERS, Role.ADMIN, "me"), identity_of(OURS, Role.METRICS, "prometheus", life_s=-1.0)],
    ids=["of another swarm", "ended"],
)
async def test_a_certificate_that_is_none_here_ends_the_connection(over_tls: Any, ask: Any, caller: Identity) -> None:
    with over_tls(Wallet(SERVER)) as port, pytest.raises(OSError, match=CUT):
        await ask(port, "/metrics", caller)


async def test_the_newest_certificate_is_shown_and_none_before_there_is_one(
    over_tls: Any, ask: Any, tmp_path: Path
) -> None:
    wallet = Wallet()
    with over_tls(wallet) as port:
        with pytest.raises(ssl.SSLError):
            await ask(port, "/healthz")
        wallet.identity = identity_of(OTHERS, Role.STAGE_SERVER, "gpu-1")
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(port, "/healthz")
        wallet.identity = SERVER
        assert await ask(port, "/healthz") == (200, "ok\n")
    assert (tmp_path / "https.pem").stat().st_mode & 0o077 == 0


async def test_handshakes_of_one_address_are_bounded_and_others_still_get_in(
    over_tls: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of handshakes took a core of the scheduler's process, a signature and two threads each."""
    monkeypatch.setattr(http_module, "HANDSHAKES_PER_S", 0.0)
    monkeypatch.setattr(http_module, "HANDSHAKES_AT_ONCE", 3)
    with over_tls(Wallet(SERVER)) as port:
        for _ in range(3):
            assert await ask(port, "/healthz") == (200, "ok\n")
        for _ in range(2):
            with pytest.raises(OSError, match=CUT):
                await ask(port, "/healthz")
        assert await ask(port, "/healthz", None, "127.0.0.2") == (200, "ok\n")
