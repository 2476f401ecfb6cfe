"""The session between a stage server and the scheduler: the ports, and their gRPC side.

The stage server dials. Events flow up and commands flow down one stream, each direction in order. A broken stream loses
all messages under way in both directions. The stage server then attaches again and reports what it holds
(`Hello.cells`). Files travel beside it (swarm/rpc/bulk.py).

Decision: docs/decisions/117.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio

from swarm.errors import CorruptFrame, PeerUnavailable, Refused, SchedulerUnreachable
from swarm.limits import MESSAGE_ASIDE_BYTES
from swarm.pki.identity import Identity, Wallet
from swarm.pki.names import scheduler_of
from swarm.rpc.bulk import StoreReplies, Storing, Ticket, Tickets, ticket_in, within_window
from swarm.rpc.channel import (
    BULK,
    MAX_MESSAGE_BYTES,
    answering,
    check_address,
    connect,
    public_error,
    reply_with,
    translate,
    with_times,
    write,
)
from swarm.rpc.fields import EVENT_FIELDS_MAX
from swarm.rpc.links.frames import encode_varint
from swarm.rpc.mapping import from_command, from_event, from_message, parse, to_command, to_event, to_message
from swarm.rpc.window import Window
from swarm.types import Pieces
from swarm.wire import session_pb2
from swarm.wire.messages import Command, Event, FetchRequest, Forwarded, Heartbeat, Hello, Logged, StoreHeader

SERVICE: Final = "swarm.wire.Session"
DRAIN_S: Final = 1.0  # how long a handler may take to notice that its peer is gone
ENCODED_BYTES_MAX: Final = 16 << 20  # of the newest commands, which may go to other peers too
INBOX_LIMIT: Final = 64  # events that wait for the handler; then the stage server waits
UNHURRIED: Final = (Forwarded, Heartbeat, Logged)  # nobody decides anything sooner because of them

_BREAK_SHOWS_S: Final = 0.05
_OBJECT_BYTES: Final = 4 << 10  # about what a command takes beside its encoding

_Call: TypeAlias = grpc.aio.StreamStreamCall[bytes, bytes]
_Context: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]

T = TypeVar("T")

# The connection whose session the answered call belongs to, such as "ipv4:10.0.0.5:53214"; files have another one.
CONNECTION: ContextVar[str] = ContextVar("connection", default="")


class SchedulerLink(Protocol):
    """The stage server's side."""

    def attach(self, events: AsyncIterator[Event]) -> AsyncGenerator[tuple[int, Command], None]:
        """Open a session: sends `events` as they come, gives (epoch, command) as they arrive.

        Ends when the scheduler ends the session. Raises SchedulerUnreachable if it does not answer or the connection
        breaks, or the scheduler's error (StaleMessage, IncompatibleVersion, Refused, ...). When `events` ends, the
        scheduler hears that the peer hung up, and the iterator goes on until the scheduler is done. The end of the
        session cancels the wait for the next event; close the iterator (`aclosing`) when leaving it early.
        """

    async def store(self, header: StoreHeader, payload: bytes | Pieces) -> str:
        """Hand one stage's weights to the scheduler; gives the sha256 of the stored bytes."""

    def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        """Exactly the bytes [start, stop) of a file that the job starts from, in chunks.

        Raises what the scheduler raised (NotFound: no such file; Refused), CorruptFrame if the bytes are more or fewer,
        SchedulerUnreachable if the connection breaks.
        """

    async def close(self) -> None:
        """Break the connection."""


class SessionHandler(Protocol):
    """The scheduler's side."""

    def attach(self, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
        """Serve one session: `events` as they arrive, (epoch, command) to send.

        `events` ends when the peer hangs up and raises PeerUnavailable when the connection breaks. After a break the
        generator has DRAIN_S to end by itself, its output is dropped, and then it is cancelled. A SwarmError that it
        raises ends the session and reaches the stage server.
        """

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        """Take one stage's weights; gives their sha256.

        `chunks` raises CorruptFrame if it does not add up to `header.total_bytes`. If the connection breaks, the call
        is cancelled. Then everything that arrived until then must be dropped, unless the header names the sha256.
        """

    async def held(self, header: StoreHeader) -> int:
        """How many first bytes of a file with this header are here; the `chunks` of `store` begin behind them.

        It is asked right before `store`, if the header names the sha256.
        """

    def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        """The requested bytes, in chunks of at most 1 MiB; NotFound or Refused."""


# The stage server's side ---------------------------------------------------------------------------------------------


class GrpcSchedulerLink:
    """SchedulerLink over gRPC to the scheduler at `address` ("host:port"); without an identity in plaintext."""

    def __init__(self, address: str, wallet: Wallet | None = None) -> None:
        self._address = address
        self._wallet = Wallet() if wallet is None else wallet
        self._identity = self._wallet.identity  # that the channel for bulk was made with
        self._channel = connect(address, self._identity, _name_of(self._identity))
        # Beside it, so that neither pings nor events wait behind files.
        self._bulk = connect(address, self._identity, _name_of(self._identity), BULK)
        self._older_bulk: grpc.aio.Channel | None = None
        self._ticket: Ticket = ()
        self._up: list[Window] = []  # that nobody uses now; each has learned of the line

    async def attach(self, events: AsyncIterator[Event]) -> AsyncGenerator[tuple[int, Command], None]:
        call: _Call = self._channel.stream_stream(f"/{SERVICE}/Attach")()
        sending = asyncio.create_task(_send_events(call, events), name=f"events to {self._address}")
        try:
            async for data in call:
                if not self._ticket:
                    self._ticket = ticket_in(await call.initial_metadata())
                for command in parts(session_pb2.Command, data):
                    yield from_command(command)
        except grpc.RpcError as error:
            found = translate(error, self._address)
            raise await asyncio.to_thread(with_times, found, self._address) from None
        except asyncio.CancelledError:
            # gRPC raises this also if `_send_events` gave the call up because `events` failed: then say that.
            task = asyncio.current_task()
            if (task is None or not task.cancelling()) and sending.done() and not sending.cancelled():
                sending.result()
            raise
        finally:
            call.cancel()
            sending.cancel()
            await asyncio.wait({sending})

    async def store(self, header: StoreHeader, payload: bytes | Pieces) -> str:
        if len(payload) != header.total_bytes:
            raise ValueError(f"the header says {header.total_bytes} bytes, the payload has {len(payload)}")
        loop = asyncio.get_running_loop()
        window = self._up.pop() if self._up else Window(loop.time())
        window.restart(loop.time(), has_ended=not window.unacknowledged_bytes)
        call: _Call = (await self._beside()).stream_stream(f"/{SERVICE}/Store")(metadata=self._ticket)
        try:
            return await Storing(call, header, payload, window, self._address).run()
        except grpc.RpcError as error:
            raise translate(error, self._address) from None
        except asyncio.CancelledError:
            raise self._unless_cancelled() from None
        finally:
            call.cancel()
            self._up.append(window)

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        call: _Call = (await self._beside()).stream_stream(f"/{SERVICE}/Fetch")(metadata=self._ticket)

        async def payloads() -> AsyncGenerator[bytes, None]:
            await write(call, session_pb2.FetchCall(request=to_message(request)).SerializeToString())
            arrived_bytes = 0
            async for data in call:
                payload = parse(session_pb2.FetchChunk, data).payload
                arrived_bytes += len(payload)
                with suppress(asyncio.InvalidStateError):  # the call has ended
                    await write(call, session_pb2.FetchCall(arrived=arrived_bytes).SerializeToString())
                yield payload

        try:
            wanted_bytes = request.stop - request.start
            async for chunk in exactly(payloads(), wanted_bytes, request.path, "asked for were"):
                yield chunk
        except grpc.RpcError as error:
            raise translate(error, self._address) from None
        except asyncio.CancelledError:
            raise self._unless_cancelled() from None
        finally:
            call.cancel()

    async def _beside(self) -> grpc.aio.Channel:
        """The channel for bulk, with the present certificate: a session may outlive the one that it began with."""
        if self._identity is not self._wallet.identity:
            oldest, self._identity = self._older_bulk, self._wallet.identity
            self._older_bulk = self._bulk  # what is under way there goes on
            self._bulk = connect(self._address, self._identity, _name_of(self._identity), BULK)
            if oldest is not None:
                await oldest.close()
        return self._bulk

    def _unless_cancelled(self) -> BaseException:
        """What to raise for a CancelledError: gRPC raises one too if the channel was closed, as the session ended."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return asyncio.CancelledError()
        return SchedulerUnreachable(f"{self._address} does not answer: the session ended")

    async def close(self) -> None:
        if self._older_bulk is not None:
            await self._older_bulk.close()
        await self._bulk.close()
        await self._channel.close()


def _name_of(identity: Identity | None) -> str:
    """The name that the scheduler must prove."""
    return "" if identity is None else scheduler_of(identity.cluster).dns


async def _send_events(call: _Call, events: AsyncIterator[Event]) -> None:
    """Write events until they end or the call does."""
    batches = MessageBatches(partial(write, call))
    writing = asyncio.create_task(batches.write_all(), name="session events")
    try:
        async for event in events:
            data = _within_limit(to_event(event).SerializeToString())
            await batches.put(data, hurry=not isinstance(event, UNHURRIED))
        await batches.finish()
        await call.done_writing()
    except (grpc.RpcError, asyncio.InvalidStateError):
        pass  # the call has ended; its reader learns why
    except Exception:
        call.cancel()
        raise
    finally:
        writing.cancel()


def _within_limit(data: bytes) -> bytes:
    """Refuse a message that is too long by name; gRPC would end the whole session over it."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise Refused(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return data


# The scheduler's side ------------------------------------------------------------------------------------------------


def add_session_service(server: grpc.aio.Server, handler: SessionHandler) -> None:
    """Serve `handler` to stage servers that dial with `GrpcSchedulerLink`."""
    service = _SessionService(handler)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Attach": grpc.stream_stream_rpc_method_handler(service.attach),
        "Store": grpc.stream_stream_rpc_method_handler(service.store),
        "Fetch": grpc.stream_stream_rpc_method_handler(service.fetch),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class Encoded:
    """Commands as bytes. One that goes to many peers is encoded once: a route tells each of its hops all the others."""

    def __init__(self) -> None:
        self._newest: OrderedDict[int, tuple[int, Command, bytes]] = OrderedDict()  # by id
        self._bytes = 0

    def __call__(self, epoch: int, command: Command) -> bytes:
        known = self._newest.get(id(command))
        if known is not None and known[0] == epoch and known[1] is command:
            return known[2]
        data = _within_limit(to_command(epoch, command).SerializeToString())
        self._newest[id(command)] = epoch, command, data
        self._bytes += len(data) + _OBJECT_BYTES - (0 if known is None else len(known[2]) + _OBJECT_BYTES)
        while self._bytes > ENCODED_BYTES_MAX:
            _, (_, _, oldest) = self._newest.popitem(last=False)
            self._bytes -= len(oldest) + _OBJECT_BYTES
        return data


class _SessionService:
    def __init__(self, handler: SessionHandler) -> None:
        self._handler = handler
        self._encoded = Encoded()
        self._tickets = Tickets()

    async def attach(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        async def send(data: bytes) -> None:
            try:
                await reply_with(context, data)
            except Exception as error:
                # A connection that breaks within a write fails the write before the call is known to be done.
                if not (context.done() or isinstance(error, grpc.aio.InternalError)):
                    raise
                events.fail(_broken())

        async def write(epoch: int, command: Command) -> None:
            await batches.put(self._encoded(epoch, command))

        CONNECTION.set(context.peer())
        async with answering(context), self._tickets.given(context):
            events: Pipe[Event] = Pipe(INBOX_LIMIT)
            batches = MessageBatches(send)
            reading = asyncio.create_task(_read_events(requests, events), name="session events")
            writing = asyncio.create_task(batches.write_all(), name="session commands")
            try:
                try:
                    # gRPC cancels this when the connection breaks.
                    await serve_session(self._handler, events, write)
                except Exception:
                    await batches.finish()
                    raise
                await batches.finish()
            finally:
                reading.cancel()
                writing.cancel()
                await asyncio.wait({reading, writing})

    async def store(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        async with answering(context), self._tickets.beside(context) as (connection, _):
            CONNECTION.set(connection)
            chunks = aiter(requests)
            first = parse(session_pb2.StoreChunk, await anext(chunks, b""))
            if not first.HasField("header"):
                raise Refused("StoreChunk.header is missing in the first chunk")
            header, replies = from_message(StoreHeader, first.header), StoreReplies(context)

            async def arriving(held_bytes: int) -> AsyncGenerator[bytes, None]:
                await replies.held(held_bytes)
                async for payload in _payloads(first, chunks):
                    replies.came()
                    yield payload
                    held_bytes += len(payload)  # the handler took it, as it asks for the next one
                    await replies.held(held_bytes)

            async with replies.telling():
                start = await self._handler.held(header) if header.sha256 else 0
                weights = exactly(arriving(start), header.total_bytes, "the weights", "the header says", start)
                sha256 = await self._handler.store(header, weights)
            await reply_with(context, session_pb2.StoreReply(sha256=sha256).SerializeToString())

    async def fetch(self, requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        async with answering(context), self._tickets.beside(context) as (connection, idle):
            CONNECTION.set(connection)
            calls = aiter(requests)
            first = parse(session_pb2.FetchCall, await anext(calls, b""))
            if not first.HasField("request"):
                raise Refused("FetchCall.request is missing in the first message")
            request = from_message(FetchRequest, first.request)

            async def arrived() -> AsyncGenerator[int, None]:
                async for data in calls:
                    yield parse(session_pb2.FetchCall, data).arrived

            async with aclosing(self._handler.fetch(request)) as chunks:
                loop = asyncio.get_running_loop()
                window = idle.pop() if idle else Window(loop.time())
                async with aclosing(within_window(chunks, arrived(), window)) as pieces:
                    async for piece in pieces:
                        assert isinstance(piece, bytes)
                        yield session_pb2.FetchChunk(payload=piece).SerializeToString()
                window.restart(loop.time(), has_ended=True)
                idle.append(window)


async def serve_session(
    handler: SessionHandler, events: Pipe[Event], write: Callable[[int, Command], Awaitable[None]]
) -> None:
    """Run `handler` for one session; to be cancelled when the connection breaks.

    The handler then sees `events` fail, and has DRAIN_S to end by itself before it is cancelled too. `write` may call
    `events.fail` instead of raising; the handler's later output is dropped.
    """

    async def run() -> None:
        commands = handler.attach(events)
        try:
            async for epoch, command in commands:
                if events.error is None:
                    await write(epoch, command)
        finally:
            if isinstance(commands, AsyncGenerator):
                await commands.aclose()

    serving = asyncio.create_task(run(), name="session")
    try:
        await asyncio.wait({serving})
    except asyncio.CancelledError:
        events.fail(_broken())
        try:
            await asyncio.wait({serving}, timeout=DRAIN_S)
        finally:
            serving.cancel()
        await asyncio.wait({serving})
        if not serving.cancelled() and isinstance(failure := serving.exception(), Exception):
            public_error(failure)  # there is nobody to tell, but our own faults belong in the log
        raise
    serving.result()


async def exactly(
    chunks: AsyncIterator[bytes], wanted_bytes: int, what: str, says: str, held_bytes: int = 0
) -> AsyncGenerator[bytes, None]:
    """The chunks, if they add up to `wanted_bytes` with those held; else CorruptFrame as soon as that is certain."""
    async for chunk in chunks:
        held_bytes += len(chunk)
        if held_bytes > wanted_bytes:
            break
        yield chunk
    if held_bytes != wanted_bytes:
        raise CorruptFrame(f"{held_bytes} bytes or more of {what} arrived, {says} {wanted_bytes}")


async def _payloads(first: session_pb2.StoreChunk, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    if first.payload:
        yield first.payload
    async for data in chunks:
        chunk = parse(session_pb2.StoreChunk, data)
        if chunk.HasField("header"):
            raise CorruptFrame("StoreChunk.header comes twice")
        yield chunk.payload


async def _read_events(requests: AsyncIterator[bytes], events: Pipe[Event]) -> None:
    try:
        async for data in requests:
            aside = len(data) >= MESSAGE_ASIDE_BYTES
            for event in await asyncio.to_thread(_events, data) if aside else _events(data):
                await events.put(event)
        # gRPC shows a broken stream as ended first and cancels the call right after: wait for that.
        await asyncio.sleep(_BREAK_SHOWS_S)
        events.end()
    except Exception as error:
        events.fail(public_error(error))


def _events(data: bytes) -> list[Event]:
    found = list(map(from_event, parts(session_pb2.Event, data)))
    for event in found:
        if isinstance(event, Hello):
            # Other stage servers will dial it, because the scheduler tells them to.
            if event.address or not event.via_relay:
                check_address(event.address)
            if event.http_address:
                check_address(event.http_address)
    return found


def _broken() -> PeerUnavailable:
    return PeerUnavailable("the connection to the stage server broke")


class Pipe(Generic[T]):
    """A bounded queue from one writer to one reader that can end or fail; read it with `async for`.

    Items that were put before the end or the failure can still be read.
    """

    def __init__(self, limit: int) -> None:
        self.error: Exception | None = None  # what it failed with
        self.ended = False  # or failed
        self._limit = limit
        self._items: deque[T] = deque()
        self._readable = asyncio.Event()
        self._room = asyncio.Event()

    async def put(self, item: T) -> None:
        """Append an item once there is room; dropped if the pipe has ended or failed."""
        while len(self._items) >= self._limit and not self.ended:
            self._room.clear()
            await self._room.wait()
        if not self.ended:
            self._items.append(item)
            self._readable.set()

    def end(self) -> None:
        """Nothing comes any more."""
        self.ended = True
        self._readable.set()
        self._room.set()

    def fail(self, error: Exception) -> None:
        """Nothing comes any more, and the reader raises `error`; only the first call counts."""
        if not self.ended:
            self.error = error
        self.end()

    def __aiter__(self) -> Pipe[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self.error is not None:
                raise self.error
            if self.ended:
                raise StopAsyncIteration
            self._readable.clear()
            await self._readable.wait()
        self._room.set()
        return self._items.popleft()


TOGETHER_MAX: Final = 64  # messages
TOGETHER_BYTES_MAX: Final = 64 << 10  # nothing is added beyond it; a larger message travels alone
WAITING_BYTES_MAX: Final = 1 << 20  # with this many waiting, whoever puts waits too
UNHURRIED_S: Final = 0.005  # how long something may wait for company

_MORE = b"\x92\x03"  # the key of the field `more`, which both kinds have: 50 << 3 | 2, as a varint

Kind: TypeAlias = type[session_pb2.Event] | type[session_pb2.Command]


def parts(kind: Kind, data: bytes) -> Iterator[Any]:
    """The messages of a batch, in order; CorruptFrame if it is none, or has more than TOGETHER_MAX."""
    first = parse(kind, data, EVENT_FIELDS_MAX)
    if len(first.more) >= TOGETHER_MAX:
        raise CorruptFrame(f"a batch has {1 + len(first.more)} messages, the limit is {TOGETHER_MAX}")
    yield first
    for message in first.more:
        yield parse(kind, message, EVENT_FIELDS_MAX)


class MessageBatches:
    """Writes encoded messages to a stream, as many at once as wait: a gRPC message costs more than a small one of ours.

        put() --> waiting --> write_all(), in a task of its own --first ++ more ++ more--> parts()

    What is in no hurry waits a moment for something that is. Messages keep their order, and each counts as if it had
    come alone.
    """

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._write = write
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._failure: Exception | None = None
        self._ended = False
        self._over = asyncio.Event()  # everything is written, or writing has failed
        self._due = asyncio.Event()
        self._room = asyncio.Event()
        self._moment: asyncio.TimerHandle | None = None

    async def put(self, message: bytes, *, hurry: bool = True) -> None:
        """Append a message once there is room; raises what `write` raised of an earlier one."""
        while self._is_full() and not self._over.is_set():
            self._due.set()
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure
        self._waiting.append(message)
        self._waiting_bytes += len(message)
        if hurry:
            self._due.set()
        elif self._moment is None:
            self._moment = asyncio.get_running_loop().call_later(UNHURRIED_S, self._due.set)

    async def finish(self) -> None:
        """Return once everything is written; raises what `write` raised."""
        self._ended = True
        self._due.set()
        await self._over.wait()
        if self._failure is not None:
            raise self._failure

    async def write_all(self) -> None:
        """Write until `finish`, or until `write` fails."""
        try:
            while self._waiting or not self._ended:
                await self._due.wait()
                if not self._ended:
                    self._due.clear()
                self._forget_moment()
                while self._waiting:
                    batch = self._batch()
                    self._room.set()
                    await self._write(batch)
        except Exception as failure:
            self._failure = failure
        finally:
            self._over.set()
            self._room.set()
            self._forget_moment()

    def _batch(self) -> bytes:
        first = self._waiting.popleft()
        batch, size_bytes = [first], len(first)
        while self._waiting and len(batch) < 3 * TOGETHER_MAX - 2:
            if size_bytes + len(self._waiting[0]) >= TOGETHER_BYTES_MAX:
                break
            message = self._waiting.popleft()
            batch += (_MORE, encode_varint(len(message)), message)
            size_bytes += len(message)
        self._waiting_bytes -= size_bytes
        return b"".join(batch)

    def _is_full(self) -> bool:
        return len(self._waiting) >= TOGETHER_MAX or self._waiting_bytes >= WAITING_BYTES_MAX

    def _forget_moment(self) -> None:
        if self._moment is not None:
            self._moment.cancel()
            self._moment = None
