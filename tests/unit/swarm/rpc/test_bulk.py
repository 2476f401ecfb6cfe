"""Calls beside a session: which are its own, and with which certificate they are made."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from swarm.errors import StaleMessage
from swarm.pki.identity import Wallet
from swarm.pki.names import Principal, Role
from swarm.rpc import session
from swarm.rpc.bulk import Tickets
from swarm.rpc.guard import CALLER, Caller
from swarm.rpc.session import GrpcSchedulerLink
from swarm.types import JobId
from swarm.wire.messages import FetchRequest


class Call:
    """A call of somebody, as gRPC shows it to a server."""

    def __init__(self, connection: str, *metadata: tuple[str, bytes]) -> None:
        self.connection, self.metadata = connection, metadata
        self.given: tuple[tuple[str, bytes], ...] = ()

    def peer(self) -> str:
        return self.connection

    def invocation_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self.metadata

    async def send_initial_metadata(self, metadata: Any) -> None:
        self.given = tuple(metadata)


async def test_a_ticket_is_good_for_the_same_member_while_the_session_lasts() -> None:
    """It was good for the same certificate, and a session may outlive the certificate that it began with."""
    tickets, session = Tickets(), Call("ipv4:10.0.0.5:1")

    async def belongs(call: Call, name: str, fingerprint: str = "renewed") -> str:
        CALLER.set(Caller(Principal("c", Role.STAGE_SERVER, name), fingerprint) if name else None)
        async with tickets.beside(cast(Any, call)) as (connection, _):
            return connection

    CALLER.set(Caller(Principal("c", Role.STAGE_SERVER, "mine"), "first"))
    async with tickets.given(cast(Any, session)):
        assert await belongs(Call("ipv4:10.0.0.5:2", *session.given), "mine") == "ipv4:10.0.0.5:1"
        assert await belongs(Call("ipv4:10.0.0.6:2", *session.given), "other") == "ipv4:10.0.0.6:2"
        assert await belongs(Call("ipv4:10.0.0.5:2", *session.given), "") == "ipv4:10.0.0.5:2"
        assert await belongs(Call("ipv4:10.0.0.5:2", ("swarm-session-bin", bytes(16))), "mine") == "ipv4:10.0.0.5:2"
        assert await belongs(Call("ipv4:10.0.0.5:2"), "mine") == "ipv4:10.0.0.5:2"
    assert await belongs(Call("ipv4:10.0.0.5:2", *session.given), "mine") == "ipv4:10.0.0.5:2"


async def test_calls_beside_a_session_end_with_it() -> None:
    """A member that was revoked while it stored a file could hold its place in a checkpoint for as long as it liked."""
    tickets, session = Tickets(), Call("ipv4:10.0.0.5:1")
    begun = asyncio.Event()

    async def call(metadata: tuple[tuple[str, bytes], ...]) -> None:
        async with tickets.beside(cast(Any, Call("ipv4:10.0.0.5:2", *metadata))):
            begun.set()
            await asyncio.Event().wait()

    CALLER.set(Caller(Principal("c", Role.STAGE_SERVER, "mine"), "first"))
    async with tickets.given(cast(Any, session)):
        beside, alone = (asyncio.create_task(call(metadata)) for metadata in (session.given, ()))
        await begun.wait()
        await asyncio.sleep(0)
        assert not beside.done()
    with pytest.raises(StaleMessage, match="the session of this call has ended"):
        await asyncio.wait_for(beside, 20.0)
    assert not alone.done(), "it is of no session"
    alone.cancel()


class Dialled(Exception):
    """Somebody calls over a channel."""


async def test_a_call_beside_a_session_shows_the_present_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel for bulk had the certificate with which the session began: from its end on, nothing was saved."""

    class Channel:
        def __init__(self, identity: object) -> None:
            self.identity = identity

        def stream_stream(self, method: str) -> Any:
            raise Dialled(self.identity)

        async def close(self) -> None:
            pass

    class Held:
        cluster = "c"

    monkeypatch.setattr(session, "connect", lambda address, identity, *_: Channel(identity))
    wallet = Wallet(cast(Any, Held()))
    link = GrpcSchedulerLink("10.0.0.1:7950", wallet)
    for _ in range(3):
        wallet.identity = cast(Any, Held())
        with pytest.raises(Dialled) as dialled:
            async for _ in link.fetch(FetchRequest(JobId("a"), 0, "x", 0, 1)):
                pass
        assert dialled.value.args == (wallet.identity,)
    await link.close()
