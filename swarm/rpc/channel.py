"""The door to gRPC: channel and server options, and errors in both directions.

Everything that speaks gRPC opens its channels and servers here, so that limits and liveness are the same everywhere. An
error crosses a connection as a status code, its text as the status details, and two entries of trailing metadata:
`swarm-code` (the stable code of `swarm.errors`) and `swarm-hint-bin` (UTF-8). One table maps each way.

Decisions: docs/decisions/047, 053, 113.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

from swarm import errors
from swarm.errors import AnotherAnswers, ClocksDiffer, InvalidConfig, NotAdmitted, SwarmError, WrongSwarm
from swarm.limits import CONNECTIONS_TAKEN_MAX, HANDSHAKE_S_MAX, MESSAGE_ASIDE_BYTES, RPCS_MAX
from swarm.listening import bind_fault, cannot_listen, names_the_dialler
from swarm.pki import keys
from swarm.pki.authority import CLOCK_SLACK_S
from swarm.pki.identity import Identity, Wallet
from swarm.pki.names import Principal, Role, any_of
from swarm.process.startup import files_max
from swarm.rpc.fields import REQUEST_FIELDS_MAX, STREAMED_FIELDS_MAX, check_fields
from swarm.text import is_address, is_loopback, utc
from swarm.types import PeerId

Options = list[tuple[str, int | str]]
Service = TypeVar("Service")

MAX_MESSAGE_BYTES = (4 << 20) + (64 << 10)  # one chunk, or one route with its tokens, and the fields around it
MAX_METADATA_BYTES = 8 << 10
MAX_CONCURRENT_STREAMS = 64  # per connection
CONNECTION_S_MAX, CONNECTION_GRACE_S = 3600.0, 60.0  # of stage servers to each other
CONNECT_S_MAX = 3.0  # with handshakes: in one second a busy machine, or one across an ocean, may not be there
KEEPALIVE_INTERVAL_MS = 1000
KEEPALIVE_TIMEOUT_MS = 2000  # a busy two-core machine answers pings late, and with 1000 it would count as dead

PING_S_MAX = 60.0  # that a ping may wait behind bulk, where something else watches whether the other side lives


def ping_within(seconds: float) -> Options:
    """How long a ping may take to come back before the connection counts as dead."""
    limit_ms = round(1000 * seconds)
    return [("grpc.http2.ping_timeout_ms", limit_ms), ("grpc.keepalive_timeout_ms", limit_ms)]


def connect_within(seconds: float) -> Options:
    """How long a connection may take to stand, handshakes included."""
    return [("grpc.min_reconnect_backoff_ms", round(1000 * seconds))]  # no pause, in spite of its name


def through_proxy(address: str) -> Options:
    """Dial through the HTTP proxy at this address; empty: none."""
    return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", f"http://{address}")] if address else []


PATIENT = ping_within(PING_S_MAX)
# To the scheduler, beside the session: pings wait behind the bulk, whose progress swarm/rpc/window.py judges.
BULK: Options = ping_within(20.0)
# To and through a relay: windows that do not grow with the bandwidth, and pings that wait behind what is carried. Its
# ends judge the progress of that, and the scheduler tells when a relay is gone.
NARROW: Options = [("grpc.http2.bdp_probe", 0), *BULK]

_CODE_KEY = "swarm-code"
_CODE = re.compile(r"^E[0-9]{4}$")
_HINT_KEY = "swarm-hint-bin"  # "-bin": hints are UTF-8, plain metadata is ASCII
_TEXT_BYTES_MAX = 1 << 10  # of details or hint: both together stay well below MAX_METADATA_BYTES
LEAVES_S_MAX = 0.4  # of a message whose call is to end; longer if the caller does not read


def client_options() -> Options:
    return [
        *_common_options(),
        # Own connection per channel: a control stream must not queue behind another channel's tensors.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # no retries by gRPC: our protocol repeats what may be repeated
        ("grpc.initial_reconnect_backoff_ms", 100),
        *connect_within(CONNECT_S_MAX),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def server_options() -> Options:
    return [
        *_common_options(),
        ("grpc.so_reuseport", 0),  # a busy port is an error, not a shared port
        # Whoever dials and says nothing holds a file descriptor, and files must be opened meanwhile.
        ("grpc.max_allowed_incoming_connections", min(CONNECTIONS_TAKEN_MAX, files_max() // 2)),
        ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_S_MAX)),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        # Accept the pings that `client_options` sends; the default treats them as abuse and closes the connection.
        # Strikes are not counted: past their number, gRPC 1.85 spends a core on each connection that does not read.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_INTERVAL_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def check_address(address: str) -> str:
    """The address, if it is HOST:PORT; Refused otherwise.

    gRPC would take other text for one of its many targets: files (unix:), name servers (dns://), xds:.
    """
    if not is_address(address):
        raise errors.Refused(
            f"{address[:64]!r} is no address to dial", hint="an address is HOST:PORT, without a scheme"
        )
    return address


def connect(
    address: str, identity: Identity | None = None, server_name: str = "", more: Options | None = None
) -> grpc.aio.Channel:
    """A channel to `host:port`; dials on first use and fails fast while nothing listens there. Refused for anything
    else.

    With an identity both sides prove who they are, and the other one must be `server_name`. `more` options take the
    place of the options of all clients. A channel keeps its first certificate, and must not outlive it.
    """
    check_address(address)
    if identity is None:
        return grpc.aio.insecure_channel(address, options=_changed(client_options(), more))
    options = _changed(_expecting(server_name), more)
    return grpc.aio.secure_channel(address, _credentials(identity), options=options)


def connect_to_peer(address: str, peer: PeerId | None, wallet: Wallet, more: Options | None = None) -> grpc.aio.Channel:
    """A channel to a stage server; plaintext if both are on one machine, or if there is no identity.

    `peer` must answer there; None: any stage server of the swarm. PeerUnavailable, and nothing is dialled, if the
    address names this machine while the peer is on another one: what listens here would be shown the pass.
    """
    identity, host = wallet.identity, address.rpartition(":")[0]
    if identity is not None and not wallet.is_alone and names_the_dialler(host):
        raise errors.PeerUnavailable(
            f"{peer or 'a stage server'} says that it listens at {host}, which is another machine for each that dials",
            hint="start it with --listen or --announce HOST:PORT, at an address that the others reach",
        )
    if identity is None or is_loopback(host):
        return connect(address, more=more)
    role = Role.STAGE_SERVER
    return connect(
        address,
        identity,
        any_of(identity.cluster, role) if peer is None else Principal(identity.cluster, role, peer).dns,
        more,
    )


def connect_sync(address: str, identity: Identity | None = None, server_name: str = "") -> grpc.Channel:
    """`connect` for command-line tools: the channel blocks."""
    check_address(address)
    if identity is None:
        return grpc.insecure_channel(address, options=client_options())
    return grpc.secure_channel(address, _credentials(identity), options=_expecting(server_name))


def _credentials(identity: Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.certificate_pem)


def _expecting(server_name: str) -> Options:
    return [*client_options(), ("grpc.ssl_target_name_override", server_name)]


def _changed(options: Options, more: Options | None) -> Options:
    """gRPC takes the first of two values."""
    return list((dict(options) | dict(more or ())).items())


async def write(
    call: grpc.aio.StreamStreamCall[bytes, bytes] | grpc.aio.StreamUnaryCall[bytes, bytes], message: bytes
) -> None:
    """Write to a stream without hiding why it ended; asyncio.InvalidStateError once it has ended.

    A `call.write` that comes after the other side has ended the call replaces that side's error by "Internal error from
    Core", and so does an iterator of messages. So the message is handed to the layer below it.
    """
    if call.done():
        raise asyncio.InvalidStateError("the call has ended")
    await call.wait_for_connection()
    try:
        await cast(Any, call)._cython_call.send_serialized_message(message)
    except cygrpc.InternalError:
        raise asyncio.InvalidStateError("the call has ended") from None


async def reply_with(context: grpc.aio.ServicerContext[Any, Any], message: bytes | Message) -> None:
    """Write to a caller. If cancelled, give the message a moment to leave.

    gRPC sends no status while a message leaves, so the caller would wait in vain for the reason that its call ended.
    """
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing}, timeout=LEAVES_S_MAX)
        if not writing.done():
            writing.cancel()
        elif not writing.cancelled():
            writing.exception()  # looked at: the call ends anyway
        raise


def new_server(
    guard: grpc.aio.ServerInterceptor | None = None,
    connection_s_max: float | None = None,
    more: Options | None = None,
    meter: grpc.aio.ServerInterceptor | None = None,
) -> grpc.aio.Server:
    """A server whose calls pass `meter`, are parsed, and pass `guard`.

    A connection is broken after `connection_s_max` and CONNECTION_GRACE_S, so its caller proves itself again; what is
    under way on it by then is lost. `more` options take the place of the options of all servers.
    """
    options = _changed(server_options(), more)
    if connection_s_max is not None:
        options += [
            ("grpc.max_connection_age_ms", round(1000 * connection_s_max)),
            ("grpc.max_connection_age_grace_ms", round(1000 * CONNECTION_GRACE_S)),
        ]
    return grpc.aio.server(
        options=options,
        maximum_concurrent_rpcs=RPCS_MAX,
        interceptors=[step for step in (meter, _Parsing(), guard) if step is not None],
    )


def bind(server: grpc.aio.Server, address: str, wallet: Wallet | None = None) -> int:
    """Listen at `host:port` (port 0: any) and give the port; InvalidConfig if that cannot be.

    With a wallet, callers must prove who they are, and each handshake shows the certificate that it holds then.
    """
    try:
        port = (
            server.add_insecure_port(address)
            if wallet is None
            else server.add_secure_port(address, _server_credentials(wallet))
        )
    except RuntimeError:
        port = 0
    if port == 0:
        host, _, number = address.rpartition(":")
        raise cannot_listen(address, bind_fault(host, int(number)))
    return port


def _server_credentials(wallet: Wallet) -> grpc.ServerCredentials:
    shown: Identity | None = None

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Called before each handshake, on a thread of gRPC's; None: as before."""
        nonlocal shown
        identity = wallet.identity
        if identity is shown or identity is None:
            return None
        shown = identity
        pair = (identity.key_pem, identity.certificate_pem)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=identity.ca_pem)

    first = changed()
    assert first is not None, "a server needs an identity before it listens"
    fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], changed)  # None is allowed, which its type omits
    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)


def translate(
    error: grpc.RpcError, address: str, *, unavailable: type[errors.SwarmError] = errors.SchedulerUnreachable
) -> errors.SwarmError:
    """The SwarmError behind a failed call to `address`.

    If the other side named one of our errors, it has that class, with its text and hint. Otherwise the status code
    decides the class; a code that is not in `swarm.errors` (such as a newer version's) is kept, with text and
    hint. `unavailable` is the class for a peer that does not answer: SchedulerUnreachable or PeerUnavailable.
    """
    code, details, metadata = _facts(error)
    told, hint = _text(metadata.get(_CODE_KEY, "")), _text(metadata.get(_HINT_KEY, ""))
    if (named := errors.ERROR_BY_CODE.get(told)) is not None:
        return named(details, hint=hint)
    if _CODE.match(told):
        unknown = _class_of(code, unavailable)(details, hint=hint)
        unknown.code = told
        return unknown
    match code:
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            if (why := explained(details, address, time.time())) is not None:
                return _as(unavailable, why)
            return unavailable(f"{address} does not answer: {cause_of(details) or 'the connection broke'}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlinePassed(f"{address} did not answer in time")
        case grpc.StatusCode.UNIMPLEMENTED:
            return errors.IncompatibleVersion(
                f"{address} does not know this call: {details}",
                hint="check which program listens there; if it is the right one, both need the same version of swarm",
            )
    return _class_of(code, unavailable)(f"{address} failed: {details or code.name}")


def _as(kind: type[errors.SwarmError], error: errors.SwarmError) -> errors.SwarmError:
    """The error in a class that tells the caller to dial again, elsewhere or later."""
    found = kind(error.message, hint=error.hint)
    found.code = error.code if error.code != errors.SwarmError.code else found.code
    return found


def _class_of(code: grpc.StatusCode, unavailable: type[errors.SwarmError]) -> type[errors.SwarmError]:
    return unavailable if code is grpc.StatusCode.UNAVAILABLE else _ERROR_BY_STATUS.get(code, errors.SwarmError)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.SwarmError) -> NoReturn:
    """End the call with `error`: status code, text, `swarm-code` and `swarm-hint-bin`."""
    metadata: list[tuple[str, str | bytes]] = [(_CODE_KEY, error.code)]
    if error.hint:
        metadata.append((_HINT_KEY, _shorten(error.hint).encode(errors="replace")))
    await context.abort(status_of(error), _shorten(error.message), tuple(metadata))
    raise AssertionError("abort returned")


def told(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, str]:
    """(code, text) of the error by which `abort` ended the call."""
    metadata = dict(context.trailing_metadata() or ())
    return _text(metadata.get(_CODE_KEY, "")) or context.code().name, context.details()


def status_of(error: errors.SwarmError) -> grpc.StatusCode:
    """The status code of an error's class, or of its nearest base that has one."""
    return next(_STATUS_BY_ERROR[base] for base in type(error).__mro__ if base in _STATUS_BY_ERROR)


@asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Wrap a servicer's method body: an exception becomes a status, and no traceback leaves the process.

    A SwarmError (also the first in an exception group) is sent to the caller. Anything else is our own fault: it is
    logged with its traceback and answered as INTERNAL, without details. A caller that is gone is no fault.
    """
    try:
        try:
            yield
        except (grpc.aio.AbortError, grpc.aio.InternalError):
            raise
        except Exception as error:
            if all(map(_is_over, errors.leaves(error))):
                _log().debug("this server stops, or the caller left", error=repr(error))
            else:
                await abort(context, public_error(error))
    except grpc.aio.InternalError as error:  # what gRPC raises when it cannot write
        _log().debug("the caller left, or does not read", error=repr(error))


def within(behaviour: Any, around: Callable[..., AbstractAsyncContextManager[Any]]) -> Any:
    """The method of a service, answered within `around`: both take the request and the context, perhaps behind a self.

    What `around` gives is the request that the method sees.
    """

    async def answer(*call: Any) -> Any:
        async with around(*call) as request:
            return await behaviour(*call[:-2], request, call[-1])

    async def stream(*call: Any) -> AsyncIterator[Any]:
        async with around(*call) as request, aclosing(behaviour(*call[:-2], request, call[-1])) as replies:
            async for reply in replies:
                yield reply

    return stream if inspect.isasyncgenfunction(behaviour) else answer


def answers(service: type[Service]) -> type[Service]:
    """The service, of which each method answers an error as `answering` does."""

    @asynccontextmanager
    async def around(_: object, request: Any, context: Any) -> AsyncIterator[Any]:
        async with answering(context):
            yield request

    for name, method in list(vars(service).items()):
        if name[0].isupper():  # as gRPC's methods are named
            setattr(service, name, within(method, around))
    return service


def _is_over(error: BaseException) -> bool:
    """Whether gRPC says that there is no call any more: it was answered, its caller left, or this server stops."""
    return isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError)


def public_error(error: Exception) -> errors.SwarmError:
    """The error that a peer may see: a SwarmError as it is, else a plain one; its traceback is logged."""
    found = next((leaf for leaf in errors.leaves(error) if isinstance(leaf, errors.SwarmError)), None)
    if found is not None:
        return found
    _log().error("call failed", error=repr(error), exc_info=error)
    return errors.SwarmError("internal error", hint="see the log of the process that answered")


def _log() -> Any:
    import structlog  # noqa: PLC0415  # slow to import, and no completion in a shell waits for it

    return structlog.get_logger(__name__)


_STATUS_BY_ERROR: dict[type[errors.SwarmError], grpc.StatusCode] = {
    errors.SwarmError: grpc.StatusCode.INTERNAL,
    errors.UsageError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidConfig: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SchedulerUnreachable: grpc.StatusCode.UNAVAILABLE,
    errors.NotAdmitted: grpc.StatusCode.UNAUTHENTICATED,
    errors.RoleForbids: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotOwner: grpc.StatusCode.PERMISSION_DENIED,
    errors.IncompatibleVersion: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotAllowed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.JobFailed: grpc.StatusCode.ABORTED,
    errors.RetryElsewhere: grpc.StatusCode.UNAVAILABLE,
    errors.Refused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CorruptFrame: grpc.StatusCode.DATA_LOSS,
    errors.ReplicaDiverged: grpc.StatusCode.ABORTED,
    errors.GradientRange: grpc.StatusCode.OUT_OF_RANGE,
}

# Statuses without a `swarm-code`: from gRPC itself or from a foreign server. UNAVAILABLE, CANCELLED, DEADLINE_EXCEEDED
# and UNIMPLEMENTED carry more than a class: see `translate`.
_ERROR_BY_STATUS: dict[grpc.StatusCode, type[errors.SwarmError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.Refused,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Refused,
    grpc.StatusCode.OUT_OF_RANGE: errors.Refused,
    grpc.StatusCode.ALREADY_EXISTS: errors.Refused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Refused,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.PERMISSION_DENIED: errors.RoleForbids,
    grpc.StatusCode.UNAUTHENTICATED: errors.NotAdmitted,
    grpc.StatusCode.DATA_LOSS: errors.CorruptFrame,
}


def _common_options() -> Options:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        # All five are needed: without the last two a frozen (not dead) peer stays unseen for more than 40 s.
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Fewer, larger reads and HTTP/2 frames: about a fifth faster for tensors of 1 MiB.
        ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
        ("grpc.experimental.tcp_min_read_chunk_size", 256 << 10),
        ("grpc.experimental.tcp_max_read_chunk_size", 8 << 20),
        ("grpc.http2.max_frame_size", 1 << 20),
    ]


def _facts(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, dict[str, str | bytes]]:
    """Status, details and trailing metadata of a blocking or an asyncio call's error."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return grpc.StatusCode.UNKNOWN, str(error), {}
    pairs: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    return error.code(), error.details() or "", dict(tuple(pairs))


def _shorten(text: str) -> str:
    raw = text.encode(errors="replace")  # gRPC writes each byte that is not ASCII as three
    return text if len(raw) <= _TEXT_BYTES_MAX else raw[: _TEXT_BYTES_MAX - 3].decode(errors="ignore") + "…"


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


# Requests that are no message ----------------------------------------------------------------------------------------


class Interceptor(grpc.aio.ServerInterceptor, ABC):
    """Gives each method of each service another behaviour."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        sides = (handler.request_streaming, handler.response_streaming)
        name = "_".join("stream" if is_streaming else "unary" for is_streaming in sides)
        behaviour, deserialize = self.behaviour(handler, getattr(handler, name), handler_call_details.method)
        make: Callable[..., grpc.RpcMethodHandler[Any, Any]] = getattr(grpc, f"{name}_rpc_method_handler")
        return make(behaviour, deserialize, handler.response_serializer)

    @abstractmethod
    def behaviour(self, handler: Any, behaviour: Any, method: str) -> tuple[Any, Any]:
        """What answers calls of the method in place of `behaviour`, and what makes a request of bytes."""


class _Parsing(Interceptor):
    """Parses requests; CorruptFrame for one that is no message, or has more fields than any of ours.

    A long one is parsed on a thread, once its fields are counted: what follows in the call, the guard too, sees
    messages only.
    """

    def behaviour(self, handler: Any, behaviour: Any, method: str) -> tuple[Any, Any]:
        deserialize = handler.request_deserializer
        if deserialize is None:
            return behaviour, None
        kind = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)  # of FromString

        def parse(content: bytes, fields_max: int) -> Any:
            try:
                if kind is not None:
                    check_fields(content, kind, fields_max)
                return deserialize(content)
            except (DecodeError, errors.CorruptFrame) as error:
                what = error.message if isinstance(error, errors.CorruptFrame) else "they cannot be parsed"
                raise errors.CorruptFrame(f"these bytes are no request of {method}: {what}") from None

        async def messages(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for content in requests:
                yield parse(content, STREAMED_FIELDS_MAX)

        async def parsed(request: Any) -> Any:
            if handler.request_streaming:
                return messages(request)
            if len(request) < MESSAGE_ASIDE_BYTES:
                return parse(request, REQUEST_FIELDS_MAX)
            return await asyncio.to_thread(parse, request, REQUEST_FIELDS_MAX)

        @asynccontextmanager
        async def parsing(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                yield await parsed(request)
            except errors.CorruptFrame as error:
                await abort(context, error)

        return within(behaviour, parsing), None


LOOK_S_MAX = 3.0
Error = TypeVar("Error", bound=SwarmError)

# (what gRPC says, the error, its message after the address, its hint)
_Row = tuple[str, type[SwarmError], str, str]
_TABLE: tuple[_Row, ...] = (
    (
        "certificate is not yet valid",
        ClocksDiffer,
        "shows a certificate that is not good yet, as here it is {now}",
        "set the clock of this machine, or of that one",
    ),
    (
        "certificate has expired",
        ClocksDiffer,
        "shows a certificate that has ended, as here it is {now}",
        "set the clock that is wrong; if both are right, restart what runs there",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        WrongSwarm,
        "is of another swarm",
        "the address is wrong, somebody stands in between, or its scheduler was set up anew: then join again",
    ),
    (
        "Hostname Verification",
        AnotherAnswers,
        "is of this swarm, and somebody else than was meant",
        "the address is wrong, or was given to another process since: check --announce",
    ),
    (
        "WRONG_VERSION_NUMBER",
        NotAdmitted,
        "speaks no TLS",
        "if it was started with --insecure, add --insecure here too; else it is none of ours",
    ),
    (
        "ALPN",
        NotAdmitted,
        "speaks TLS, but not gRPC",
        "is it the address of --join-listen, or of the metrics? Name the one of --listen",
    ),
)
_CLOSED = "Socket closed"
_CAUSES = (  # of the operating system; what a peer or gRPC says itself stays as it is
    "Connection refused",
    "Connection reset by peer",
    "Connection timed out",
    "Broken pipe",
    "Network is unreachable",
    "Network is down",
    "No route to host",
    "Host is down",
    "Host is unreachable",
    "Permission denied",
    "Cannot assign requested address",
    "Address family not supported by protocol",
    "Too many open files",
    "Domain name not found",
)


def explained(details: str, address: str, now_unix_s: float) -> SwarmError | None:
    """The error behind gRPC's text about a connection that was never made; None if there was just no answer.

    gRPC has one status for all such failures (UNAVAILABLE), and quotes TLS in its text. It tells neither the name of
    the answering machine nor its clock: the certificate shown at the address does (`with_times`).
    """
    for said, kind, message, hint in _TABLE:
        if said in details:
            return kind(f"what answers at {address} {message.format(now=utc(now_unix_s))}", hint=hint)
    if "failed to connect" in details and _CLOSED in details:
        return SwarmError(
            f"what answers at {address} closed the connection at once",
            hint=f"it does not take this certificate: its clock differs (here it is {utc(now_unix_s)}), or it was set "
            "up anew; or only one of both sides has --insecure",
        )
    return None


def cause_of(details: str) -> str:
    """What went wrong according to gRPC's text about a connection, which repeats addresses and names its own parts.

    The operating system's words if it has some, else what follows the last address; whole if it has neither.
    """
    said = [(details.rfind(cause), cause) for cause in _CAUSES if cause in details]
    if said:
        return max(said)[1][0].lower() + max(said)[1][1:]
    return re.sub(r"^.*\bip(?:v4|v6):\S+:\d+: +", "", details, flags=re.DOTALL).strip() or details


def with_times(error: Error, address: str, look: Callable[..., str] = ssl.get_server_certificate) -> Error:
    """The same error; if clocks differ, with the time in the certificate shown at the address. It blocks."""
    if error.code == ClocksDiffer.code:
        host, _, port = address.rpartition(":")
        try:
            shown = keys.read_certificate(look((host.strip("[]"), int(port)), timeout=LOOK_S_MAX).encode())
        except (OSError, ValueError, InvalidConfig):
            return error
        made_unix_s = keys.begins(shown).timestamp() + CLOCK_SLACK_S
        error.message += f", and by the clock of who signs it was made at {utc(made_unix_s)}"
        error.args = (error.message,)
    return error
