"""Files that travel beside a session, on a channel of their own.

    stage server                               scheduler
      header (sha256, size, path)     ───▶
                                      ◀───   held_bytes: from where to send
      payload … within the window     ───▶
                                      ◀───   held_bytes: what has arrived, after each payload
                                      ◀───   busy: a payload takes its time, such as on a slow disk
                                      ◀───   sha256 of the stored bytes

A session shows by a ticket which calls on the other channel are its own: random bytes in the first metadata of Attach,
good as long as the session, and for the same member only. Its certificate may have been renewed since. Calls that are
under way end with their session: who was revoked, or is gone, hands over no part of a checkpoint any more.

Not chosen: longer patience of the session's own pings, because who is dead would be noticed as late. Nor parts that are
asked for one by one, because each would open its file anew. Decision: docs/decisions/082.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

import grpc.aio

from swarm.errors import CorruptFrame, SchedulerUnreachable, StaleMessage
from swarm.pki.names import Principal
from swarm.rpc.channel import reply_with, write
from swarm.rpc.guard import CALLER
from swarm.rpc.mapping import parse, to_message
from swarm.rpc.window import Window
from swarm.types import Pieces
from swarm.wire import session_pb2
from swarm.wire.messages import StoreHeader

T = TypeVar("T")

Ticket: TypeAlias = tuple[tuple[str, bytes], ...]
_TICKET: Final = "swarm-session-bin"
_TICKET_BYTES: Final = 16
_LOOK_S: Final = 0.25  # between two looks at the silence of the other side
BUSY_S: Final = 0.5  # after which the sender of a file hears that the receiver is at work

_Context: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]


class Storing:
    """Sends one file over an open call, from the byte that the other side asks for."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[bytes, bytes],
        header: StoreHeader,
        content: bytes | Pieces,
        window: Window,
        address: str,
    ) -> None:
        self._call, self._header, self._content, self._window = call, header, content, window
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._held: int | None = None  # what has arrived, once the other side said so
        self._heard = asyncio.Event()

    async def run(self) -> str:
        """The sha256 of the stored bytes.

        Raises grpc.RpcError; CorruptFrame if the other side acknowledges what was not sent; SchedulerUnreachable if it
        acknowledges nothing for longer than the line's delay explains.
        """
        tasks = {
            asyncio.create_task(work, name=f"{self._header.path} to {self._address}")
            for work in (self._receive(), self._watch(), self._send())
        }
        try:
            while True:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (sha256 := task.result()) is not None:
                        return sha256
                tasks -= done
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _receive(self) -> str | None:
        async for data in self._call:
            reply = parse(session_pb2.StoreReply, data)
            if reply.sha256:
                return str(reply.sha256)
            if reply.busy:
                self._window.heard(self._loop.time())
            else:
                self._take(reply.held_bytes)
        raise CorruptFrame(f"{self._address} ended the transfer of {self._header.path} without a hash")

    def _take(self, held_bytes: int) -> None:
        now_s = self._loop.time()
        if self._held is None:  # it answers the header
            if held_bytes > len(self._content):
                raise CorruptFrame(f"{held_bytes} bytes are acknowledged of {len(self._content)}")
            self._window.acknowledged(self._window.unacknowledged_bytes, now_s)
        else:
            self._window.acknowledged(held_bytes - self._held, now_s)
        self._held = held_bytes
        self._heard.set()

    async def _send(self) -> None:
        """Send until all is sent or the call has ended; the receiving side learns why it ended."""
        try:
            header = session_pb2.StoreChunk(header=to_message(self._header)).SerializeToString()
            self._window.sent(len(header), self._loop.time())
            await write(self._call, header)
            await self._heard.wait()
            assert self._held is not None
            at_bytes = self._held
            while at_bytes < len(self._content):
                piece_bytes = min(self._window.piece_bytes, len(self._content) - at_bytes)
                if self._window.unacknowledged_bytes and self._window.room_bytes < piece_bytes:
                    self._heard.clear()
                    await self._heard.wait()
                    continue
                payload = self._content[at_bytes : at_bytes + piece_bytes]
                self._window.sent(piece_bytes, self._loop.time())
                await write(self._call, session_pb2.StoreChunk(payload=payload).SerializeToString())
                at_bytes += piece_bytes
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._window.dead(self._loop.time()):
                raise SchedulerUnreachable(
                    f"{self._address} does not answer: nothing has arrived there for {self._window.patience_s:.1f} s"
                )


class StoreReplies:
    """The replies to one store; gRPC allows one write at a time."""

    def __init__(self, context: _Context) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._at_work = False  # on what has arrived, and not waiting for more

    @asynccontextmanager
    async def telling(self) -> AsyncIterator[None]:
        """Within the block, the caller hears now and then that this process is at work."""
        task = asyncio.create_task(self._tell(), name="store replies")
        self._at_work = True
        try:
            yield
            async with self._lock:  # a reply that is being written leaves first
                task.cancel()
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def held(self, held_bytes: int) -> None:
        """Say how many first bytes have arrived. From now on this end waits for more, until `came`."""
        self._at_work = False
        async with self._lock:
            await reply_with(self._context, session_pb2.StoreReply(held_bytes=held_bytes).SerializeToString())

    def came(self) -> None:
        """More has come, and is being worked on."""
        self._at_work = True

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(BUSY_S)
            if not self._at_work or self._lock.locked():
                continue
            try:
                async with self._lock:
                    await reply_with(self._context, session_pb2.StoreReply(busy=True).SerializeToString())
            except Exception as error:
                if not (self._context.done() or isinstance(error, grpc.aio.InternalError)):
                    raise
                return  # the caller is gone, which whoever reads from it will see


async def within_window(
    chunks: AsyncIterator[bytes | T], arrived: AsyncIterator[int], window: Window
) -> AsyncGenerator[bytes | T, None]:
    """The bytes of the chunks in pieces, each once the window has room for it; `arrived` counts those at the far end.

    Other messages pass in their turn. A caller that stops counting, such as one that asked and closed its side, gets
    the rest as fast as it reads.
    """
    loop = asyncio.get_running_loop()
    heard, counted = asyncio.Event(), 0

    async def count() -> None:
        nonlocal counted
        async for arrived_bytes in arrived:
            window.acknowledged(arrived_bytes - counted, loop.time())
            counted = arrived_bytes
            heard.set()

    counting = asyncio.create_task(count(), name="bytes that arrived")
    counting.add_done_callback(lambda _: heard.set())
    try:
        async for chunk in chunks:
            at_bytes = 0
            if not isinstance(chunk, bytes):
                yield chunk
                continue
            while at_bytes < len(chunk):
                piece_bytes = min(window.piece_bytes, len(chunk) - at_bytes)
                while window.unacknowledged_bytes and window.room_bytes < piece_bytes and not counting.done():
                    heard.clear()
                    await heard.wait()
                if counting.done() and not counting.cancelled():
                    counting.result()
                window.sent(piece_bytes, loop.time())
                yield chunk[at_bytes : at_bytes + piece_bytes]
                at_bytes += piece_bytes
    finally:
        counting.cancel()
        await asyncio.wait({counting})


@dataclass(eq=False, slots=True)
class _BulkSession:
    context: _Context
    member: Principal | None
    windows: list[Window] = field(default_factory=list)  # that nobody uses now; each has learned of the line
    calls: set[asyncio.Timeout] = field(default_factory=set)  # under way


class Tickets:
    """The tickets of the sessions that are open at one server."""

    def __init__(self) -> None:
        self._open: dict[bytes, _BulkSession] = {}

    @asynccontextmanager
    async def given(self, context: _Context) -> AsyncIterator[None]:
        """Give the caller a ticket that is good until the block ends."""
        ticket = secrets.token_bytes(_TICKET_BYTES)
        session = self._open[ticket] = _BulkSession(context, _member())
        try:
            await context.send_initial_metadata(((_TICKET, ticket),))
            yield
        finally:
            del self._open[ticket]
            for call in session.calls:
                if not call.expired():
                    call.reschedule(0.0)

    @asynccontextmanager
    async def beside(self, context: _Context) -> AsyncIterator[tuple[str, list[Window]]]:
        """Within the block a call is answered: gives the connection of the session whose ticket it shows, if the caller
        proved the same, and the windows of that session; else its own connection. StaleMessage once the session ends.
        """
        session = self._open.get(dict(ticket_in(context.invocation_metadata())).get(_TICKET, b""))
        if session is None or session.member != _member():
            yield str(context.peer()), []
            return
        until_over = asyncio.timeout(None)
        session.calls.add(until_over)
        try:
            async with until_over:
                yield str(session.context.peer()), session.windows
        except TimeoutError:
            if not until_over.expired():
                raise
            raise StaleMessage("the session of this call has ended; attach again") from None
        finally:
            session.calls.discard(until_over)


def _member() -> Principal | None:
    """The member whose call is being answered; None over plaintext, where callers prove nothing."""
    caller = CALLER.get()
    return None if caller is None else caller.principal


def ticket_in(metadata: Iterable[Any] | None) -> Ticket:
    """The ticket among metadata; empty: there is none."""
    return tuple((key, bytes(value)) for key, value in metadata or () if key == _TICKET)[:1]
