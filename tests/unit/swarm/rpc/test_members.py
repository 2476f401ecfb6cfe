"""What a member asks of the scheduler for itself, over real connections."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scheduler.brain.members import enrolment
from swarm.errors import (
    CertificateEnded,
    Crowded,
    NotAdmitted,
    Revoked,
    RoleForbids,
    SchedulerUnreachable,
    UsageError,
)
from swarm.pki.authority import Authority
from swarm.pki.identity import Application
from swarm.pki.joining import join
from swarm.pki.names import Principal, Role
from swarm.rpc.members import renewed, vouched
from tests.support.members import caller_of, identity_of, scheduler_side

GPU = Role.STAGE_SERVER
CALL_S_MAX = 10.0


@pytest.fixture(autouse=True)
def _profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "profiles"))


async def test_a_member_renews_its_certificate_and_both_keys_are_good(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        line = await side.token(Role.VIEWER)
        first = (await asyncio.to_thread(join, line, "ann", Application("ann"))).identity
        second = await asyncio.to_thread(renewed, side.address, first, CALL_S_MAX)
        assert (second.principal, second.ca_pem) == (first.principal, first.ca_pem)
        assert second.key_pem != first.key_pem
        third = await asyncio.to_thread(renewed, side.address, second, CALL_S_MAX)
        await asyncio.to_thread(renewed, side.address, first, CALL_S_MAX)
        await side.members.revoke("ann", "left")
        for one in (first, second, third):
            with pytest.raises(Revoked, match="viewer ann was revoked: left"):
                await asyncio.to_thread(renewed, side.address, one, CALL_S_MAX)


async def test_an_admin_vouches_and_others_do_not(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        made = await asyncio.to_thread(vouched, side.address, side.admin, GPU, "gpu-1", CALL_S_MAX)
        assert made.principal == Principal(side.members.authority.cluster, GPU, "gpu-1")
        assert [member.invited_by for member in side.members.members() if member.name == "gpu-1"] == ["admin local"]
        with pytest.raises(RoleForbids, match="your role stage-server does not allow Issue; it needs admin"):
            await asyncio.to_thread(vouched, side.address, made, Role.ADMIN, "gpu-1", CALL_S_MAX)
        with pytest.raises(UsageError, match="there is no role"):
            await asyncio.to_thread(vouched, side.address, side.admin, Role.SCHEDULER, "scheduler", CALL_S_MAX)
        with pytest.raises(UsageError, match="is no name"):
            await asyncio.to_thread(vouched, side.address, side.admin, GPU, "Gpu", CALL_S_MAX)


async def test_a_certificate_made_behind_the_books_back_is_refused(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        authority = side.members.authority
        for name in ("eve", "local"):
            forged = identity_of(authority, Role.ADMIN, name)
            with pytest.raises(CertificateEnded):
                await asyncio.to_thread(vouched, side.address, forged, GPU, "gpu-1", CALL_S_MAX)
        scheduler = identity_of(authority, Role.SCHEDULER, "scheduler")
        with pytest.raises(NotAdmitted):
            await asyncio.to_thread(vouched, side.address, scheduler, GPU, "gpu-1", CALL_S_MAX)


async def test_a_scheduler_of_another_swarm_is_not_asked(tmp_path: Path) -> None:
    stranger = identity_of(Authority.new(0.0), Role.ADMIN, "me")
    async with scheduler_side(tmp_path / "data") as side:
        with pytest.raises(SchedulerUnreachable, match="is of another swarm"):
            await asyncio.to_thread(renewed, side.address, stranger, CALL_S_MAX)
    with pytest.raises(SchedulerUnreachable):
        await asyncio.to_thread(renewed, side.address, stranger, CALL_S_MAX)


async def test_who_renews_too_often_hears_when_it_may_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment, "CERTIFICATES_AT_ONCE", 2)
    monkeypatch.setattr(enrolment, "CERTIFICATES_PER_S", 0.001)
    async with scheduler_side(tmp_path / "data") as side:
        ann, bob = [
            (await asyncio.to_thread(join, await side.token(Role.VIEWER), name, Application(name))).identity
            for name in ("ann", "bob")
        ]
        for _ in range(2):
            await asyncio.to_thread(renewed, side.address, ann, CALL_S_MAX)
        with pytest.raises(Crowded, match="viewer ann has asked for 2 certificates in a short time") as caught:
            await asyncio.to_thread(renewed, side.address, ann, CALL_S_MAX)
        assert caught.value.hint.startswith("try again in 16 min")
        side.members.check(caller_of(ann.certificate_pem), "/swarm.wire.Jobs/List")
        await asyncio.to_thread(renewed, side.address, bob, CALL_S_MAX)
