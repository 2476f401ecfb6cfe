"""Probes are answered truthfully for everybody; metrics and targets are for whom the door admits."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from swarm.pki.authority import Authority
from swarm.pki.https import Https
from swarm.pki.identity import Identity, Wallet
from swarm.pki.names import Role
from swarm.process.callers import Logins
from tests.support.members import identity_of
from tests.support.neighbours import ask_as
from tests.support.web import TARGETS, get, get_over_tls, serving, site_of

OURS = Authority.new(1_700_000_000.0)
SERVER = identity_of(OURS, Role.STAGE_SERVER, "gpu-1")


async def test_metrics_and_targets_are_served() -> None:
    with serving(site_of()) as port:
        status, text = await asyncio.to_thread(get, port, "/metrics")
        assert status == 200
        assert "swarm_test 7.0" in text
        status, text = await asyncio.to_thread(get, port, "/sd")
        assert (status, json.loads(text)) == (200, TARGETS)


async def test_on_loopback_a_name_that_may_be_somebody_elses_reads_no_metrics() -> None:
    """A page of another site could give its name this machine's address, and read the losses of all jobs."""
    with serving(site_of(is_local=True)) as port:
        for path in ("/metrics", "/sd"):
            for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example"):
                assert (await asyncio.to_thread(get, port, path, "GET", host))[0] == 403, (path, host)
            for host in ("localhost", f"127.0.0.1:{port}", f"[::1]:{port}"):
                assert (await asyncio.to_thread(get, port, path, "GET", host))[0] == 200, (path, host)
        assert await asyncio.to_thread(get, port, "/healthz", "GET", "evil.example") == (200, "ok\n")
    with serving(site_of()) as port:
        assert (await asyncio.to_thread(get, port, "/metrics", "GET", "scheduler.lan"))[0] == 200


async def test_on_loopback_metrics_are_for_our_login_and_health_is_for_every_login() -> None:
    """Every login of the machine read which jobs run, with their losses, and where all stage servers are."""
    with serving(site_of(is_local=True)) as port:
        for path in ("/metrics", "/sd"):
            status, text = await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", path)
            assert (status, "login nobody may not look" in text) == (403, True)
            assert (await asyncio.to_thread(get, port, path))[0] == 200
        assert (await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/healthz"))[0] == 200
        assert (await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/readyz"))[0] == 200
    for site in (site_of(is_local=True, logins=Logins.named(["nobody"])), site_of(is_local=False)):
        with serving(site) as port:
            assert (await asyncio.to_thread(ask_as, f"127.0.0.1:{port}", "/metrics"))[0] == 200


async def test_a_page_of_another_site_is_answered_nothing() -> None:
    for is_local in (True, False):
        with serving(site_of(is_local=is_local)) as port:
            for said in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
                for path in ("/metrics", "/sd", "/healthz", "/readyz"):
                    assert (await asyncio.to_thread(get, port, path, headers=said))[0] == 403, (path, said)
            assert (await asyncio.to_thread(get, port, "/sd", headers={"Sec-Fetch-Site": "none"}))[0] == 200
            evil = await asyncio.to_thread(get, port, "/readyz", "GET", "evil.example")
            assert (evil[0] == 403) is is_local


async def test_health_is_good_while_the_loop_turns() -> None:
    with serving(site_of()) as port:
        assert await asyncio.to_thread(get, port, "/healthz") == (200, "ok\n")
        assert await asyncio.to_thread(get, port, "/healthz", "HEAD") == (200, "")


async def test_health_is_bad_while_the_loop_is_blocked() -> None:
    with serving(site_of(), turn_s=0.2) as port:
        answers: list[tuple[int, str]] = []
        probe = threading.Thread(target=lambda: answers.extend(get(port, path) for path in ("/healthz", "/readyz")))
        probe.start()
        probe.join()  # on the loop's own thread: this is what blocks it
        assert [status for status, _ in answers] == [503, 503]
        assert "does not turn" in answers[0][1]


async def test_readiness_gives_its_reasons_and_then_what_is_wrong_all_the_same() -> None:
    reasons, remarks = ["no database", "no room"], ["no broker"]
    with serving(site_of(lambda: reasons, lambda: remarks)) as port:
        assert await asyncio.to_thread(get, port, "/readyz") == (503, "no database\nno room\n")
        reasons.clear()
        assert await asyncio.to_thread(get, port, "/readyz") == (200, "ready\nno broker\n")
        remarks.clear()
        assert await asyncio.to_thread(get, port, "/readyz") == (200, "ready\n")


async def test_a_readiness_that_raises_is_not_ready() -> None:
    def broken() -> list[str]:
        raise RuntimeError("lost count")

    with serving(site_of(broken)) as port:
        status, text = await asyncio.to_thread(get, port, "/readyz")
    assert status == 503
    assert "lost count" in text


async def test_other_paths_and_methods_are_refused() -> None:
    with serving(site_of()) as port:
        assert (await asyncio.to_thread(get, port, "/nothing"))[0] == 404
        assert (await asyncio.to_thread(get, port, "/metrics/"))[0] == 404
        assert (await asyncio.to_thread(get, port, "/metrics/../etc"))[0] == 404
        assert await asyncio.to_thread(get, port, "/metrics", "POST") == (405, "only GET\n")


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
async def test_metrics_and_targets_are_for_some_roles_and_health_for_everybody(
    tmp_path: Path, caller: Identity | None, status: int
) -> None:
    door = Https(Wallet(SERVER), tmp_path / "https.pem")

    def ask(path: str) -> tuple[int, str]:
        return get_over_tls(port, path, SERVER, caller, tmp_path)

    with serving(site_of(door=door), door) as port:
        found, text = await asyncio.to_thread(ask, "/metrics")
        assert (found, "swarm_test 7.0" in text) == (status, status == 200)
        found, text = await asyncio.to_thread(ask, "/sd")
        assert (found, "127.0.0.1:9464" in text) == (status, status == 200)
        assert await asyncio.to_thread(ask, "/healthz") == (200, "ok\n")
        assert await asyncio.to_thread(ask, "/readyz") == (200, "ready\n")
