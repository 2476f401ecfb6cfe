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
    InvalidConfig,
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
    bind,
    cause_of,
    check_address,
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
from tests.support.members import LOOPBACK, identity_of
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

    server = new_server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(call)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    async with serving_at(server) as address:
        yield address


async def failure(address: str, request: bytes = b"", **options: float) -> grpc.RpcError:
    """The error of a call that must fail."""
    async with connect(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary(METHOD)(request, **options)
    return caught.value


@pytest.mark.parametrize("code", ERROR_BY_CODE)
async def test_every_error_crosses_a_connection_as_itself(code: str) -> None:
    async def body(request: bytes) -> bytes:
        raise ERROR_BY_CODE[code]("größer als erlaubt", hint="nimm 3 statt 4 – oder warte")

    async with serving(body) as address:
        error = translate(await failure(address), address)
    assert type(error) is ERROR_BY_CODE[code]
    assert (error.message, error.hint) == ("größer als erlaubt", "nimm 3 statt 4 – oder warte")


async def test_an_error_of_a_class_that_the_caller_does_not_know_keeps_code_text_and_hint() -> None:
    class Strange(SwarmError):
        code = "E9876"

    async def body(request: bytes) -> bytes:
        raise Strange("the cellar is full", hint="open a window")

    async with serving(body) as address:
        error = translate(await failure(address), address)
    assert (error.code, error.message, error.hint) == ("E9876", "the cellar is full", "open a window")
    assert SwarmError("x").code == "E0000"


async def test_a_blocking_client_sees_the_same() -> None:
    async def body(request: bytes) -> bytes:
        raise NotFound("no job j", hint="swarm list")

    async with serving(body) as address:

        def call() -> SwarmError:
            with connect_sync(address) as channel:
                try:
                    channel.unary_unary(METHOD)(b"", timeout=60)
                except grpc.RpcError as error:
                    return translate(error, address)
            raise AssertionError("the call did not fail")

        error = await asyncio.to_thread(call)
    assert type(error) is NotFound
    assert (error.message, error.hint) == ("no job j", "swarm list")


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


async def test_an_error_from_within_a_task_group_is_found() -> None:
    async def body(request: bytes) -> bytes:
        async def fail() -> None:
            raise StaleMessage("old epoch")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            tasks.create_task(asyncio.sleep(10))
        raise AssertionError

    async with serving(body) as address:
        assert type(translate(await failure(address), address)) is StaleMessage


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

    server = new_server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(call)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    error = translate(await failure(address), address)
    await server.stop(None)
    assert type(error) is CorruptFrame
    assert "newer than us" in error.message


async def test_a_busy_port_is_a_configuration_error() -> None:
    first, second = new_server(), new_server()
    port = bind(first, "127.0.0.1:0")
    with pytest.raises(InvalidConfig, match=f"127.0.0.1:{port}"):
        bind(second, f"127.0.0.1:{port}")
    await first.stop(None)
    await second.stop(None)


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


@pytest.mark.parametrize("address", ["unix:/run/x", "unix:80", "dns://192.0.2.1/h:80", "xds:h:80", "h", ""])
def test_what_is_no_host_and_port_is_no_address(address: str) -> None:
    with pytest.raises(Refused, match="is no address to dial"):
        check_address(address)
    assert check_address("gpu-1:7951") == "gpu-1:7951"


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

    server = new_server()
    handlers = {"Call": grpc.stream_stream_rpc_method_handler(call)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    with capture_logs() as said:
        async with connect(address) as channel:
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

    server = new_server()
    method = grpc.stream_stream_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("S", {"M": method}),))
    link = connect(f"127.0.0.1:{bind(server, '127.0.0.1:0')}")
    await server.start()
    ends = []
    for _ in range(200):
        call: Any = link.stream_stream("/S/M")()
        saying = asyncio.create_task(say(call))
        try:
            async for _ in call:
                pass
        except grpc.RpcError as error:
            ends.append(type(translate(error, "there")))
        await saying
    await link.close()
    await server.stop(None)
    assert ends == [StaleMessage] * 200


NO_MESSAGE = b"\x0a\xff\xff\xff\xff\x0f"


@asynccontextmanager
async def taking_messages(*, streams: bool = False) -> AsyncIterator[str]:
    """A server whose method takes one protobuf message, or a stream of them; gives its address."""

    async def answer(request: pb.VersionRequest, context: Any) -> pb.VersionReply:
        return pb.VersionReply()

    async def answer_all(requests: AsyncIterator[pb.VersionRequest], context: Any) -> pb.VersionReply:
        return pb.VersionReply(product=str(len([one async for one in requests])))

    kind, behaviour = ("stream_unary", answer_all) if streams else ("unary_unary", answer)
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    handler = make(behaviour, pb.VersionRequest.FromString, pb.VersionReply.SerializeToString)
    server = new_server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Call": handler}),))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_bytes_that_are_no_message_get_a_typed_error() -> None:
    async with taking_messages() as address, connect(address) as channel:
        call = channel.unary_unary(METHOD)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(NO_MESSAGE, timeout=60)
        assert isinstance(translate(caught.value, address), CorruptFrame)
        await call(b"", timeout=60)


async def test_a_flood_of_streams_of_no_message_is_told_to_its_caller_and_not_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with taking_messages(streams=True) as address, connect(address) as channel:
        for _ in range(50):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.stream_unary(METHOD)(iter([NO_MESSAGE]), timeout=60)
            assert type(translate(caught.value, address)) is CorruptFrame
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
GOOD = issue(OURS, SCHEDULER, NOW)
TWO_HOURS = 7200.0


def trusting(identity: Identity, authority: Authority) -> Identity:
    return Identity(identity.key_pem, identity.certificate_pem, authority.pem)


@asynccontextmanager
async def tls_server(identity: Identity | None) -> AsyncIterator[str]:
    server = new_server()
    address = f"127.0.0.1:{bind(server, LOOPBACK, None if identity is None else Wallet(identity))}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def handshake_failure(address: str, identity: Identity | None) -> grpc.RpcError:
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
    async with tls_server(server) as address:
        error = await handshake_failure(address, None if client is None else issue(OURS, client, NOW))
        found = translate(error, address)
    assert (type(found), found.code) == (SchedulerUnreachable, kind.code), "whoever dials may try again"
    assert words in found.message
    assert address in found.message
    assert found.hint
    assert type(translate(error, address, unavailable=PeerUnavailable)) is PeerUnavailable


@pytest.mark.parametrize("made_unix_s", [NOW - 2 * LIFE_S, NOW + TWO_HOURS], ids=["ended", "not good yet"])
async def test_a_certificate_that_ended_by_the_clock_of_the_other_side_shuts_the_door(made_unix_s: float) -> None:
    async with tls_server(GOOD) as address:
        found = translate(await handshake_failure(address, issue(OURS, ADMIN, made_unix_s)), address)
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
    async with tls_server(server) as address:
        found = translate(await handshake_failure(address, client), address)
    assert words in found.hint


async def test_whoever_just_does_not_answer_is_said_to_do_that() -> None:
    async with tls_server(GOOD) as address:
        pass
    found = translate(await handshake_failure(address, issue(OURS, ADMIN, NOW)), address)
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
    async with tls_server(server) as address:
        with (
            Scheduler(address, 20.0, issue(OURS, ADMIN, NOW)) as scheduler,
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
