"""Who comes in: what a first start makes, what a later one finds, and what is written down."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from scheduler.api.members import admission as module
from scheduler.api.members import audit_trail
from scheduler.api.members.audit_trail import AUDITED
from scheduler.brain.members.access import RULES
from swarm.errors import (
    BadToken,
    CertificateEnded,
    InvalidConfig,
    NotFound,
    RoleForbids,
    SchedulerUnreachable,
    WrongSwarm,
)
from swarm.pki.identity import Application, Identity, Wallet
from swarm.pki.joining import join
from swarm.pki.names import Role, scheduler_of
from swarm.pki.profiles import profile_folder
from swarm.process.logs import get_logger
from swarm.rpc.channel import connect, new_server, translate
from swarm.rpc.members import renewed, vouched
from swarm.wire import members_pb2 as pb
from swarm.wire import members_pb2_grpc
from tests.support.members import LOOPBACK, SchedulerSide, scheduler_side


@pytest.fixture(autouse=True)
def _profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "profiles"))


async def error_of(side: SchedulerSide, who: Identity, method: str, request: Any) -> Exception:
    async with connect(side.address, who, scheduler_of(who.cluster).dns) as channel:
        stub: Any = members_pb2_grpc.MembersStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            await getattr(stub, method)(request)
    return translate(caught.value, side.address)


def audited(folder: Path) -> list[tuple[str, ...]]:
    """Who did what with which result to whom."""
    files = ((folder / name).read_text().splitlines() for name in ("admin.jsonl", "audit.jsonl"))
    lines = sorted((json.loads(line) for file in files for line in file), key=lambda line: float(line["time_unix_s"]))
    return [
        (line["actor"].rpartition("/")[2], line["action"], line["result"], line.get("target", "")) for line in lines
    ]


async def test_a_first_start_makes_a_swarm_whose_admin_types_nothing(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        admin = side.admin
        assert (admin.principal.role, admin.principal.name) == (Role.ADMIN, "local")
        assert admin.cluster == admin.principal.cluster == side.members.authority.cluster
        made = await asyncio.to_thread(vouched, side.address, admin, Role.VIEWER, "ann", 10.0)
    folders = [tmp_path / "data/pki", tmp_path / "data/pki/metrics", profile_folder(side.address)]
    files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    assert len(files) == 10
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    async with scheduler_side(tmp_path / "data") as side:
        assert side.members.authority.cluster == made.cluster
        assert (await asyncio.to_thread(renewed, side.address, made, 10.0)).principal == made.principal
        assert side.admin.key_pem != admin.key_pem
        for caller in (admin, side.admin):  # a command that was under way knows the key before
            await asyncio.to_thread(vouched, side.address, caller, Role.VIEWER, "bob", 10.0)
        await side.members.revoke("admin/local", "stolen")
        admin = side.admin
    async with scheduler_side(tmp_path / "data") as side:  # its owner is taken in again, with the new key alone
        assert isinstance(await error_of(side, admin, "ListMembers", pb.ListMembersRequest()), CertificateEnded)
        await asyncio.to_thread(vouched, side.address, side.admin, Role.VIEWER, "carl", 10.0)


@pytest.mark.parametrize("key", ["ca.key", "pass.key"])
async def test_a_scheduler_does_not_start_with_a_key_that_others_can_read(tmp_path: Path, key: str) -> None:
    async with scheduler_side(tmp_path / "data"):
        pass
    path = tmp_path / "data" / "pki" / key
    path.chmod(0o644)
    with pytest.raises(InvalidConfig, match="others can read the key") as caught:
        async with scheduler_side(tmp_path / "data"):
            pass
    assert (caught.value.exit_code, caught.value.hint) == (3, f"chmod 600 {path}")


async def test_changes_and_refusals_are_written_down(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        ann = await asyncio.to_thread(vouched, side.address, side.admin, Role.VIEWER, "ann", 10.0)
        await asyncio.to_thread(renewed, side.address, ann, 10.0)
        error = await error_of(side, ann, "RevokeMember", pb.RevokeMemberRequest(name="local"))
        assert isinstance(error, RoleForbids)
        missing = await error_of(side, side.admin, "RevokeMember", pb.RevokeMemberRequest(name="bob"))
        assert isinstance(missing, NotFound)
        empty = await error_of(side, ann, "Renew", pb.RenewRequest())
        async with connect(side.address, side.admin, scheduler_of(ann.cluster).dns) as channel:
            stub: Any = members_pb2_grpc.MembersStub(channel)  # type: ignore[no-untyped-call]
            await stub.RevokeMember(pb.RevokeMemberRequest(name="ann", reason="left"))
    assert audited(tmp_path / "data") == [
        ("scheduler", "Start", "allowed", ""),
        ("local", "Issue", "allowed", "viewer/ann"),
        ("ann", "Renew", "allowed", ""),
        ("ann", "RevokeMember", f"{RoleForbids.code} {error.message}", ""),
        ("local", "RevokeMember", f"{NotFound.code} {missing.message}", "bob"),
        ("ann", "Renew", f"{empty.code} {empty.message}", ""),
        ("local", "Revoked", "left", "viewer/ann"),
        ("local", "RevokeMember", "allowed", "ann"),
    ]


async def test_joins_are_written_down_and_a_flood_of_false_ones_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_trail, "FAILURES_PER_S", 0.0)
    monkeypatch.setattr(audit_trail, "FAILURES_AT_ONCE", 2)
    async with scheduler_side(tmp_path / "data") as side:
        line = await side.token()
        await asyncio.to_thread(join, line, "gpu-1", Application("gpu-1"))
        for _ in range(3):
            with pytest.raises(BadToken):
                await asyncio.to_thread(join, line, "gpu-2", Application("gpu-2"))
    refused = (line.id, "Join", f"{BadToken.code} the token is unknown, used or expired", "gpu-2")
    lines = [(actor.removeprefix("token "), *rest) for actor, *rest in audited(tmp_path / "data")]
    assert lines[1:] == [(line.id, "Join", "allowed", "stage-server/gpu-1"), refused, refused]


def test_what_is_written_down_are_calls_that_exist() -> None:
    assert set(RULES) >= AUDITED
    for_admins = {method for method, roles in RULES.items() if roles == {Role.ADMIN}}
    assert {method.rpartition("/")[2] for method in for_admins - AUDITED} == {
        *("ListTokens", "ListMembers", "ShowAuthority"),
    }


async def test_a_join_address_that_was_chosen_and_is_taken_is_an_error(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        other = module.Gatekeeper(
            side.members,
            side.admission._trail._audit,
            side.admission._trail._admins,
            tmp_path / "other",
            get_logger("test"),
        )
        nobody: Any = None
        with pytest.raises(InvalidConfig, match="cannot listen at"):
            await other.serve(new_server(), LOOPBACK, 0, side.address, side.joins, nobody)


async def test_profiles_that_cannot_be_written_do_not_stop_a_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "file"))
    async with scheduler_side(tmp_path / "data") as side:
        assert side.joins


@pytest.mark.parametrize("disk", ["has room", "is full"])
async def test_the_schedulers_certificate_is_renewed_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    """A disk that was full when the certificate was renewed ended the scheduler."""
    async with scheduler_side(tmp_path / "data") as side:
        monkeypatch.setattr(module, "LOOK_S", 0.0)
        monkeypatch.setattr(Wallet, "is_due", True)
        first, shown, twice = side.admission.wallet.identity, list[Identity | None](), asyncio.Event()
        really, loop = Identity.save, asyncio.get_running_loop()

        def save(identity: Identity, folder: Path) -> None:
            if folder.name == "metrics":
                shown.append(side.admission.wallet.identity)
                if len(shown) == 2:
                    loop.call_soon_threadsafe(twice.set)
            if disk == "is full":
                raise InvalidConfig("No space left on device")
            really(identity, folder)

        monkeypatch.setattr(Identity, "save", save)
        admin = side.admin
        renewing = asyncio.create_task(side.admission.renew())
        async with asyncio.timeout(30):
            await twice.wait()
        renewing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await renewing
        assert side.admission.wallet.identity in shown
        assert first not in shown
        assert (side.admin != admin) == (disk == "has room")
        made = await asyncio.to_thread(vouched, side.address, side.admin, Role.VIEWER, "ann", 10.0)
        assert made.principal.name == "ann"


async def test_a_new_authority_begins_a_new_book(tmp_path: Path) -> None:
    """Whose certificate was of the old authority joins again under his name, and no token of before lets anybody in."""
    folder = tmp_path / "data"
    async with scheduler_side(folder) as side:
        old_line = await side.token(uses=9)
        old = (await asyncio.to_thread(join, old_line, "gpu-1", Application("gpu-1"))).identity
    (folder / "pki").rename(folder / "aside")
    async with scheduler_side(folder) as side:
        assert old.cluster != side.members.authority.cluster
        for address in (side.joins, old_line.address):
            with pytest.raises((WrongSwarm, SchedulerUnreachable)):
                await asyncio.to_thread(join, replace(old_line, address=address), "gpu-1", Application("gpu-1"))
        assert [member.name for member in side.members.members()] == ["local"]
        line = await side.token()
        assert (await asyncio.to_thread(join, line, "gpu-1", Application("gpu-1"))).identity.pin == line.pin != old.pin


async def test_a_revocation_ends_the_calls_of_the_member_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        cut: list[str] = []
        monkeypatch.setattr(side.admission.guard, "cut_off", lambda who: cut.append(who.uri))
        await side.members.issue_here(Role.VIEWER, "ann")
        await side.members.revoke("viewer/ann", "left")
        assert cut == [f"spiffe://{side.members.authority.cluster}/viewer/ann"]
