"""The claim: two seconds after a member was revoked nothing of it goes on, whatever others are busy with.

The revoked one keeps its streams, calls and links open by force. Virtual time says how long the design takes, on any
machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
import pytest

from scheduler.api.members.passes import Issuer, Passes
from scheduler.api.members.relays import RelayDesk
from scheduler.api.sessions import Connections
from scheduler.brain.fleet.membership import Membership
from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.brain.members.places import CallSlot
from scheduler.jobs.registry import JobRegistry
from scheduler.web.feed import Look
from scheduler.web.pages import Pages
from scheduler.web.site import MainLoop
from swarm.errors import Revoked
from swarm.pki.authority import Authority
from swarm.pki.identity import Identity
from swarm.pki.names import Role
from swarm.process.http import HttpConnection
from swarm.process.logs import get_logger
from swarm.relay.metrics import RelayMetrics
from swarm.relay.service import RelayService
from swarm.rpc.guard import CALLER, Caller, Guard
from swarm.rpc.links.tunnel import CONNECTION_KEY, TO_KEY
from swarm.rpc.mapping import from_message, parse
from swarm.rpc.passes import issue, metadata
from swarm.rpc.session import add_session_service
from swarm.types import PROTOCOL_VERSION, JobId, JobState, PeerId, PeerState
from swarm.wire import relay_pb2
from swarm.wire.messages import (
    Command,
    Commit,
    CutOff,
    Event,
    FetchRequest,
    Release,
    StoreHeader,
    TensorHeader,
    Welcome,
)
from tests.support.members import caller_of, identity_of
from tests.support.relays import KEY, OURS, pass_of
from tests.support.scenes import Task, play
from tests.support.sim import loop as sim
from tests.support.sim.fabric import Observer
from tests.support.simulated import Members, Rig

WITHIN_S = 2.0
ON_THE_WAY_S = 0.3  # of a message, on a bad line
SLOWNESS = 300.0  # a microbatch takes about five seconds


def address_of(peer: PeerId) -> str:
    return f"address-of-{peer}"


class Watch(Observer):
    """Notes when a commit reaches each stage server, and when others last sent it tensors."""

    def __init__(self) -> None:
        self.commit_s: dict[str, float] = {}
        self.sent_s: dict[str, float] = {}

    def command_arrived(self, owner: str, epoch: int, command: Command) -> None:
        if isinstance(command, Commit):
            self.commit_s[owner] = asyncio.get_running_loop().time()

    def sending(self, owner: str, address: str, header: TensorHeader) -> None:
        self.sent_s[address] = asyncio.get_running_loop().time()


async def stays(members: Members, at: PeerId, token: bytes, *, pulls: bool) -> float:
    """When a stream, or a pull, that the holder of the pass never ends is ended at another stage server."""
    with pytest.raises(Revoked):
        async with members.gates[at].enter(token, None, pulls=pulls):
            await asyncio.Event().wait()
    return asyncio.get_running_loop().time()


def test_in_two_seconds_nothing_of_a_revoked_stage_server_is_left_while_others_wait_for_their_devices(
    tmp_path: Path,
) -> None:
    """A stage server that waited for its device, to apply a commit, once heard of a revocation only after that."""
    task = Task.make(tmp_path, training__steps=5, limits__no_progress_s=3600)
    members, watch = Members(), Watch()

    async def act(rig: Rig) -> None:
        loop = asyncio.get_running_loop()
        rig.network.observer = watch
        rig.slowness.update(dict.fromkeys(rig.servers, SLOWNESS))
        job = await rig.jobs.submit(task.spec, task.tokens.of_job(), {})
        while job.progress.steps_done < 2 or not all(len(pool) == 2 for pool in job.stages.values()):
            await asyncio.sleep(0.01)
        victim = job.stages[0][0]
        others = [peer for peer in rig.servers if peer != victim]
        same_stage = job.stages[0][1]
        token = members.wallets[victim].pass_token
        ends = [asyncio.ensure_future(stays(members, peer, token, pulls=False)) for peer in others]
        ends.append(asyncio.ensure_future(stays(members, same_stage, token, pulls=True)))
        seen = dict(watch.commit_s)
        while any(watch.commit_s.get(address_of(peer)) == seen.get(address_of(peer)) for peer in others):
            await asyncio.sleep(0.001)  # the next commit: its devices are at work for the step after it already
        revoked_s = loop.time()
        assert rig.membership.find(victim).state is PeerState.SERVING
        rig.revoke(victim)
        assert not any(victim in pool for pool in job.stages.values())
        ended_s = [*await asyncio.gather(*ends), await gone(rig, victim)]
        assert max(ended_s) - revoked_s <= WITHIN_S, [round(at_s - revoked_s, 3) for at_s in ended_s]
        await rig.finished(job)
        assert watch.sent_s[address_of(victim)] - revoked_s <= WITHIN_S, "tensors for it"
        assert victim in members.left_s, "its process ends, if it is ours"
        assert job.record.state is JobState.SUCCEEDED, job.record.reason
        assert job.record.weights_sha256 == task.sha256

    play(task.tokens, 4, act, members=members)


async def gone(rig: Rig, peer: PeerId) -> float:
    """When the scheduler has no session of the peer any more."""
    while rig.parts.connections.get(peer) is not None:
        await asyncio.sleep(0.01)
    return asyncio.get_running_loop().time()


# Calls ----------------------------------------------------------------------------------------------------------------


class Context:
    """A call whose caller reads nothing; says how it was answered."""

    def __init__(self, caller: Identity | None = None, **sent: str | bytes) -> None:
        self._pem = b"" if caller is None else caller.certificate_pem
        self._sent = tuple((name.replace("_", "-"), value) for name, value in sent.items())
        self.answered: str = ""

    def peer(self) -> str:
        return "ipv4:10.0.0.2:5000"

    def done(self) -> bool:
        return bool(self.answered)

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._pem]}

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._sent

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNKNOWN

    def details(self) -> str:
        return self.answered

    async def send_initial_metadata(self, metadata: object) -> None:
        """It leaves before anything is read."""

    async def write(self, message: bytes) -> None:
        await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, details: str, trailing: object = ()) -> NoReturn:
        self.answered = details
        raise grpc.aio.AbortError


class Waiting:
    """A service whose calls never end by themselves."""

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for _ in requests:
            pass
        return b""

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        await context.write(b"")


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def allowed(caller: Caller, method: str) -> None:
    pass


async def guarded(guard: Guard, handler: Any) -> Any:
    """The handler behind the guard."""

    async def found(_: grpc.HandlerCallDetails) -> Any:
        return handler

    return await guard.intercept_service(found, cast(Any, SimpleNamespace(method="/service/method")))


async def call(guard: Guard, name: str, context: Context, request: Any) -> None:
    """Make a call of the service; what it says is never read."""
    handler = await guarded(guard, getattr(grpc, f"{name}_rpc_method_handler")(getattr(Waiting(), name)))
    answering = getattr(handler, name)(request, context)
    try:
        if name == "unary_stream":
            async for _ in answering:
                await context.write(b"")
        else:
            await answering
    except grpc.aio.AbortError:
        pass


@pytest.mark.parametrize("name", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
def test_a_call_of_a_revoked_member_ends_although_nothing_happens_in_it(name: str) -> None:
    """Who follows a job that pauses was once connected for as long as it paused, and an upload until its deadline."""
    authority = Authority.new(time.time())
    ann, bob = (identity_of(authority, Role.SUBMITTER, name) for name in ("ann", "bob"))
    refused: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        guard = Guard(allowed, lambda method, who, error: refused.append(error.code))
        contexts = [Context(person) for person in (ann, bob)]
        calls = [asyncio.ensure_future(call(guard, name, context, silence())) for context in contexts]
        await asyncio.sleep(1000.0)
        guard.cut_off(ann.principal)
        guard.cut_off(ann.principal)  # twice is once
        await calls[0]
        assert loop.time() - 1000.0 <= WITHIN_S
        assert contexts[0].answered == "submitter ann was revoked"
        await asyncio.sleep(1000.0)
        assert not calls[1].done()
        calls[1].cancel()

    sim.run(main(), seed=1, limit_s=5000.0)
    assert refused == [Revoked.code]


def test_the_session_of_a_revoked_stage_server_that_reads_nothing_ends() -> None:
    """Commands that are not read hold up its orderly end, and once did so for as long as the connection stood."""
    gpu = identity_of(OURS, Role.STAGE_SERVER, "gpu")

    class Telling:
        async def attach(self, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
            while True:
                yield 1, Release(JobId("job"), "")

        async def held(self, header: StoreHeader) -> int:
            return 0

        async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
            raise NotImplementedError

        def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
            raise NotImplementedError

    class Server:
        """Keeps what is served."""

        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            details: Any = SimpleNamespace(method="/swarm.wire.Session/Attach", invocation_metadata=())
            self.attach = handlers[0].service(details)

    async def main() -> None:
        loop, guard, server, context = asyncio.get_running_loop(), Guard(allowed), Server(), Context(gpu)
        add_session_service(cast(Any, server), Telling())
        handler = await guarded(guard, server.attach)
        answering = asyncio.ensure_future(handler.stream_stream(silence(), context))
        await asyncio.sleep(1000.0)
        assert not answering.done()
        guard.cut_off(gpu.principal)
        with pytest.raises(grpc.aio.AbortError):
            await answering
        assert loop.time() - 1000.0 <= WITHIN_S
        assert context.answered == "stage-server gpu was revoked"

    sim.run(main(), seed=1, limit_s=5000.0)


def test_whoever_revokes_himself_is_answered() -> None:
    ann = identity_of(OURS, Role.ADMIN, "ann")

    class Revoking(Waiting):
        async def unary_unary(self, request: bytes, context: Any) -> bytes:
            guard.cut_off(ann.principal)
            await asyncio.sleep(100.0)  # the database is slow
            return b"revoked"

    guard = Guard(allowed)

    async def main() -> None:
        handler = await guarded(guard, grpc.unary_unary_rpc_method_handler(Revoking().unary_unary))
        assert await handler.unary_unary(b"", Context(ann)) == b"revoked"

    sim.run(main(), seed=1, limit_s=5000.0)


# Relays ---------------------------------------------------------------------------------------------------------------


def as_caller(caller: Caller, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Answer a call in a task of its own."""

    async def answered() -> None:
        CALLER.set(caller)
        with suppress(grpc.aio.AbortError):
            await work()

    return asyncio.ensure_future(answered())


@pytest.mark.parametrize("revoked", ["near", "far"])
def test_links_of_a_revoked_stage_server_at_a_relay_end_although_both_ends_keep_them(revoked: str) -> None:
    near, far = (caller_of(identity_of(OURS, Role.STAGE_SERVER, name).certificate_pem) for name in ("near", "far"))
    relay = caller_of(identity_of(OURS, Role.RELAY, "relay").certificate_pem)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        connections = Connections(get_logger("test"))
        registry = cast(JobRegistry, SimpleNamespace(get=lambda id: None))
        start_unix_s = pass_of("near", 1).issued_unix_s
        passes = Passes(
            Issuer(KEY, OURS.cluster), registry, Membership(), connections, lambda: start_unix_s + loop.time()
        )
        desk = RelayDesk(passes, connections, get_logger("test"))
        service = RelayService(OURS.cluster, RelayMetrics("0", 0))

        async def hello() -> AsyncIterator[relay_pb2.RelayUp]:
            hello = relay_pb2.RelayHello(protocol=PROTOCOL_VERSION, address="10.0.0.1:7955")
            yield relay_pb2.RelayUp(hello=hello)
            await asyncio.Event().wait()

        async def attach() -> None:
            async for said in desk.Attach(hello(), cast(Any, Context())):
                await asyncio.sleep(ON_THE_WAY_S)
                if said.HasField("welcome"):
                    service.welcomed(from_message(Welcome, said.welcome))
                else:
                    service.cut_off(from_message(CutOff, said.cut_off))

        class Reading(Context):
            """Of one that reads, and keeps what it reads."""

            def __init__(self, **sent: str | bytes) -> None:
                super().__init__(**sent)
                self.read: asyncio.Queue[bytes] = asyncio.Queue()

            async def write(self, message: bytes) -> None:
                self.read.put_nowait(message)

        async def listening() -> AsyncIterator[bytes]:
            yield relay_pb2.ListenUp(token=issue(KEY, pass_of("far", 2))).SerializeToString()
            await asyncio.Event().wait()

        def said_by(context: Context) -> Any:
            return cast(Any, context)

        attached = as_caller(relay, attach)
        await asyncio.sleep(1.0)
        line = Reading()
        listens = as_caller(far, lambda: service.listen(listening(), said_by(line)))
        await asyncio.sleep(1.0)
        dialled = Reading(**{TO_KEY: "far"}, **dict(metadata(issue(KEY, pass_of("near", 1)))))
        connects = as_caller(near, lambda: service.connect(silence(), said_by(dialled)))
        await line.read.get()
        opened = parse(relay_pb2.ListenDown, await line.read.get())
        accepts = as_caller(
            far, lambda: service.accept(silence(), said_by(Reading(**{CONNECTION_KEY: opened.connection})))
        )
        await asyncio.sleep(30.0)
        assert not any(task.done() for task in (connects, accepts, listens))
        revoked_s = loop.time()
        passes.cut_off(PeerId(revoked))
        await asyncio.wait({connects, accepts, *([listens] if revoked == "far" else [])})
        assert loop.time() - revoked_s <= WITHIN_S
        assert listens.done() == (revoked == "far")
        for task in (listens, attached):
            task.cancel()

    sim.run(main(), seed=1, limit_s=5000.0)


# The page -------------------------------------------------------------------------------------------------------------


def test_a_stream_that_shows_the_page_ends() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        revoked_s = 1000.25

        class Shown:
            async def enter(self, certificate: bytes | None) -> Person:
                if loop.time() >= revoked_s:
                    raise Revoked("viewer ann was revoked")
                return ANYBODY

            async def look(self, certificate: bytes | None, reference: str) -> Look:
                await self.enter(certificate)
                return Look(0.0, 1.0, 2.0, {})

        class Here(MainLoop):
            async def ask(self, question: Any, wait_s: float = 1.0) -> Any:
                return await question

        pages = Pages(Here(loop), Shown(), is_local=False)
        connection = cast(HttpConnection, SimpleNamespace(certificate=lambda: b""))
        said = [event async for event in pages._tell(connection, "", CallSlot(ANYBODY, loop.time()))]
        assert b"event: refused" in said[-1]
        assert loop.time() - revoked_s <= WITHIN_S

    sim.run(main(), seed=1, limit_s=5000.0)
