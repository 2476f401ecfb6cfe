"""One contract for the ports between processes, held by gRPC on loopback and by the simulated network alike."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeAlias

import pytest

from swarm.errors import (
    CorruptFrame,
    NotAllowed,
    NotFound,
    PeerUnavailable,
    Refused,
    RetryElsewhere,
    SchedulerUnreachable,
    StaleMessage,
    SwarmError,
)
from swarm.rpc.channel import bind, new_server
from swarm.rpc.links.frames import CHUNK_BYTES, payload_bytes
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.links.peers import GrpcPeerLinks, PeerLinks, TensorReceiver, Traffic
from swarm.rpc.links.state import state_reply
from swarm.rpc.session import GrpcSchedulerLink, SchedulerLink, SessionHandler, add_session_service
from swarm.types import Direction, JobId, Microbatch, PeerId
from swarm.wire.messages import (
    Boundary,
    Command,
    Event,
    FetchRequest,
    Heartbeat,
    Leaving,
    Need,
    StateReply,
    StateRequest,
    StoreHeader,
    Void,
    Welcome,
)
from tests.support.sim.network import SimNetwork

pytestmark = pytest.mark.timeout(300)

NOBODY = "127.0.0.1:1"


class GrpcWorld:
    """A place where ports are connected by gRPC on loopback."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._servers: dict[str, Callable[[], object]] = {}

    async def listen(
        self, receiver: TensorReceiver | None, handler: SessionHandler | None, traffic: Traffic | None = None
    ) -> str:
        server = new_server()
        if receiver is not None:
            add_peer_service(server, receiver, traffic, receiver if isinstance(receiver, Receiver) else None)
        if handler is not None:
            add_session_service(server, handler)
        address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        self._servers[address] = lambda: server.stop(None)
        return address

    async def kill(self, address: str) -> None:
        await self._servers.pop(address)()  # type: ignore[misc]

    def peer_links(self, traffic: Traffic | None = None) -> PeerLinks:
        links = GrpcPeerLinks(traffic)
        self._stack.push_async_callback(links.close)
        return links

    def scheduler_link(self, address: str) -> SchedulerLink:
        link = GrpcSchedulerLink(address)
        self._stack.push_async_callback(link.close)
        return link


class SimWorld:
    """The same, by the simulated network."""

    def __init__(self, stack: AsyncExitStack, *, codec: bool) -> None:
        self.network = SimNetwork(Random(1), delay_s=(0.0, 0.002), codec=codec)
        stack.push_async_callback(self.network.close)
        self._addresses = 0

    async def listen(
        self, receiver: TensorReceiver | None, handler: SessionHandler | None, traffic: Traffic | None = None
    ) -> str:
        self._addresses += 1
        address = f"sim:{self._addresses}"
        if receiver is not None:
            self.network.add_receiver(address, receiver, traffic, receiver if isinstance(receiver, Receiver) else None)
        if handler is not None:
            self.network.add_handler(address, handler)
        return address

    async def kill(self, address: str) -> None:
        self.network.kill(address)

    def peer_links(self, traffic: Traffic | None = None) -> PeerLinks:
        return self.network.peer_links("me", traffic)

    def scheduler_link(self, address: str) -> SchedulerLink:
        return self.network.scheduler_link("me", address)


World: TypeAlias = GrpcWorld | SimWorld


@pytest.fixture(params=["grpc", "sim", "sim-without-codec"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield GrpcWorld(stack) if request.param == "grpc" else SimWorld(stack, codec=request.param == "sim")


# Tensors --------------------------------------------------------------------------------------------------------------


def header_of(size_bytes: int, index: int = 0) -> Boundary | Need:
    microbatch, sender = Microbatch(0, 1, index), PeerId("me")
    if not size_bytes:
        return Need(JobId("job-1"), microbatch, Direction.FORWARD, 1, 0, sender, 1)
    return Boundary(
        JobId("job-1"),
        microbatch,
        Direction.BACKWARD,
        stage=1,
        attempt=0,
        sender=sender,
        incarnation=1,
        dtype="uint8",
        shape=(size_bytes,),
        codec="none",
        total_bytes=size_bytes,
    )


@dataclass
class Receiver:
    """Remembers what came; fails on demand."""

    admission: Callable[[Boundary | Need], None] = lambda header: None
    before: Callable[[Boundary | Need], asyncio.Future[None] | None] = lambda header: None
    got: dict[int, bytes] = field(default_factory=dict)
    times: Counter[int] = field(default_factory=Counter)
    state: bytes | SwarmError = b""  # what it gives to joiners
    asked: list[StateRequest] = field(default_factory=list)

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes]:
        self.asked.append(request)
        if isinstance(self.state, SwarmError):
            raise self.state
        return state_reply(7, 3, self.state), self.state

    def admit(self, header: Boundary | Need) -> None:
        self.admission(header)

    async def receive(self, header: Boundary | Need, payload: memoryview) -> None:
        waiting = self.before(header)
        if waiting is not None:
            await waiting
        assert payload.readonly
        assert payload.nbytes == payload_bytes(header)
        self.got[header.microbatch.index] = bytes(payload)
        self.times[header.microbatch.index] += 1


async def test_a_tensor_arrives_as_it_was_sent_before_send_returns(world: World) -> None:
    receiver = Receiver()
    address, links = await world.listen(receiver, None), world.peer_links()
    for index, size_bytes in enumerate([0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES]):
        content = Random(index).randbytes(size_bytes)
        await links.send(address, header_of(size_bytes, index), content)
        assert receiver.got[index] == content


REQUEST = StateRequest(JobId("job-1"), 2, 1, "records", 4, 5, 6, PeerId("me"), 1)
LIMIT_BYTES = 4 * CHUNK_BYTES


@pytest.mark.parametrize("size_bytes", [0, 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
async def test_state_is_pulled_whole(world: World, size_bytes: int) -> None:
    receiver = Receiver(state=Random(size_bytes).randbytes(size_bytes))
    address, links = await world.listen(receiver, None), world.peer_links()
    reply, payload = await links.pull(address, REQUEST, LIMIT_BYTES)
    assert (reply.version, reply.reach, bytes(payload)) == (7, 3, receiver.state)
    assert receiver.asked == [REQUEST]


async def test_more_state_than_was_asked_for_is_refused(world: World) -> None:
    address, links = await world.listen(Receiver(state=bytes(LIMIT_BYTES + 1)), None), world.peer_links()
    with pytest.raises(Refused, match="at most"):
        await links.pull(address, REQUEST, LIMIT_BYTES)


async def test_many_tensors_are_under_way_at_once(world: World) -> None:
    receiver = Receiver()
    address, links = await world.listen(receiver, None), world.peer_links()
    sizes = [Random(index).choice([10, 1000, CHUNK_BYTES, 2 * CHUNK_BYTES + 5]) for index in range(100)]
    contents = [Random(index).randbytes(size) for index, size in enumerate(sizes)]
    async with asyncio.TaskGroup() as tasks:
        for index, content in enumerate(contents):
            tasks.create_task(links.send(address, header_of(len(content), index), content))
    assert receiver.got == dict(enumerate(contents))
    assert set(receiver.times.values()) == {1}


async def test_send_waits_for_the_receiver(world: World) -> None:
    gate = asyncio.get_running_loop().create_future()
    receiver = Receiver(before=lambda header: gate if header.microbatch.index == 0 else None)
    address, links = await world.listen(receiver, None), world.peer_links()
    held = asyncio.create_task(links.send(address, header_of(4, 0), b"held"))
    await links.send(address, header_of(4, 1), b"pass")  # is not held up by the other
    assert not held.done()
    gate.set_result(None)
    await held
    assert receiver.got == {0: b"held", 1: b"pass"}


@pytest.mark.parametrize("size_bytes", [4, 3 * CHUNK_BYTES])
async def test_a_refused_header_reaches_the_sender_as_the_same_error(world: World, size_bytes: int) -> None:
    def refuse(header: Boundary | Need) -> None:
        if header.microbatch.index == 0:
            raise StaleMessage("step 1 is committed")

    receiver = Receiver(admission=refuse)
    address, links = await world.listen(receiver, None), world.peer_links()
    with pytest.raises(StaleMessage, match="step 1 is committed"):
        await links.send(address, header_of(size_bytes, 0), bytes(size_bytes))
    await links.send(address, header_of(size_bytes, 1), bytes(size_bytes))  # the link is as good as before
    assert list(receiver.got) == [1]


async def test_corruption_is_answered_by_one_resend(world: World) -> None:
    attempts: Counter[int] = Counter()

    def corrupt(header: Boundary | Need) -> None:
        attempts[header.microbatch.index] += 1
        if header.microbatch.index == 0 and attempts[0] == 1:
            raise CorruptFrame("bits fell over")
        if header.microbatch.index == 1:
            raise CorruptFrame("bits always fall over")

    receiver = Receiver(admission=corrupt)
    address, links = await world.listen(receiver, None), world.peer_links()
    await links.send(address, header_of(4, 0), b"good")
    with pytest.raises(CorruptFrame, match="always"):
        await links.send(address, header_of(4, 1), b"lost")
    assert receiver.got == {0: b"good"}
    assert attempts == {0: 2, 1: 2}


async def test_a_killed_receiver_fails_what_is_under_way_and_a_new_one_is_found(world: World) -> None:
    gate = asyncio.get_running_loop().create_future()
    receiver = Receiver(before=lambda header: gate)
    address, links = await world.listen(receiver, None), world.peer_links()
    sending = [asyncio.create_task(links.send(address, header_of(4, index), b"abcd")) for index in range(5)]
    await asyncio.sleep(0.05)
    await world.kill(address)
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(*sending, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [PeerUnavailable] * 5
    with pytest.raises(PeerUnavailable):
        await links.send(address, header_of(4), b"abcd")
    other = Receiver()
    await links.send(await world.listen(other, None), header_of(4), b"abcd")
    assert other.got == {0: b"abcd"}


async def test_a_cancelled_send_leaves_the_link_usable(world: World) -> None:
    gate = asyncio.get_running_loop().create_future()
    receiver = Receiver(before=lambda header: gate if header.microbatch.index == 0 else None)
    address, links = await world.listen(receiver, None), world.peer_links()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await links.send(address, header_of(3 * CHUNK_BYTES, 0), bytes(3 * CHUNK_BYTES))
    await links.send(address, header_of(4, 1), b"abcd")
    gate.set_result(None)
    await links.send(address, header_of(4, 2), b"efgh")
    assert receiver.got[1] == b"abcd"
    assert receiver.got[2] == b"efgh"


async def test_closed_links_fail_what_is_under_way_and_what_comes(world: World) -> None:
    gate = asyncio.get_running_loop().create_future()
    address, links = await world.listen(Receiver(before=lambda header: gate), None), world.peer_links()
    sending = asyncio.create_task(links.send(address, header_of(4), b"abcd"))
    await asyncio.sleep(0.02)
    await links.close()
    with pytest.raises(PeerUnavailable, match="closed"):
        await sending
    with pytest.raises(PeerUnavailable, match="closed"):
        await links.send(address, header_of(4), b"abcd")


class CountingTraffic:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str, int, int]] = []

    def sent(self, address: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None:
        self.lines.append(("sent", kind, wire_bytes, tensor_bytes))

    def received(self, peer: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None:
        self.lines.append((peer, kind, wire_bytes, tensor_bytes))


async def test_both_sides_count_the_same_bytes(world: World) -> None:
    theirs, ours = CountingTraffic(), CountingTraffic()
    address, links = await world.listen(Receiver(), None, theirs), world.peer_links(ours)
    size_bytes = CHUNK_BYTES + 2
    header = replace(header_of(size_bytes), dtype="bfloat16", shape=(size_bytes // 2,))
    await links.send(address, header, bytes(size_bytes))
    ((_, kind, wire_bytes, tensor_bytes),) = ours.lines
    assert theirs.lines == [("me", kind, wire_bytes, tensor_bytes)]
    assert kind == "gradient"
    assert size_bytes < wire_bytes < size_bytes + 300
    assert tensor_bytes == 2 * size_bytes


# Sessions -------------------------------------------------------------------------------------------------------------


@dataclass
class Handler:
    """A scheduler whose sessions run `script`; `seen` are the events that it read, then how they ended."""

    script: Callable[["Handler", AsyncIterator[Event]], AsyncIterator[tuple[int, Command]]]
    seen: list[Event | str] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # to take weights
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def attach(self, events: AsyncIterator[Event]) -> AsyncGenerator[tuple[int, Command], None]:
        try:
            async for answer in self.script(self, events):
                yield answer
        finally:
            self.over.set()

    async def held(self, header: StoreHeader) -> int:
        return 0

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        if header.stage == 99:
            raise NotAllowed("the job is over", hint="nothing to do")
        digest = hashlib.sha256()
        try:
            async for chunk in chunks:
                digest.update(chunk)
                if header.stage == 98:
                    self.begun.set()
                    await asyncio.Event().wait()
        finally:
            self.over.set()
        return digest.hexdigest()

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        if request.path == "none":
            raise NotFound("there is no such file", hint="list them")
        wanted = CONTENT[request.start : request.stop] + (b"x" if request.path == "long" else b"")
        wanted = wanted[:-1] if request.path == "short" else wanted
        try:
            for start in range(0, len(wanted), CHUNK_BYTES):
                yield wanted[start : start + CHUNK_BYTES]
            if request.path == "stuck":
                await asyncio.Event().wait()
        finally:
            self.over.set()

    async def read(self, events: AsyncIterator[Event]) -> None:
        try:
            async for event in events:
                self.seen.append(event)
            self.seen.append("end")
        except PeerUnavailable:
            self.seen.append("broken")


async def echo(handler: Handler, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
    async for event in events:
        handler.seen.append(event)
        assert isinstance(event, Heartbeat)
        yield 7, Void(0, event.sequence, 1)


async def listen_and_talk(handler: Handler, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
    """As the scheduler does it: one task reads, the generator sends from a queue that the reader ends."""
    commands: asyncio.Queue[Command | None] = asyncio.Queue()
    commands.put_nowait(Welcome(PeerId("p"), 1.0))

    async def read() -> None:
        await handler.read(events)
        commands.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        while (command := await commands.get()) is not None:
            yield 1, command
    finally:
        reader.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody announces; the mark's deadline ends it."""
    while not condition():
        await asyncio.sleep(0.001)


async def beats(count: int, *, then_wait: bool = True) -> AsyncIterator[Event]:
    for sequence in range(count):
        yield Heartbeat(sequence)
    if then_wait:
        await asyncio.Event().wait()


async def test_events_go_up_and_commands_come_down_in_order(world: World) -> None:
    handler = Handler(echo)
    link = world.scheduler_link(await world.listen(None, handler))
    commands = [command async for command in link.attach(beats(300, then_wait=False))]
    assert commands == [(7, Void(0, sequence, 1)) for sequence in range(300)]
    assert handler.seen == [Heartbeat(sequence) for sequence in range(300)]


async def test_hanging_up_ends_the_handlers_events(world: World) -> None:
    handler = Handler(listen_and_talk)
    link = world.scheduler_link(await world.listen(None, handler))

    async def farewell() -> AsyncIterator[Event]:
        yield Leaving("SIGTERM")

    commands = [command async for command in link.attach(farewell())]
    assert commands == [(1, Welcome(PeerId("p"), 1.0))], "said before anything was heard"
    assert handler.seen == [Leaving("SIGTERM"), "end"]


@pytest.fixture
def breaks_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late gRPC says that a stream broke, it counts as broken."""
    monkeypatch.setattr("swarm.rpc.session._BREAK_SHOWS_S", 60.0)


@pytest.mark.usefixtures("breaks_show")
async def test_a_broken_connection_breaks_the_handlers_events(world: World) -> None:
    handler = Handler(listen_and_talk)
    link = world.scheduler_link(await world.listen(None, handler))
    async with aclosing(link.attach(beats(3))) as commands:  # type: ignore[type-var]
        await anext(commands)
        await until(lambda: len(handler.seen) == 3)
    async with asyncio.timeout(30):
        await handler.over.wait()
    assert handler.seen == [Heartbeat(0), Heartbeat(1), Heartbeat(2), "broken"]


@pytest.mark.usefixtures("breaks_show")
async def test_a_cancelled_client_breaks_the_handlers_events(world: World) -> None:
    handler = Handler(listen_and_talk)
    link = world.scheduler_link(await world.listen(None, handler))
    welcomed = asyncio.Event()

    async def stay() -> None:
        async for _ in link.attach(beats(0)):
            welcomed.set()

    staying = asyncio.create_task(stay())
    await welcomed.wait()
    staying.cancel()
    with suppress(asyncio.CancelledError):
        await staying
    async with asyncio.timeout(30):
        await handler.over.wait()
    assert handler.seen == ["broken"]


async def test_an_error_of_the_other_end_reaches_the_caller_with_its_hint(world: World) -> None:
    async def fence(handler: Handler, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
        yield 1, Welcome(PeerId("p"), 1.0)
        raise StaleMessage("a newer incarnation is here – end", hint="restart it")

    link, links = world.scheduler_link(await world.listen(None, Handler(fence))), world.peer_links()
    commands = aiter(link.attach(beats(3)))
    assert await anext(commands) == (1, Welcome(PeerId("p"), 1.0))
    busy = await world.listen(Receiver(state=RetryElsewhere("busy", hint="later")), None)
    for call, error, hint in (
        (anext(commands), StaleMessage("a newer incarnation is here – end"), "restart it"),
        (link.store(replace(STORE, stage=99), b"abcd"), NotAllowed("the job is over"), "nothing to do"),
        (anext(link.fetch(replace(FETCH, path="none"))), NotFound("there is no such file"), "list them"),
        (links.pull(busy, REQUEST, LIMIT_BYTES), RetryElsewhere("busy"), "later"),
    ):
        with pytest.raises(type(error), match=error.message) as caught:
            await call
        assert caught.value.hint == hint


async def test_a_fault_of_the_other_end_is_logged_there_and_told_as_such(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Any:
        raise ZeroDivisionError("secret")

    address = await world.listen(Receiver(before=fail), Handler(fail))
    attached = aiter(world.scheduler_link(address).attach(beats(0)))
    for call in (world.peer_links().send(address, header_of(4), b"abcd"), anext(attached)):
        with pytest.raises(SwarmError, match="internal error") as caught:
            await call
        assert type(caught.value) is SwarmError
        assert "secret" in capsys.readouterr().out, "the traceback is in the log"


async def test_a_failing_source_of_events_fails_the_session_with_its_own_error(world: World) -> None:
    handler = Handler(listen_and_talk)

    async def failing() -> AsyncIterator[Event]:
        yield Heartbeat(1)
        await until(lambda: handler.seen == [Heartbeat(1)])
        raise Refused("the outbox is full")

    link = world.scheduler_link(await world.listen(None, handler))
    with pytest.raises(Refused, match="the outbox is full"):
        _ = [command async for command in link.attach(failing())]
    async with asyncio.timeout(30):
        await handler.over.wait()


async def test_who_does_not_answer_is_unreachable_or_unavailable(world: World) -> None:
    link, links = world.scheduler_link(NOBODY), world.peer_links()
    async with asyncio.timeout(60):
        for call in (anext(aiter(link.attach(beats(1)))), link.store(STORE, b"abcd"), anext(link.fetch(FETCH))):
            with pytest.raises(SchedulerUnreachable, match="does not answer"):
                await call
        for wanted in (links.send(NOBODY, header_of(4), b"abcd"), links.pull(NOBODY, REQUEST, LIMIT_BYTES)):
            with pytest.raises(PeerUnavailable):
                await wanted


async def test_a_killed_scheduler_is_scheduler_unreachable(world: World) -> None:
    address = await world.listen(None, Handler(listen_and_talk))
    commands = aiter(world.scheduler_link(address).attach(beats(0)))
    await anext(commands)
    async with asyncio.timeout(30):
        await world.kill(address)
        with pytest.raises(SchedulerUnreachable):
            await anext(commands)


STORE = StoreHeader(JobId("job-1"), PeerId("me"), 1, 0, 10, 1, 4)


@pytest.mark.parametrize("size_bytes", [0, 4, 2 * CHUNK_BYTES + 3])
async def test_weights_are_stored_and_named_by_their_hash(world: World, size_bytes: int) -> None:
    link = world.scheduler_link(await world.listen(None, Handler(echo)))
    content = Random(size_bytes).randbytes(size_bytes)
    assert await link.store(replace(STORE, total_bytes=size_bytes), content) == hashlib.sha256(content).hexdigest()


async def test_storing_breaks_off_when_the_stage_server_is_gone(world: World) -> None:
    handler = Handler(echo)
    link = world.scheduler_link(await world.listen(None, handler))
    storing = asyncio.create_task(link.store(replace(STORE, stage=98), b"abcd"))
    await handler.begun.wait()
    storing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await storing
    async with asyncio.timeout(30):
        await handler.over.wait()


CONTENT = Random(3).randbytes(2 * CHUNK_BYTES + 3)
FETCH = FetchRequest(JobId("job-1"), 0, "model/model.safetensors", 0, len(CONTENT))


@pytest.mark.parametrize("span", [(0, 8), (5, 5), (1, CHUNK_BYTES + 1), (0, len(CONTENT)), (CHUNK_BYTES, len(CONTENT))])
async def test_a_part_of_a_file_arrives_as_asked(world: World, span: tuple[int, int]) -> None:
    link = world.scheduler_link(await world.listen(None, Handler(echo)))
    chunks = [chunk async for chunk in link.fetch(replace(FETCH, start=span[0], stop=span[1]))]
    assert b"".join(chunks) == CONTENT[span[0] : span[1]]
    assert max(map(len, chunks), default=0) <= CHUNK_BYTES


@pytest.mark.parametrize("path", ["short", "long"])
async def test_a_part_of_another_length_than_asked_for_is_corrupt(world: World, path: str) -> None:
    link = world.scheduler_link(await world.listen(None, Handler(echo)))
    with pytest.raises(CorruptFrame, match=f"of {path} arrived, asked for were 100"):
        _ = [chunk async for chunk in link.fetch(replace(FETCH, path=path, stop=100))]


async def test_fetching_ends_when_either_side_is_gone(world: World) -> None:
    handler = Handler(echo)
    address = await world.listen(None, handler)
    fetching = world.scheduler_link(address).fetch(replace(FETCH, path="stuck"))
    await anext(fetching)
    await fetching.aclose()
    async with asyncio.timeout(30):
        await handler.over.wait()

    async def rest() -> None:
        async for _ in fetching:
            pass

    fetching = world.scheduler_link(address).fetch(replace(FETCH, path="stuck"))
    await anext(fetching)
    async with asyncio.timeout(30):
        await world.kill(address)
        with pytest.raises(SchedulerUnreachable):
            await rest()
