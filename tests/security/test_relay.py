"""Relays between stage servers: bytes arrive as they were sent, and nobody tunnels whom the scheduler did not send."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from swarm.errors import NoPass, NoWay, PeerUnavailable, Refused, Revoked, SwarmError
from swarm.pki.identity import Wallet
from swarm.pki.names import Role
from swarm.pki.passes import PassKey
from swarm.relay.budget import Budget
from swarm.rpc.channel import translate
from swarm.rpc.links.dialling import Paths
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.rpc.links.tunnel import CONNECTION_KEY, SERVICE, accept, channel_to, open_tunnel
from swarm.rpc.passes import issue
from swarm.types import JobId, PeerId
from swarm.wire.messages import CutOff, Pass, RelayAt, StateRequest
from swarm.wire.relay_pb2 import ListenDown, ListenUp
from tests.support.headers import header_of
from tests.support.members import identity_of
from tests.support.relays import (
    JOB,
    KEY,
    OURS,
    STARTED,
    Hidden,
    RelayHere,
    hidden,
    pass_of,
    relay_here,
    until,
    wallet_of,
)

pytestmark = pytest.mark.timeout(300)

A, H = PeerId("a"), PeerId("h")
ASKED = StateRequest(JOB, 0, 1, "state", 0, 0, 1, A, 1)
BIG = os.urandom(3 << 20)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still makes no relay silent."""
    monkeypatch.setattr("swarm.rpc.links.dialling.THROUGH_S_MAX", 60.0)
    for module in ("swarm.rpc.links.tunnel", "swarm.relay.service"):
        monkeypatch.setattr(f"{module}.OPEN_S_MAX", 60.0)


@asynccontextmanager
async def links_of(wallet: Wallet, *relays: RelayAt) -> AsyncIterator[GrpcPeerLinks]:
    links = GrpcPeerLinks(wallet=wallet, paths=Paths(relays))
    try:
        yield links
    finally:
        await links.close()


async def send(links: GrpcPeerLinks, payload: bytes = b"abcd", **header: Any) -> None:
    async with asyncio.timeout(60):
        await links.send("", replace(header_of(len(payload)), **header), payload, to=H)


async def error_of(call: Any) -> type[SwarmError] | None:
    try:
        async with asyncio.timeout(60):
            await call
    except SwarmError as error:
        return type(error)
    return None


async def listens(relay: RelayHere, one: Hidden) -> None:
    """Until the relay knows that the stage server is there, and its pass."""
    await until(lambda: (known := relay.service._board._listening.get(H)) is not None and known.shown is not None)


@pytest.fixture
async def relay() -> AsyncIterator[RelayHere]:
    async with relay_here("r1") as made:
        yield made


@asynccontextmanager
async def line_of(relay: RelayHere, theirs: Wallet) -> AsyncIterator[tuple[Any, Any]]:
    """The channel of a stage server to the relay, and the call with which it listens there."""
    channel: Any = channel_to(relay.at, theirs)
    listening = channel.stream_stream(f"/{SERVICE}/Listen")()
    await listening.write(ListenUp(token=theirs.pass_token).SerializeToString())
    await listening.read()
    await until(lambda: relay.service._board._listening[H].shown is not None)
    yield channel, listening
    await channel.close()


async def offered(listening: Any) -> str:
    """The name of the next connection that the relay offers."""
    return str(ListenDown.FromString(await listening.read()).connection)


@pytest.fixture
async def there(relay: RelayHere) -> AsyncIterator[Hidden]:
    """A stage server of stage 1 that listens at the relay."""
    async with hidden(H, 1, [relay.at]) as made:
        await listens(relay, made)
        yield made


async def test_tensors_and_state_arrive_as_they_were_sent_from_whom_they_say(relay: RelayHere, there: Hidden) -> None:
    there.receiver.state = BIG
    async with links_of(wallet_of(A, pass_of(A, 1)), relay.at) as links:
        await send(links, BIG)
        _, state = await links.pull("", ASKED, 8 << 20, to=H)
        assert there.receiver.got == [(A, BIG)]
        assert bytes(state) == BIG
        assert relay.bytes_carried("to_listener") > len(BIG) < relay.bytes_carried("from_listener")
        used = relay.service.take_used()
        assert set(used) == {(JOB, A, H), (JOB, H, A)}
        assert min(used.values()) > len(BIG)
        assert relay.service.take_used() == {}


async def test_a_relay_sees_neither_tensors_nor_names_of_jobs_in_what_it_carries() -> None:
    seen: list[bytes] = []

    def look(payload: bytes) -> bytes:
        seen.append(payload)
        return payload

    async with relay_here("r1", look) as relay, hidden(H, 1, [relay.at]) as there:
        await listens(relay, there)
        async with links_of(wallet_of(A, pass_of(A, 1)), relay.at) as links:
            await send(links, b"secret" * 1000)
    assert b"secret" not in b"".join(seen)
    assert seen[0][:1] == b"\x16", "a TLS handshake"


async def test_a_byte_that_a_relay_changes_breaks_the_link_and_enters_nothing() -> None:
    flips = 0

    def flip(payload: bytes) -> bytes:
        nonlocal flips
        if flips or len(payload) < 30_000:
            return payload
        flips += 1
        return payload[:5000] + bytes([payload[5000] ^ 1]) + payload[5001:]

    async with relay_here("r1", flip) as relay, hidden(H, 1, [relay.at]) as there:
        await listens(relay, there)
        async with links_of(wallet_of(A, pass_of(A, 1)), relay.at) as links:
            assert await error_of(send(links, BIG)) is PeerUnavailable
            assert there.receiver.got == []
            await send(links, BIG)
    assert flips == 1
    assert there.receiver.got == [(A, BIG)]


async def test_a_relay_that_puts_through_to_somebody_else_is_found_out(
    relay: RelayHere, there: Hidden, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = relay.service._board
    right = board.connect

    def wrong(caller: PeerId, shown: Pass, to: PeerId, now_unix_s: float) -> Any:
        return right(caller, shown, PeerId("x"), now_unix_s)

    async with hidden("x", 1, [relay.at]) as other:
        await until(lambda: (known := board._listening.get(PeerId("x"))) is not None and known.shown is not None)
        monkeypatch.setattr(board, "connect", wrong)
        async with links_of(wallet_of(A, pass_of(A, 1)), relay.at) as links:
            assert await error_of(send(links)) is PeerUnavailable
        assert (there.receiver.got, other.receiver.got) == ([], [])


async def test_one_direction_may_end_before_the_other(relay: RelayHere) -> None:
    """The tunnel alone, with a server at its end that answers once it has read all."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        content = await reader.read()
        writer.write(content[::-1])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    own = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    theirs = wallet_of(H, pass_of(H, 1))
    async with line_of(relay, theirs) as (_, listening):
        opening = asyncio.create_task(open_tunnel(relay.at, H, wallet_of(A, pass_of(A, 1))))
        accepting = asyncio.create_task(accept(relay.at, await offered(listening), own, theirs))
        tunnel = await opening
        host, port = tunnel.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(BIG)
        writer.write_eof()
        assert await reader.read() == BIG[::-1]
        writer.close()
        async with asyncio.timeout(30):
            await accepting
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))
        await tunnel.close()
    server.close()


async def test_nobody_is_put_through_without_a_pass_for_the_same_job(relay: RelayHere, there: Hidden) -> None:
    async def attempt(wallet: Wallet, to: str = H) -> type[SwarmError] | None:
        return await error_of(open_tunnel(relay.at, PeerId(to), wallet))

    assert await attempt(wallet_of(A)) is NoPass
    assert await attempt(wallet_of(A, pass_of(A, 1, job=JobId("other")))) is NoPass
    assert await attempt(wallet_of(A, pass_of("b", 1))) is NoPass, "the pass of another"
    assert await attempt(wallet_of(A, pass_of(A, 1, expires_unix_s=STARTED - 1))) is NoPass
    forged = wallet_of(A)
    forged.pass_token = issue(PassKey.new(), pass_of(A, 1))
    assert await attempt(forged) is NoPass
    assert await attempt(wallet_of(A, pass_of(A, 1)), "nobody") is PeerUnavailable
    there.wallet.pass_token = issue(KEY, pass_of(H, 1, job=JobId("other")))
    there.listener.passed()
    await until(lambda: relay.service._board._listening[H].shown.job == "other")  # type: ignore[union-attr]
    assert await attempt(wallet_of(A, pass_of(A, 1))) is NoPass, "it serves another job now"


async def test_whoever_has_no_certificate_of_a_stage_server_is_not_heard(relay: RelayHere) -> None:
    for role in (Role.ADMIN, Role.RELAY, Role.SCHEDULER):
        wallet = Wallet(identity_of(OURS, role, "x"))
        wallet.pass_token = issue(KEY, pass_of("x", 1))
        error = await error_of(open_tunnel(relay.at, H, wallet))
        assert error is not None
        assert error.code == "E0503"


async def test_a_link_is_accepted_by_whom_it_is_for_and_once(relay: RelayHere) -> None:
    theirs = wallet_of(H, pass_of(H, 1))

    async def accepted(wallet: Wallet, name: str) -> type[SwarmError] | None:
        other: Any = channel_to(relay.at, wallet)
        try:
            call = other.stream_stream(f"/{SERVICE}/Accept")(metadata=((CONNECTION_KEY, name),))
            async with asyncio.timeout(30):
                await call.read()
        except TimeoutError:
            return None
        except grpc.RpcError as error:
            return type(translate(error, "relay"))
        finally:
            await other.close()
        return None

    async with line_of(relay, theirs) as (channel, listening):
        opening = asyncio.create_task(open_tunnel(relay.at, H, wallet_of(A, pass_of(A, 1))))
        connection = await offered(listening)
        assert await accepted(wallet_of("b", pass_of("b", 1)), connection) is Refused, "it is for another"
        assert await accepted(theirs, "0" * 32) is Refused
        standing = channel.stream_stream(f"/{SERVICE}/Accept")(metadata=((CONNECTION_KEY, connection),))
        tunnel = await opening
        assert await accepted(theirs, connection) is Refused, "a second time"
        standing.cancel()
        await tunnel.close()


async def test_the_other_end_has_its_time_once_the_relay_has_heard(
    relay: RelayHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the relay's line carried bulk, the other end had accepted after four seconds, and the caller had hung up
    after three."""
    monkeypatch.setattr("swarm.rpc.links.tunnel.OPEN_S_MAX", 3.0)
    async with line_of(relay, wallet_of(H, pass_of(H, 1))) as (channel, listening):
        opening = asyncio.create_task(open_tunnel(relay.at, H, wallet_of(A, pass_of(A, 1))))
        connection = await offered(listening)
        await asyncio.sleep(4.0)
        accepting = channel.stream_stream(f"/{SERVICE}/Accept")(metadata=((CONNECTION_KEY, connection),))
        tunnel = await opening
        accepting.cancel()
        await tunnel.close()


@pytest.mark.parametrize("who", [A, H])
async def test_whoever_is_revoked_is_cut_off_at_the_relay(relay: RelayHere, there: Hidden, who: PeerId) -> None:
    wallet = wallet_of(A, pass_of(A, 1))
    tunnel = await open_tunnel(relay.at, H, wallet)
    host, port = tunnel.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await until(lambda: len(relay.service._links) == 1)
    relay.service.cut_off(CutOff(who, STARTED + 1))
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    await until(lambda: not relay.service._links)
    expected = Revoked if who == A else PeerUnavailable
    assert await error_of(open_tunnel(relay.at, H, wallet)) in (expected, NoPass)
    writer.close()
    await tunnel.close()


async def test_a_relay_that_is_lost_costs_a_link_and_the_second_one_carries() -> None:
    async with relay_here("r1") as one, relay_here("r2") as two, hidden(H, 1, [one.at, two.at]) as there:
        for relay in (one, two):
            await listens(relay, there)
        async with links_of(wallet_of(A, pass_of(A, 1)), one.at, two.at) as links:
            await send(links, b"1")
            first, second = (one, two) if one.bytes_carried("to_listener") else (two, one)
            assert not second.bytes_carried("to_listener")
            await first.stop()  # type: ignore[misc]
            while await error_of(send(links, b"2")) is PeerUnavailable:
                pass
            assert second.bytes_carried("to_listener")
            await second.stop()  # type: ignore[misc]
            errors = {await error_of(send(links, b"3")) for _ in range(3)}
            assert NoWay in errors, "the relays are to blame, not the peer"
            assert errors <= {NoWay, PeerUnavailable}
    assert [content for _, content in there.receiver.got] == [b"1", b"2"]


async def test_a_job_that_had_its_share_of_one_relay_goes_on_through_the_other() -> None:
    share = 1 << 20
    async with (
        relay_here("r1", budget=Budget(job_bytes_max=share)) as one,
        relay_here("r2", budget=Budget(job_bytes_max=share)) as two,
        hidden(H, 1, [one.at, two.at]) as there,
    ):
        for relay in (one, two):
            await listens(relay, there)
        async with links_of(wallet_of(A, pass_of(A, 1)), one.at, two.at) as links:
            errors, sent = [], 0
            while NoWay not in errors:
                if error := await error_of(send(links, bytes(1 << 18))):
                    errors.append(error)
                else:
                    sent += 1
            assert set(errors) <= {NoWay, PeerUnavailable}
    assert 5 <= sent <= 8, "one relay alone carries less than four tensors of these"
    assert all(
        share <= relay.bytes_carried("to_listener") + relay.bytes_carried("from_listener") for relay in (one, two)
    )
