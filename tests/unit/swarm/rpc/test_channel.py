"""Errors keep their class, text and hint across a connection; limits and liveness are set on both sides."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc.aio import AioRpcError, Metadata
from structlog.testing import capture_logs

from client.connection import Scheduler
from swarm.errors import (
    ERROR_BY_CODE,
    AnotherAnswers,
    ClocksDiffer,
    CorruptFrame,
    DeadlinePassed,
    IncompatibleVersion,
    NotAdmitted,
    NotFound,
    PeerUnavailable,
    Refused,
    SchedulerUnreachable,
    StaleMessage,
    SwarmError,
    WrongSwarm,
)
from swarm.pki.authority import LIFE_S, Authority
from swarm.pki.identity import Identity, Wallet, issue
from swarm.pki.names import Principal, Role, scheduler_of
from swarm.rpc import channel as module
from swarm.rpc.channel import (
    MAX_MESSAGE_BYTES,
    abort,
    answering,
    cause_of,
    client_options,
    connect,
    connect_sync,
    connect_to_peer,
    explained,
    new_server,
    server_options,
    status_of,
    translate,
    with_times,
    write,
)
from swarm.text import utc
from swarm.types import PeerId
from swarm.wire import jobs_pb2 as pb
from tests.support.members import identity_of
from tests.support.serving import server_of
from tests.support.serving import serving as serving_at

Body = Callable[[bytes], Awaitable[bytes]]
METHOD = "/test.Service/Call"


@asynccontextmanager
async def serving(body: Body) -> AsyncIterator[str]:
    """A server whose only method runs `body` within `answering`; gives its address."""

    async def call(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        async with answering(context):
            return await body(request)
        raise AssertionError

    async with serving_at(server_of(Call=grpc.unary_unary_rpc_method_handler(call))) as address:
        yield address


async def failure(address: str, request: bytes = b"", **options: float) -> grpc.RpcError:
    """The error of a call that must fail."""
    async with connect(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary(METHOD)(request, **options)
    return caught.value


class Strange(SwarmError):
    code = "E9876"


async def test_every_error_crosses_a_connection_as_itself_and_one_of_a_newer_version_with_its_code() -> None:
    text, hint = "größer als erlaubt", "nimm 3 statt 4 – oder warte"

    async def body(request: bytes) -> bytes:
        async def fail() -> None:
            raise ERROR_BY_CODE.get(request.decode(), Strange)(text, hint=hint)

        if request:
            await fail()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            tasks.create_task(asyncio.sleep(10))
        raise AssertionError

    async with serving(body) as address:
        for code in ("", Strange.code, *ERROR_BY_CODE):
            error = translate(await failure(address, code.encode()), address)
            assert (error.code, error.message, error.hint) == (code or Strange.code, text, hint)
            assert type(error) is ERROR_BY_CODE.get(code, SwarmError)

        def call() -> SwarmError:
            with connect_sync(address) as channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(METHOD)(NotFound.code.encode(), timeout=60)
            return translate(caught.value, address)

        blocking = await asyncio.to_thread(call)
    assert (type(blocking), blocking.message, blocking.hint) == (NotFound, text, hint)
    assert SwarmError("x").code == "E0000"


async def test_very_long_texts_are_cut_so_that_the_error_still_arrives() -> None:
    async def body(request: bytes) -> bytes:
        raise Refused("ü" * 100_000, hint="ö" * 100_000)

    async with serving(body) as address:
        error = translate(await failure(address), address)
    assert type(error) is Refused
    assert error.message.startswith("üüü")
    assert error.hint.endswith("…")


async def test_a_fault_of_ours_leaves_no_trace_on_the_wire(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(request: bytes) -> bytes:
        raise ZeroDivisionError("secret")

    async with serving(body) as address:
        error = await failure(address)
    assert "secret" not in repr(error)
    assert type(translate(error, address)) is SwarmError
    assert "secret" in capsys.readouterr().out


async def test_nobody_listening_is_the_callers_kind_of_unavailable() -> None:
    error = await failure("127.0.0.1:1")
    assert type(translate(error, "127.0.0.1:1")) is SchedulerUnreachable
    unavailable = translate(error, "127.0.0.1:1", unavailable=PeerUnavailable)
    assert type(unavailable) is PeerUnavailable
    assert "127.0.0.1:1" in unavailable.message


async def test_a_deadline_and_an_unknown_method_have_their_own_errors() -> None:
    async def body(request: bytes) -> bytes:
        await asyncio.sleep(30)
        return b""

    async with serving(body) as address:
        assert type(translate(await failure(address, timeout=0.05), address)) is DeadlinePassed
        async with connect(address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await channel.unary_unary("/test.Service/Other")(b"")
        assert type(translate(caught.value, address)) is IncompatibleVersion


async def test_a_message_over_the_limit_is_refused_and_the_largest_allowed_passes() -> None:
    async def body(request: bytes) -> bytes:
        return request

    async with serving(body) as address:
        async with connect(address) as channel:
            content = bytes(MAX_MESSAGE_BYTES)
            assert await channel.unary_unary(METHOD)(content) == content
        assert type(translate(await failure(address, bytes(MAX_MESSAGE_BYTES + 1)), address)) is Refused


async def test_an_error_code_that_we_do_not_know_falls_back_to_the_status() -> None:
    async def call(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        metadata = (("swarm-code", "E9999"), ("swarm-hint-bin", b"\xff\xfe"))
        await context.abort(grpc.StatusCode.DATA_LOSS, "newer than us", metadata)
        raise AssertionError

    async with serving_at(server_of(Call=grpc.unary_unary_rpc_method_handler(call))) as address:
        error = translate(await failure(address), address)
    assert type(error) is CorruptFrame
    assert "newer than us" in error.message


def test_both_sides_notice_a_frozen_peer() -> None:
    needed = {
        "grpc.keepalive_time_ms",
        "grpc.keepalive_timeout_ms",
        "grpc.keepalive_permit_without_calls",
        "grpc.http2.max_pings_without_data",
        "grpc.http2.ping_timeout_ms",
    }
    client, server = dict(client_options()), dict(server_options())
    assert needed <= client.keys()
    assert needed <= server.keys()
    # A server that allows fewer pings than its clients send would close their connections as abusive.
    assert int(server["grpc.http2.min_recv_ping_interval_without_data_ms"]) <= int(client["grpc.keepalive_time_ms"])
    assert server["grpc.http2.max_ping_strikes"] == 0


def test_every_error_class_has_a_status() -> None:
    for error in ERROR_BY_CODE.values():
        assert status_of(error("x")) not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)


def test_pings_through_a_relay_may_wait_behind_tensors() -> None:
    """At 10 Mbit/s a tensor of 16 MiB broke its link after 2 s: gRPC takes the first of two values of an option."""
    options = module._changed(module.server_options(), module.PATIENT)
    assert [value for name, value in options if name == "grpc.http2.ping_timeout_ms"] == [60_000]
    assert dict(options) == dict(module.server_options()) | dict(module.PATIENT)
    assert module._changed(module.client_options(), None) == module.client_options()


async def test_a_server_that_stops_while_it_is_read_from_logs_no_traceback() -> None:
    """Ctrl-C of a swarm at work left tracebacks in the logs of stage servers: they read tensors just then."""
    reads = asyncio.Event()

    async def call(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        async with answering(context), asyncio.TaskGroup():
            reads.set()
            async for _ in requests:
                pass
        yield b""

    async def requests() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    server = server_of(Call=grpc.stream_stream_rpc_method_handler(call))
    with capture_logs() as said:
        async with serving_at(server) as address, connect(address) as channel:
            answers = channel.stream_stream(METHOD)(requests())
            reading = asyncio.create_task(answers.read())
            async with asyncio.timeout(60):
                await reads.wait()
            await server.stop(None)
            await asyncio.gather(reading, return_exceptions=True)
            await asyncio.sleep(0.1)
    assert [line for line in said if line["log_level"] == "error"] == []
    with capture_logs() as said:
        async with answering(None):  # type: ignore[arg-type]
            raise ExceptionGroup("of a TaskGroup", [cygrpc._ServerStoppedError("Server already stopped.")])
    assert [line["log_level"] for line in said] == ["debug"]


async def test_who_writes_too_late_still_learns_why_the_call_was_ended() -> None:
    """`call.write` forgot it in one of four such calls, and a stage server did not know that it was superseded."""

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"welcome"
        await abort(context, StaleMessage("a newer one is here"))

    async def say(call: Any) -> None:
        with suppress(asyncio.InvalidStateError, grpc.RpcError):
            while True:
                await write(call, b"event")
                await asyncio.sleep(0)

    ends = []
    server = server_of(Call=grpc.stream_stream_rpc_method_handler(refuse))
    async with serving_at(server) as address, connect(address) as link:
        for _ in range(200):
            call: Any = link.stream_stream(METHOD)()
            saying = asyncio.create_task(say(call))
            with pytest.raises(grpc.RpcError) as caught:
                async for _ in call:
                    pass
            ends.append(type(translate(caught.value, "there")))
            await saying
    assert ends == [StaleMessage] * 200


NO_MESSAGE = b"\x0a\xff\xff\xff\xff\x0f"


async def test_bytes_that_are_no_message_are_told_to_their_caller_and_not_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def answer(request: pb.VersionRequest, context: Any) -> pb.VersionReply:
        return pb.VersionReply()

    async def answer_all(requests: AsyncIterator[pb.VersionRequest], context: Any) -> pb.VersionReply:
        return pb.VersionReply(product=str(len([request async for request in requests])))

    ways = (pb.VersionRequest.FromString, pb.VersionReply.SerializeToString)
    call: Any = grpc.unary_unary_rpc_method_handler(answer, *ways)
    stream: Any = grpc.stream_unary_rpc_method_handler(answer_all, *ways)
    async with serving_at(server_of(Call=call, Stream=stream)) as address, connect(address) as channel:
        for sending in (
            lambda: channel.unary_unary(METHOD)(NO_MESSAGE, timeout=60),
            *[lambda: channel.stream_unary("/test.Service/Stream")(iter([NO_MESSAGE]), timeout=60)] * 50,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sending()
            assert type(translate(caught.value, address)) is CorruptFrame
        await channel.unary_unary(METHOD)(b"", timeout=60)
    assert [record for record in caplog.records if "Call" in record.getMessage()] == []


@pytest.mark.parametrize("address", ["127.0.0.1:7951", "[::1]:7951", "localhost:7951", "0.0.0.0:7951", "127.1:7951"])
async def test_who_is_reached_from_elsewhere_dials_no_stage_server_at_its_own_loopback(address: str) -> None:
    """One on another machine said that it listens at 127.0.0.1: its neighbours showed their passes, in plaintext, to
    whatever listened there on their own machines."""
    wallet = Wallet(identity_of(Authority.new(time.time()), Role.STAGE_SERVER, "a"))
    wallet.is_alone = False
    with pytest.raises(PeerUnavailable, match="another machine for each that dials") as told:
        connect_to_peer(address, PeerId("b"), wallet)
    assert "--announce" in told.value.hint
    await connect_to_peer("10.0.0.5:7951", PeerId("b"), wallet).close()
    wallet.is_alone = True
    await connect_to_peer(address, PeerId("b"), wallet).close()


NOW = time.time()
OURS, THEIRS = Authority.new(NOW - 9 * LIFE_S), Authority.new(NOW)
SCHEDULER, ADMIN = scheduler_of(OURS.cluster), Principal(OURS.cluster, Role.ADMIN, "me")
GOOD, ME = issue(OURS, SCHEDULER, NOW), issue(OURS, ADMIN, NOW)
TWO_HOURS = 7200.0


def trusting(identity: Identity, authority: Authority) -> Identity:
    return Identity(identity.key_pem, identity.certificate_pem, authority.pem)


CLOSED = "closed the connection at once"


@pytest.mark.parametrize(
    ("server", "client", "kind", "words", "hint"),
    [
        (trusting(issue(THEIRS, SCHEDULER, NOW), OURS), ME, WrongSwarm, "is of another swarm", ""),
        (issue(OURS, SCHEDULER, NOW - 2 * LIFE_S), ME, ClocksDiffer, "has ended, as here it is 20", ""),
        (issue(OURS, SCHEDULER, NOW + TWO_HOURS), ME, ClocksDiffer, "is not good yet, as here it is 20", ""),
        (issue(OURS, ADMIN, NOW), ME, AnotherAnswers, "somebody else than was meant", ""),
        (None, ME, NotAdmitted, "speaks no TLS", "add --insecure here too"),
        (GOOD, None, SchedulerUnreachable, CLOSED, "only one of both sides has --insecure"),
        (GOOD, issue(OURS, ADMIN, NOW - 2 * LIFE_S), SchedulerUnreachable, CLOSED, "its clock differs (here it is 20"),
        (GOOD, issue(OURS, ADMIN, NOW + TWO_HOURS), SchedulerUnreachable, CLOSED, "its clock differs (here it is 20"),
    ],
    ids=[
        *("another authority", "ended", "not good yet", "another name", "plaintext server", "plaintext client"),
        *("the client's has ended", "the client's is not good yet"),
    ],
)
async def test_a_handshake_that_fails_says_why_and_what_to_do(
    server: Identity | None, client: Identity | None, kind: type[SwarmError], words: str, hint: str
) -> None:
    """The text of a person who dialled a scheduler with a wrong clock began with "Tls handshake failed (TSI_"."""
    async with serving_at(new_server(), None if server is None else Wallet(server)) as address:
        error = await handshake_failure(address, client)
        found = translate(error, address)
    assert (type(found), found.code) == (SchedulerUnreachable, kind.code), "whoever dials may try again"
    assert words in found.message
    assert address in found.message
    assert found.hint
    assert hint in found.hint
    assert type(translate(error, address, unavailable=PeerUnavailable)) is PeerUnavailable


async def handshake_failure(address: str, identity: Identity | None) -> grpc.RpcError:
    async with connect(address, identity, SCHEDULER.dns) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary("/x.Y/Z")(b"", timeout=20)
    return caught.value


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
    async with serving_at(new_server(), Wallet(server)) as address:
        with (
            Scheduler(address, 20.0, ME) as scheduler,
            pytest.raises(ClocksDiffer, match=f"made at {utc(NOW + TWO_HOURS)}"),
        ):
            await asyncio.to_thread(scheduler.check_protocol)


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
