"""The claim: with certificates of five seconds nobody is ever without a good one, and no session and no call is lost.

Certificates count whole seconds, so one of five is good for four to five. Virtual time says how much of that is left to
calls that take long, on any machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.api.members import admission
from scheduler.api.members.admission import Gatekeeper
from scheduler.storage.database import Database
from scheduler.storage.members.book import Members
from swarm.errors import Crowded, SchedulerUnreachable
from swarm.pki.authority import Authority
from swarm.pki.identity import Application, Identity, Wallet
from swarm.pki.names import Role
from swarm.process.logs import get_logger
from swarm.rpc import enrolment
from swarm.rpc.enrolment import Enrolment
from tests.support.members import caller_of, database_url
from tests.support.sim import loop as sim

LIFE_S = 5.0
WATCHED_S = 120.0
LOOK_S = 0.05
CALLS = ("/swarm.wire.Session/Attach", "/swarm.wire.Session/Store", "/swarm.wire.Session/Fetch")


def result_of(work: Coroutine[Any, Any, bytes]) -> bytes:
    """What comes of work that has nothing to wait for: databases answer at once here."""
    try:
        work.send(None)
    except StopIteration as end:
        return bytes(end.value)
    raise AssertionError("it waits")


@pytest.mark.parametrize("silences", [0, 1, 2], ids=["always there", "silent once", "silent twice"])
@pytest.mark.parametrize("began_unix_s", [1_800_000_000.0, 1_800_000_000.999], ids=["whole", "cut short"])
def test_certificates_of_five_seconds_are_renewed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silences: int, began_unix_s: float
) -> None:
    """`silences`: how often the scheduler does not answer before it renews one."""
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "profiles"))

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def wall_s() -> float:
            return began_unix_s + loop.time()

        monkeypatch.setattr(admission, "time", SimpleNamespace(time=wall_s, monotonic=loop.time))
        database = await Database.open(database_url(tmp_path), None)
        gatekeeper = await Gatekeeper.open(tmp_path, database, get_logger("test"), LIFE_S)
        gatekeeper.wallet._wall_s = wall_s
        members = gatekeeper.members
        wallet = Wallet(await members.issue_here(Role.STAGE_SERVER, "gpu"), wall_s)
        member = Enrolment("gpu", tmp_path / "gpu", wallet, get_logger("test"), wall_s)
        member._scheduler = "there"
        silent, renewals = silences, 0

        def renewed(address: str, held: Identity, timeout_s: float) -> Identity:
            nonlocal silent, renewals
            if silent:
                silent -= 1
                raise SchedulerUnreachable("it does not answer")
            silent, renewals = silences, renewals + 1
            application = Application("gpu")
            certificate = result_of(members.renew(caller_of(held.certificate_pem), application.request_pem))
            return application.granted(certificate, members.authority.pem)

        monkeypatch.setattr(enrolment, "renewed", renewed)
        tasks = [asyncio.ensure_future(member.renew()), asyncio.ensure_future(gatekeeper.renew())]
        assert wallet.identity is not None
        session = caller_of(wallet.identity.certificate_pem)  # its connection began with the first one
        while loop.time() < WATCHED_S:
            await asyncio.sleep(LOOK_S)
            own, theirs = gatekeeper.wallet.identity, wallet.identity
            assert own is not None
            assert own.ends_unix_s > wall_s(), f"the scheduler's, after {loop.time():.2f} s"
            assert theirs.ends_unix_s > wall_s(), f"the stage server's, after {loop.time():.2f} s"
            for call in CALLS:
                members.check(caller_of(theirs.certificate_pem), call)
            members.check_stays(replace(session))
        assert renewals >= WATCHED_S / LIFE_S
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        gatekeeper.close()
        await database.close()

    sim.run(main(), seed=1, limit_s=2 * WATCHED_S)


def test_who_renews_without_end_gets_a_certificate_a_second_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """Right after 312 renewals a second, a process that renews as it should has a new certificate within two."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def wall_s() -> float:
            return 1_800_000_000.0 + loop.time()

        database = await Database.open(database_url(tmp_path), None)
        members = Members(Authority.new(wall_s()), database, wall_s, LIFE_S * 1000)
        held = await members.issue_here(Role.STAGE_SERVER, "gpu")
        application, given, refused = Application("gpu"), 0, 0
        while loop.time() < 10.0:
            for _ in range(31):
                try:
                    await members.renew(caller_of(held.certificate_pem), application.request_pem)
                    given += 1
                except Crowded:
                    refused += 1
            await asyncio.sleep(0.1)
        assert given in (39, 40)
        assert refused > 3000
        await asyncio.sleep(1.1)
        await members.renew(caller_of(held.certificate_pem), application.request_pem)
        await database.close()

    sim.run(main(), seed=1, limit_s=60.0)
