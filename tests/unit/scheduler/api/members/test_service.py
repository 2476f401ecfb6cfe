"""The Members service: tokens and members, as admins see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from scheduler.api.members.service import MemberService
from swarm.errors import DatabaseUnavailable, NotAdmitted, NotFound, SwarmError, UsageError
from swarm.pki.identity import Application
from swarm.pki.names import Role, scheduler_of
from swarm.rpc.channel import bind, connect, new_server, translate
from swarm.rpc.members import vouched
from swarm.types import PeerId
from swarm.wire import members_pb2 as pb
from swarm.wire import members_pb2_grpc
from tests.support.members import LOOPBACK, SchedulerSide, scheduler_side


@pytest.fixture(autouse=True)
def _profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "profiles"))


@asynccontextmanager
async def asking(folder: Path) -> AsyncIterator[tuple[SchedulerSide, Any]]:
    """A scheduler's side, and the local admin's stub."""
    async with scheduler_side(folder) as side:
        admin = side.admin
        async with connect(side.address, admin, scheduler_of(admin.cluster).dns) as channel:
            yield side, members_pb2_grpc.MembersStub(channel)  # type: ignore[no-untyped-call]


async def refusal(call: Any) -> SwarmError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return translate(caught.value, "it")


NONSENSE = [
    pb.CreateTokenRequest(),
    pb.CreateTokenRequest(role="scheduler", ttl_s=60.0, uses=1),
    pb.CreateTokenRequest(role="root", ttl_s=60.0, uses=1),
    pb.CreateTokenRequest(role="admin", ttl_s=float("nan"), uses=1),
    pb.CreateTokenRequest(role="admin", ttl_s=float("inf"), uses=1),
    pb.CreateTokenRequest(role="admin", ttl_s=60.0, uses=2**32 - 1),
]


async def test_a_token_that_makes_no_sense_is_a_misuse(tmp_path: Path) -> None:
    async with asking(tmp_path / "data") as (side, stub):
        for asked in NONSENSE:
            assert isinstance(await refusal(stub.CreateToken(asked)), UsageError)
        assert side.members.tokens() == []


async def test_a_revoked_stage_server_loses_its_session_and_a_person_has_none(tmp_path: Path) -> None:
    async with asking(tmp_path / "data") as (side, stub):
        for role in (Role.STAGE_SERVER, Role.VIEWER):
            await asyncio.to_thread(vouched, side.address, side.admin, role, "ann", 10.0)
        assert isinstance(await refusal(stub.RevokeMember(pb.RevokeMemberRequest(name="ann"))), NotFound)
        assert side.cut == []
        await stub.RevokeMember(pb.RevokeMemberRequest(name="viewer/ann"))
        assert side.cut == []
        shown = await stub.RevokeMember(pb.RevokeMemberRequest(name="stage-server/ann", reason="stolen"))
        assert side.cut == [(PeerId("ann"), "it was revoked: stolen")]
        assert (shown.role, shown.name, shown.state, shown.reason) == ("stage-server", "ann", "revoked", "stolen")
        listed = (await stub.ListMembers(pb.ListMembersRequest())).members
        assert [(row.role, row.name, row.state, row.invited_by) for row in listed] == [
            ("admin", "local", "active", "the scheduler"),
            ("stage-server", "ann", "revoked", "admin local"),
            ("viewer", "ann", "revoked", "admin local"),
        ]


async def test_a_scheduler_that_takes_plaintext_has_no_members(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        server = new_server()
        service = MemberService(side.members, "")
        members_pb2_grpc.add_MembersServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        address = f"127.0.0.1:{bind(server, LOOPBACK)}"
        await server.start()
        async with connect(address) as channel:
            stub: Any = members_pb2_grpc.MembersStub(channel)  # type: ignore[no-untyped-call]
            csr = Application("ann").request_pem
            for call in (
                stub.Renew(pb.RenewRequest(csr_pem=csr)),
                stub.Issue(pb.IssueRequest(role="admin", name="ann", csr_pem=csr)),
                stub.CreateToken(pb.CreateTokenRequest(role="admin", ttl_s=60.0, uses=1)),
            ):
                assert isinstance(await refusal(call), NotAdmitted)
        await server.stop(None)
        assert [member.name for member in side.members.members()] == ["local"]


async def test_a_failure_of_the_database_reaches_whoever_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(change: object) -> None:
        raise DatabaseUnavailable("the database is away")

    async with asking(tmp_path / "data") as (side, stub):
        monkeypatch.setattr(side.members._database, "write", away)
        error = await refusal(stub.CreateToken(pb.CreateTokenRequest(role="admin", ttl_s=60.0, uses=1)))
        assert isinstance(error, DatabaseUnavailable)
        assert side.members.tokens() == []
