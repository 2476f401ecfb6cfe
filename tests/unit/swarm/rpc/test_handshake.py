"""Whoever does not get through a handshake is told why, and what to do, in one sentence each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from client.connection import Scheduler
from swarm.errors import (
    AnotherAnswers,
    ClocksDiffer,
    NotAdmitted,
    PeerUnavailable,
    SchedulerUnreachable,
    SwarmError,
    WrongSwarm,
)
from swarm.pki.authority import LIFE_S, Authority
from swarm.pki.identity import Identity, Wallet, issue
from swarm.pki.names import Principal, Role, scheduler_of
from swarm.rpc.channel import bind, connect, new_server, translate
from swarm.rpc.handshake import cause_of, explained, with_times
from swarm.text import utc
from tests.support.members import LOOPBACK

NOW = time.time()
OURS, THEIRS = Authority.new(NOW - 9 * LIFE_S), Authority.new(NOW)
SCHEDULER, ADMIN = scheduler_of(OURS.cluster), Principal(OURS.cluster, Role.ADMIN, "me")
GOOD = issue(OURS, SCHEDULER, NOW)
TWO_HOURS = 7200.0


def trusting(identity: Identity, authority: Authority) -> Identity:
    return Identity(identity.key_pem, identity.certificate_pem, authority.pem)


@asynccontextmanager
async def answering(identity: Identity | None) -> AsyncIterator[str]:
    server = new_server()
    address = f"127.0.0.1:{bind(server, LOOPBACK, None if identity is None else Wallet(identity))}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def failure(address: str, identity: Identity | None) -> grpc.RpcError:
    async with connect(address, identity, SCHEDULER.dns) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary("/x.Y/Z")(b"", timeout=20)
    return caught.value


@pytest.mark.parametrize(
    ("server", "client", "kind", "words"),
    [
        (trusting(issue(THEIRS, SCHEDULER, NOW), OURS), ADMIN, WrongSwarm, "is of another swarm"),
        (issue(OURS, SCHEDULER, NOW - 2 * LIFE_S), ADMIN, ClocksDiffer, "has ended, as here it is 20"),
        (issue(OURS, SCHEDULER, NOW + TWO_HOURS), ADMIN, ClocksDiffer, "is not good yet, as here it is 20"),
        (issue(OURS, ADMIN, NOW), ADMIN, AnotherAnswers, "somebody else than was meant"),
        (None, ADMIN, NotAdmitted, "speaks no TLS"),
        (GOOD, None, SchedulerUnreachable, "closed the connection at once"),
    ],
    ids=["another authority", "ended", "not good yet", "another name", "plaintext server", "plaintext client"],
)
async def test_a_handshake_that_fails_says_why(
    server: Identity | None, client: Principal | None, kind: type[SwarmError], words: str
) -> None:
    """The text of a person who dialled a scheduler with a wrong clock began with "Tls handshake failed (TSI_"."""
    async with answering(server) as address:
        error = await failure(address, None if client is None else issue(OURS, client, NOW))
        found = translate(error, address)
    assert (type(found), found.code) == (SchedulerUnreachable, kind.code), "whoever dials may try again"
    assert words in found.message
    assert address in found.message
    assert found.hint
    assert type(translate(error, address, unavailable=PeerUnavailable)) is PeerUnavailable


@pytest.mark.parametrize("made_unix_s", [NOW - 2 * LIFE_S, NOW + TWO_HOURS], ids=["ended", "not good yet"])
async def test_a_certificate_that_ended_by_the_clock_of_the_other_side_shuts_the_door(made_unix_s: float) -> None:
    async with answering(GOOD) as address:
        found = translate(await failure(address, issue(OURS, ADMIN, made_unix_s)), address)
    assert found.message == f"what answers at {address} closed the connection at once"
    assert "its clock differs (here it is 20" in found.hint


@pytest.mark.parametrize(
    ("server", "client", "words"),
    [(GOOD, None, "only one of both sides has --insecure"), (None, issue(OURS, ADMIN, NOW), "add --insecure here too")],
    ids=["plaintext client", "plaintext server"],
)
async def test_where_only_one_side_speaks_plaintext_the_hint_names_the_flag(
    server: Identity | None, client: Identity | None, words: str
) -> None:
    """A stage server with --insecure was told that the scheduler did not answer."""
    async with answering(server) as address:
        found = translate(await failure(address, client), address)
    assert words in found.hint


async def test_whoever_just_does_not_answer_is_said_to_do_that() -> None:
    async with answering(GOOD) as address:
        pass
    found = translate(await failure(address, issue(OURS, ADMIN, NOW)), address)
    assert type(found) is SchedulerUnreachable
    assert "does not answer" in found.message


async def test_the_certificate_that_is_shown_tells_the_other_time() -> None:
    made_unix_s = NOW + TWO_HOURS
    server = issue(OURS, SCHEDULER, made_unix_s)
    found = ClocksDiffer("it is not good yet")
    assert with_times(found, "[::1]:7950", lambda where, timeout: server.certificate_pem.decode()) is found
    assert found.message.endswith(f"was made at {utc(made_unix_s)}")
    other = WrongSwarm("it is of another swarm")
    assert with_times(other, "127.0.0.1:1").message == "it is of another swarm"
    for answer in ("nonsense", ""):
        same = ClocksDiffer("it is not good yet")
        assert with_times(same, "h:1", lambda where, timeout, answer=answer: answer).message == "it is not good yet"  # type: ignore[misc]


async def test_a_person_is_told_both_times() -> None:
    server = issue(OURS, SCHEDULER, NOW + TWO_HOURS)
    async with answering(server) as address:
        with (
            Scheduler(address, 20.0, issue(OURS, ADMIN, NOW)) as scheduler,
            pytest.raises(ClocksDiffer, match=f"made at {utc(NOW + TWO_HOURS)}"),
        ):
            await asyncio.to_thread(scheduler.version)


def test_a_port_that_speaks_tls_and_no_grpc_is_named() -> None:
    found = explained("Cannot check peer: missing selected ALPN property.", "h:7949", NOW)
    assert found is not None
    assert "--join-listen" in found.hint


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote "
            "host: Connection refused",
            "connection refused",
        ),
        (
            "failed to connect to all addresses; last error: FAILED_PRECONDITION: ipv4:192.168.7.2:7951: connect "
            "failed: addr: ipv4:192.168.7.2:7951, error: connect: Network is unreachable (101)",
            "network is unreachable",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:1: recvmsg:No route to host (113)",
            "no route to host",
        ),
        ("errors resolving a.invalid:1: [field:hostname lookup error: Domain name not found]", "domain name not found"),
        ("recvmsg:Connection timed out (110)", "connection timed out"),
        ("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:2: ping timeout", "ping timeout"),
        ("ping timeout", "ping timeout"),
        ("Socket closed", "Socket closed"),
        ("", ""),
    ],
)
def test_a_connection_that_was_not_made_is_told_in_the_words_of_the_system(said: str, cause: str) -> None:
    """A log line of 330 characters named an address four times and "network is unreachable" once."""
    assert cause_of(said) == cause
    error = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), said)
    assert translate(error, "192.168.7.2:7951").message == (
        f"192.168.7.2:7951 does not answer: {cause or 'the connection broke'}"
    )
