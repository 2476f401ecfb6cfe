"""No call reaches a service before it is known whose it is, and that he may."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from swarm.errors import NotAdmitted, NotFound, Revoked, RoleForbids, SchedulerUnreachable, SwarmError
from swarm.pki import keys
from swarm.pki.authority import Authority
from swarm.pki.identity import Identity, Wallet
from swarm.pki.names import Principal, Role, any_of, scheduler_of
from swarm.rpc.channel import abort, answering, connect, translate, write
from swarm.rpc.guard import CALLER, Caller, Guard, May, Meter, Witness
from tests.support.members import fingerprint_of, identity_of
from tests.support.serving import server_of
from tests.support.serving import serving as serving_at

OURS, THEIRS = Authority.new(time.time()), Authority.new(time.time())
SCHEDULER = identity_of(OURS, Role.SCHEDULER, "scheduler")
NAME = scheduler_of(OURS.cluster).dns
ADMIN = identity_of(OURS, Role.ADMIN, "me")
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream", "writes", "writes_to_stream")


class Service:
    """One method of each kind; keeps who reached them."""

    def __init__(self) -> None:
        self.reached: list[Caller | None] = []

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        self.reached.append(CALLER.get())
        return b"1"

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.reached.append(CALLER.get())
        yield b"1"

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        self.reached.append(CALLER.get())
        return b"".join([request async for request in requests])

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.reached.append(CALLER.get())
        async for request in requests:
            yield request

    async def writes(self, request: bytes, context: Any) -> None:
        self.reached.append(CALLER.get())
        await context.write(b"1")

    async def writes_to_stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.reached.append(CALLER.get())
        await context.write(b"1")


def kind_of(method: str) -> str:
    return {"writes": "unary_stream", "writes_to_stream": "stream_stream"}.get(method, method)


def only_admins(caller: Caller, method: str) -> None:
    if caller.principal.role is not Role.ADMIN:
        raise RoleForbids(f"{caller.principal} may not {method}", hint="ask")


@asynccontextmanager
async def serving(
    service: Service,
    wallet: Wallet | None = None,
    refused: Callable[[str, str, SwarmError], None] = lambda *_: None,
    witness: Witness | None = None,
    stays: Callable[[Caller], None] = lambda _: None,
    may: May = only_admins,
) -> AsyncIterator[str]:
    """The service behind TLS and the guard; gives its address."""
    methods = {name: getattr(grpc, f"{kind_of(name)}_rpc_method_handler")(getattr(service, name)) for name in KINDS}
    async with serving_at(server_of(Guard(may, refused, witness, stays), **methods), wallet or Wallet(SCHEDULER)) as at:
        yield at


async def call(channel: grpc.aio.Channel, method: str) -> bytes:
    """Call a method of any kind; its answers, one after the other."""

    async def requests() -> AsyncIterator[bytes]:
        yield b"1"

    kind = kind_of(method)
    made = getattr(channel, kind)(f"/test.Service/{method}")(requests() if kind.startswith("stream") else b"1")
    return b"".join([part async for part in made]) if kind.endswith("stream") else bytes(await made)


async def failure(channel: grpc.aio.Channel, method: str = "unary_unary") -> SwarmError:
    async with channel:
        with pytest.raises(grpc.RpcError) as caught:
            await call(channel, method)
    return translate(caught.value, "it")


@pytest.mark.parametrize("method", KINDS)
async def test_every_kind_of_method_is_told_who_calls_and_reached_by_nobody_who_may_not(method: str) -> None:
    service, told = Service(), []
    viewer = identity_of(OURS, Role.VIEWER, "eve")
    async with serving(service, refused=lambda *facts: told.append(facts)) as address:
        error = await failure(connect(address, viewer, NAME), method)
        assert service.reached == []
        async with connect(address, ADMIN, NAME) as channel:
            assert await call(channel, method) == b"1"
    assert service.reached == [Caller(ADMIN.principal, fingerprint_of(ADMIN.certificate_pem))]
    assert type(error) is RoleForbids
    assert (error.message, error.hint) == (f"viewer eve may not /test.Service/{method}", "ask")
    assert [(method, who, str(why)) for method, who, why in told] == [
        (f"/test.Service/{method}", viewer.principal.uri, str(error))
    ]


class Notes:
    """What a witness hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def begins(self, method: str, caller: Caller, request: Any) -> None:
        self.heard.append((method, caller.principal.name, request))

    def answered(self, method: str, caller: Caller, request: Any, reply: Any) -> None:
        self.heard.append((method, caller.principal.name, request, reply))

    def failed(self, method: str, caller: Caller, code: str, message: str, request: Any) -> None:
        self.heard.append((method, caller.principal.name, code, message, request))


class Failing(Service):
    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        await abort(context, NotFound("there is none"))

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        await context.abort(grpc.StatusCode.ABORTED, "it broke")


async def test_a_witness_hears_of_calls_that_are_let_through_and_how_they_failed() -> None:
    notes, service = Notes(), Failing()
    async with serving(service, witness=notes) as address, connect(address, ADMIN, NAME) as channel:
        assert await call(channel, "stream_unary") == b"1"
        for method in ("unary_unary", "unary_stream"):
            with pytest.raises(grpc.RpcError):
                await call(channel, method)
        await failure(connect(address, identity_of(OURS, Role.VIEWER, "eve"), NAME))
    assert notes.heard == [
        ("/test.Service/stream_unary", "me", b"1"),
        ("/test.Service/stream_unary", "me", b"1", b"1"),
        ("/test.Service/unary_unary", "me", b"1"),
        ("/test.Service/unary_unary", "me", NotFound.code, "there is none", b"1"),
        ("/test.Service/unary_stream", "me", b"1"),
        ("/test.Service/unary_stream", "me", "ABORTED", "it broke", b"1"),
    ]


def certified(authority: Authority, made: Identity, principal: Principal) -> bytes:
    """A certificate of this authority for the identity's key, under another name."""
    return authority.certify(keys.read_key(made.key_pem).public_key(), principal, time.time())


def without_certificate(address: str) -> grpc.aio.Channel:
    trusting = grpc.ssl_channel_credentials(OURS.pem)
    return grpc.aio.secure_channel(address, trusting, options=[("grpc.ssl_target_name_override", NAME)])


def of_another_authority(address: str) -> grpc.aio.Channel:
    alias = Principal(OURS.cluster, Role.ADMIN, "me")
    made = identity_of(THEIRS, Role.ADMIN, "me")
    named = certified(THEIRS, made, alias)
    return connect(address, Identity(made.key_pem, named, OURS.pem), NAME)


def signed_by_a_member(address: str) -> grpc.aio.Channel:
    """An admin's key is no authority, though it signs a certificate as one would."""
    pretender = Authority(keys.read_key(ADMIN.key_pem), ADMIN._certificate)
    made = identity_of(THEIRS, Role.ADMIN, "me")
    chain = certified(pretender, made, ADMIN.principal) + ADMIN.certificate_pem
    return connect(address, Identity(made.key_pem, chain, OURS.pem), NAME)


def ended(address: str) -> grpc.aio.Channel:
    return connect(address, identity_of(OURS, Role.ADMIN, "me", life_s=-1.0), NAME)


def with_the_key_of_another(address: str) -> grpc.aio.Channel:
    return connect(
        address, Identity(identity_of(OURS, Role.VIEWER, "eve").key_pem, ADMIN.certificate_pem, OURS.pem), NAME
    )


@pytest.mark.parametrize(
    "dial", [connect, without_certificate, of_another_authority, signed_by_a_member, ended, with_the_key_of_another]
)
@pytest.mark.parametrize("method", ["unary_unary", "stream_stream"])
async def test_nobody_gets_in_who_does_not_prove_who_he_is(
    dial: Callable[[str], grpc.aio.Channel], method: str
) -> None:
    service = Service()
    async with serving(service) as address:
        assert isinstance(await failure(dial(address), method), SchedulerUnreachable)
        async with connect(address, ADMIN, NAME) as channel:  # others are served as before
            assert await call(channel, method) == b"1"
    assert len(service.reached) == 1


async def test_a_certificate_of_ours_that_names_nobody_is_not_enough() -> None:
    service, told = Service(), []
    janitor = Principal(OURS.cluster, "janitor", "joe")  # type: ignore[arg-type]
    made = identity_of(OURS, Role.ADMIN, "me")
    nobody = Identity(made.key_pem, certified(OURS, made, janitor), OURS.pem)
    async with serving(service, refused=lambda *facts: told.append(facts)) as address:
        error = await failure(connect(address, nobody, NAME))
    assert type(error) is NotAdmitted
    assert [who for _, who, _ in told] == ["nobody"]
    assert service.reached == []


async def test_over_plaintext_nobody_passes_a_guard() -> None:
    service = Service()
    method = grpc.unary_unary_rpc_method_handler(service.unary_unary)
    async with serving_at(server_of(Guard(only_admins), unary_unary=method)) as address:
        error = await failure(connect(address))
    assert type(error) is NotAdmitted
    assert "swarm login" in error.hint
    assert service.reached == []


async def test_a_failing_check_lets_nobody_through() -> None:
    def broken(caller: Caller, method: str) -> None:
        raise OSError("the disk is full")

    service = Service()
    async with serving(service, may=broken) as address:
        await failure(connect(address, ADMIN, NAME))
    assert service.reached == []


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (identity_of(THEIRS, Role.SCHEDULER, "scheduler"), NAME),
        (identity_of(OURS, Role.STAGE_SERVER, "scheduler"), NAME),
        (identity_of(OURS, Role.SCHEDULER, "scheduler", life_s=-1.0), NAME),
        (SCHEDULER, any_of(OURS.cluster, Role.STAGE_SERVER)),
    ],
    ids=["another swarm's", "a stage server", "ended", "no stage server"],
)
async def test_a_dialler_talks_only_to_whom_it_meant(shown: Identity, wanted: str) -> None:
    service = Service()
    async with serving(service, Wallet(shown)) as address:
        assert isinstance(await failure(connect(address, ADMIN, wanted)), SchedulerUnreachable)
    assert service.reached == []


async def shown_at(address: str) -> bytes:
    """The certificate that a server shows at a handshake."""
    context = ssl.create_default_context(cadata=OURS.pem.decode())
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=NAME)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(True)
    writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(shown).encode()


async def test_a_renewed_certificate_is_shown_at_the_next_handshake_and_open_connections_go_on() -> None:
    service, wallet = Service(), Wallet(SCHEDULER)
    renewed = identity_of(OURS, Role.SCHEDULER, "scheduler")
    async with serving(service, wallet) as address, connect(address, ADMIN, NAME) as channel:
        for identity in (SCHEDULER, SCHEDULER, renewed, renewed):
            wallet.identity = identity
            assert fingerprint_of(await shown_at(address)) == fingerprint_of(identity.certificate_pem)
            assert await call(channel, "unary_unary") == b"1"


@pytest.mark.parametrize("method", ["unary_stream", "stream_stream", "stream_unary"])
async def test_a_stream_goes_on_only_as_long_as_its_caller_may_stay(method: str) -> None:
    """A person who follows a job was once told of it for as long as the job ran, although an admin had revoked him."""
    revoked, over = asyncio.Event(), asyncio.Event()

    def stays(caller: Caller) -> None:
        assert caller.principal == ADMIN.principal
        if revoked.is_set():
            raise Revoked("out")

    class Endless(Service):
        async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"1"
                    await asyncio.sleep(0.01)
            finally:
                over.set()

        async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for content in self.unary_stream(b"", context):
                yield content

        async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
            try:
                async with answering(context):
                    async for _ in requests:
                        pass
            finally:
                over.set()
            return b""

    async def send(call: Any) -> None:
        with suppress(asyncio.InvalidStateError):
            while True:
                await write(call, b"1")
                await asyncio.sleep(0.01)

    denied: list[str] = []
    async with (
        serving(Endless(), refused=lambda method, who, error: denied.append(error.code), stays=stays) as address,
        connect(address, ADMIN, NAME) as channel,
    ):
        made: Any = getattr(channel, method)(f"/test.Service/{method}")
        call = made() if method.startswith("stream") else made(b"1")
        sending = asyncio.create_task(send(call)) if method.startswith("stream") else None
        if method.endswith("stream"):
            assert await call.read() == b"1"
        else:
            await asyncio.sleep(0.1)
        assert not over.is_set()
        revoked.set()

        async def told() -> None:
            while await (call.read() if method.endswith("stream") else call) == b"1":
                pass

        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.wait_for(told(), 60.0)
        assert isinstance(translate(caught.value, "it"), Revoked)
        await over.wait()
        if sending is not None:
            await sending
    assert denied == ([Revoked.code] if method.endswith("stream") else [])


Calls = list[tuple[str, str]]


class MeterService:
    async def answers(self, request: bytes, context: Any) -> bytes:
        return request

    async def refuses(self, request: bytes, context: Any) -> bytes:
        await abort(context, NotFound("there is none", hint="look"))
        raise AssertionError

    async def fails(self, request: bytes, context: Any) -> bytes:
        raise ValueError("a fault of ours")

    async def streams(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        yield request

    async def hangs(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        await asyncio.Event().wait()

    async def writes(self, request: bytes, context: Any) -> None:
        await context.write(request)


@asynccontextmanager
async def metered(guard: Guard | None = None) -> AsyncIterator[tuple[grpc.aio.Channel, Calls]]:
    """A channel to the service, and the calls that its meter hears of."""
    calls: Calls = []

    def handled(method: str, code: str, seconds: float) -> None:
        assert 0.0 <= seconds < 10.0
        calls.append((method, code))

    service = MeterService()
    unary, streams = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    methods: dict[str, Any] = {name: unary(getattr(service, name)) for name in ("answers", "refuses", "fails")}
    methods |= {name: streams(getattr(service, name)) for name in ("streams", "hangs", "writes")}
    async with serving_at(server_of(guard, Meter(handled), "swarm.wire.Test", **methods)) as address:
        async with connect(address) as channel:
            yield channel, calls


async def test_a_call_is_counted_by_its_method_and_status_also_one_that_is_left_or_refused() -> None:
    async with metered() as (channel, calls):
        assert await channel.unary_unary("/swarm.wire.Test/answers")(b"1") == b"1"
        for method in ("streams", "writes"):
            parts = [part async for part in channel.unary_stream(f"/swarm.wire.Test/{method}")(b"1")]
            assert set(parts) == {b"1"}
        for method in ("refuses", "fails", "nothing"):
            with pytest.raises(grpc.RpcError):
                await channel.unary_unary(f"/swarm.wire.Test/{method}")(b"1")
        await until(calls, 5)
        left = channel.unary_stream("/swarm.wire.Test/hangs")(b"1")
        assert await left.read() == b"1"
        left.cancel()
        await until(calls, 6)
    expected = {"answers": "OK", "streams": "OK", "writes": "OK", "refuses": "NOT_FOUND", "fails": "UNKNOWN"}
    expected["hangs"] = "CANCELLED"
    assert calls == [(f"Test/{method}", code) for method, code in expected.items()], "no caller makes up a label"
    async with metered(Guard(lambda caller, method: None)) as (channel, calls):
        with pytest.raises(grpc.RpcError):
            await channel.unary_unary("/swarm.wire.Test/answers")(b"1")
        await until(calls, 1)
    assert calls == [("Test/answers", "UNAUTHENTICATED")]


async def until(calls: Calls, count: int) -> None:
    async with asyncio.timeout(60):
        while len(calls) < count:
            await asyncio.sleep(0.01)
