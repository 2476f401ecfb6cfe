"""Metrics over HTTPS: for whom the swarm lets scrape, with the newest certificate; health is for everybody."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from swarm.pki.authority import Authority
from swarm.pki.https import Https
from swarm.pki.identity import Identity, Wallet
from swarm.pki.names import Role, any_of
from swarm.process import http as http_module
from swarm.process.http import HttpEndpoint
from tests.support.members import identity_of
from tests.support.web import limits

OURS, OTHERS = Authority.new(1_700_000_000.0), Authority.new(1_700_000_000.0)
SERVER = identity_of(OURS, Role.STAGE_SERVER, "gpu-1")


@contextmanager
def serving(wallet: Wallet, folder: Path) -> Iterator[int]:
    registry = CollectorRegistry()
    Gauge("swarm_test", "x", registry=registry).set(7)
    door = Https(wallet, folder / "https.pem")
    loop = asyncio.get_running_loop()
    endpoint = HttpEndpoint("127.0.0.1", 0, registry, list, loop, next_free=False, door=door)
    with limits():
        try:
            yield endpoint.start()
        finally:
            endpoint.close()


async def ask(
    port: int, path: str, caller: Identity | None, folder: Path, source: str = "127.0.0.1"
) -> tuple[int, str]:
    """Status and text, as Prometheus asks: every stage server bears the name of its role."""

    def get() -> tuple[int, str]:
        context = ssl.create_default_context(cadata=SERVER.ca_pem.decode())
        if caller is not None:
            caller.save(folder / "caller")
            context.load_cert_chain(folder / "caller/cert.pem", folder / "caller/key.pem")
        connection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=60, source_address=(source, 0), context=context
        )
        name = any_of(OURS.cluster, Role.STAGE_SERVER)
        wrap = context.wrap_socket
        context.wrap_socket = lambda sock, **_: wrap(sock, server_hostname=name)  # type: ignore[method-assign]
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(get)


@pytest.mark.parametrize(
    ("caller", "status"),
    [
        (identity_of(OURS, Role.METRICS, "prometheus"), 200),
        (identity_of(OURS, Role.ADMIN, "me"), 200),
        (identity_of(OURS, Role.STAGE_SERVER, "gpu-2"), 403),
        (identity_of(OURS, Role.SUBMITTER, "me"), 403),
        (None, 403),
    ],
    ids=lambda value: str(value.principal) if isinstance(value, Identity) else str(value),
)
async def test_metrics_are_for_some_roles_and_health_for_everybody(
    tmp_path: Path, caller: Identity | None, status: int
) -> None:
    with serving(Wallet(SERVER), tmp_path) as port:
        found, text = await ask(port, "/metrics", caller, tmp_path)
        assert found == status
        assert ("swarm_test 7.0" in text) == (status == 200)
        assert await ask(port, "/healthz", caller, tmp_path) == (200, "ok\n")


@pytest.mark.parametrize(
    "caller",
    [identity_of(OTHERS, Role.ADMIN, "me"), identity_of(OURS, Role.METRICS, "prometheus", life_s=-1.0)],
    ids=["of another swarm", "ended"],
)
async def test_a_certificate_that_is_none_here_ends_the_connection(tmp_path: Path, caller: Identity) -> None:
    with serving(Wallet(SERVER), tmp_path) as port, pytest.raises(OSError, match=r"(?i)alert|reset|eof|closed|pipe"):
        await ask(port, "/metrics", caller, tmp_path)


async def test_the_newest_certificate_is_shown_and_none_before_there_is_one(tmp_path: Path) -> None:
    wallet = Wallet()
    with serving(wallet, tmp_path) as port:
        with pytest.raises(ssl.SSLError):
            await ask(port, "/healthz", None, tmp_path)
        wallet.identity = identity_of(OTHERS, Role.STAGE_SERVER, "gpu-1")
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(port, "/healthz", None, tmp_path)
        wallet.identity = SERVER
        assert await ask(port, "/healthz", None, tmp_path) == (200, "ok\n")
    assert (tmp_path / "https.pem").stat().st_mode & 0o077 == 0


async def test_handshakes_of_one_address_are_bounded_and_others_still_get_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of handshakes took a core of the scheduler's process, a signature and two threads each."""
    monkeypatch.setattr(http_module, "HANDSHAKES_PER_S", 0.0)
    monkeypatch.setattr(http_module, "HANDSHAKES_AT_ONCE", 3)
    with serving(Wallet(SERVER), tmp_path) as port:
        for _ in range(3):
            assert await ask(port, "/healthz", None, tmp_path) == (200, "ok\n")
        for _ in range(2):
            with pytest.raises(OSError, match=r"(?i)reset|eof|closed|pipe"):
                await ask(port, "/healthz", None, tmp_path)
        assert await ask(port, "/healthz", None, tmp_path, "127.0.0.2") == (200, "ok\n")
