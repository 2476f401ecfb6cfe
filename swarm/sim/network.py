"""The network of a simulation: the same ports as gRPC, between objects in one process.

Tensors travel each on its own: after a random delay, so they overtake each other, and some arrive twice. Session
messages are delayed too but keep their order in each direction, as a stream does. Everything passes through the real
encoding (unless `codec` is off), and everything that was done to the traffic is counted: a test that wants disorder can
assert that it got some. All chance comes from the generator that is handed in.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

from swarm.errors import CorruptFrame, PeerUnavailable, SchedulerUnreachable, SwarmError
from swarm.messages import Command, Event, FetchRequest, StateReply, StateRequest, StoreHeader, TensorHeader
from swarm.rpc import frames
from swarm.rpc.channel import public_error
from swarm.rpc.peers import NoTraffic, StateDonor, TensorReceiver, Traffic, collect, state_chunks, take
from swarm.rpc.session import INBOX_LIMIT, Pipe, SessionHandler, exactly, serve_session, whole
from swarm.rpc.wire import from_command, from_event, parse, to_command, to_event
from swarm.wire import session_pb2

T = TypeVar("T")

DELAY_S: Final = (0.0005, 0.02)


@dataclass(slots=True)
class Counts:
    """What the network did so far. Tensors, except where it says otherwise."""

    delivered: int = 0  # handed to a receiver, duplicates included
    reordered: int = 0  # delivered after one that was sent later on the same link
    duplicated: int = 0  # delivered once more
    refused: int = 0  # by their receiver
    unreachable: int = 0  # nobody listened, or the receiver was killed meanwhile
    messages: int = 0  # session messages, both directions
    sessions_broken: int = 0


class SimNetwork:
    """Connects links with the receivers and handlers that listen at addresses; any string is an address."""

    def __init__(
        self,
        rng: Random,
        *,
        delay_s: tuple[float, float] = DELAY_S,
        reorder: bool = True,
        duplicate_ratio: float = 0.0,
        codec: bool = True,
    ) -> None:
        self.counts = Counts()
        self._rng = rng
        self._delay_s = delay_s
        self._reorder = reorder
        self._duplicate_ratio = duplicate_ratio
        self._codec = codec
        self._receivers: dict[str, tuple[TensorReceiver, Traffic]] = {}
        self._donors: dict[str, StateDonor] = {}
        self._handlers: dict[str, SessionHandler] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}  # ordered, unlike a set
        self._tasks_to: dict[str, dict[asyncio.Task[Any], None]] = defaultdict(dict)
        self._sessions: dict[_Session, None] = {}

    def add_receiver(
        self, address: str, receiver: TensorReceiver, traffic: Traffic | None = None, donor: StateDonor | None = None
    ) -> None:
        """Let a stage server listen for tensors, and for joiners, at `address`."""
        self._receivers[address] = (receiver, traffic or NoTraffic())
        if donor is not None:
            self._donors[address] = donor

    def add_handler(self, address: str, handler: SessionHandler) -> None:
        """Let a scheduler listen for sessions at `address`."""
        self._handlers[address] = handler

    def peer_links(self, owner: str, traffic: Traffic | None = None) -> SimPeerLinks:
        """The PeerLinks of the process at `owner`."""
        return SimPeerLinks(self, owner, traffic or NoTraffic())

    def scheduler_link(self, owner: str, address: str) -> SimSchedulerLink:
        """The SchedulerLink of the process at `owner` to the scheduler at `address`."""
        return SimSchedulerLink(self, owner, address)

    def kill(self, address: str) -> None:
        """The process at `address` is gone: it listens no more, its connections break, deliveries to it fail.

        What it sent before may still arrive. Its own tasks are the test's to cancel.
        """
        self._receivers.pop(address, None)
        self._donors.pop(address, None)
        self._handlers.pop(address, None)
        for task in list(self._tasks_to.pop(address, ())):
            task.cancel()
        for session in [session for session in self._sessions if address in (session.owner, session.address)]:
            session.sever(SchedulerUnreachable(f"{session.address} does not answer: the connection broke"))

    def cut(self, owner: str, address: str) -> None:
        """Break the session between two processes that both live on."""
        for session in [session for session in self._sessions if (session.owner, session.address) == (owner, address)]:
            session.sever(SchedulerUnreachable(f"{address} does not answer: the connection broke"))

    async def close(self) -> None:
        """Stop everything that is still under way."""
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    # For the links below

    def delay(self) -> float:
        return self._rng.uniform(*self._delay_s)

    def spawn(self, work: Coroutine[Any, Any, T], name: str, to: str | None = None) -> asyncio.Task[T]:
        """Run `work` beside its caller; cancelled when the network closes or `to` is killed."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        if to is not None:
            tasks_to = self._tasks_to[to]
            tasks_to[task] = None
            task.add_done_callback(lambda done: tasks_to.pop(done, None))
        return task

    def copies(self) -> int:
        """How often the next tensor is delivered."""
        return 2 if self._rng.random() < self._duplicate_ratio else 1

    @property
    def keeps_order(self) -> bool:
        return not self._reorder

    @property
    def encodes(self) -> bool:
        return self._codec

    def receiver_at(self, address: str) -> tuple[TensorReceiver, Traffic] | None:
        return self._receivers.get(address)

    def donor_at(self, address: str) -> StateDonor | None:
        return self._donors.get(address)

    def handler_at(self, address: str) -> SessionHandler | None:
        return self._handlers.get(address)

    def opened(self, session: _Session) -> None:
        self._sessions[session] = None

    def ended(self, session: _Session) -> None:
        self._sessions.pop(session, None)


# Tensors --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Lane:
    """What went from one process to one address so far."""

    sent: int = 0
    newest_delivered: int = 0
    last_arrival: asyncio.Event | None = None


class SimPeerLinks:
    """PeerLinks within a SimNetwork."""

    def __init__(self, network: SimNetwork, owner: str, traffic: Traffic) -> None:
        self._network = network
        self._owner = owner
        self._traffic = traffic
        self._lanes: dict[str, _Lane] = defaultdict(_Lane)
        self._receipts: dict[asyncio.Future[None], None] = {}
        self._closed = False

    async def send(self, address: str, header: TensorHeader, payload: bytes | memoryview) -> None:
        try:
            await self._send(address, header, payload)
        except CorruptFrame:
            await self._send(address, header, payload)

    async def pull(self, address: str, request: StateRequest) -> tuple[StateReply, memoryview]:
        if self._closed:
            raise PeerUnavailable(f"{address}: the links of this process are closed")
        pulling = self._network.spawn(self._pull(address, request), f"pull by {self._owner}", to=address)
        try:
            await asyncio.wait({pulling})
        finally:
            pulling.cancel()
        if pulling.cancelled():
            raise PeerUnavailable(f"{address} does not answer: the connection broke")
        reply, payload = pulling.result()
        self._traffic.received(address, "state", reply.total_bytes, reply.total_bytes)
        return reply, payload

    async def _pull(self, address: str, request: StateRequest) -> tuple[StateReply, memoryview]:
        await asyncio.sleep(self._network.delay())
        donor = self._network.donor_at(address)
        if donor is None:
            raise PeerUnavailable(f"{address} does not answer")
        try:
            reply, payload = await donor.give(request)
        except Exception as error:
            raise public_error(error) from error

        async def chunks() -> AsyncGenerator[bytes, None]:
            for chunk in state_chunks(reply, payload):
                await asyncio.sleep(self._network.delay())
                yield chunk

        return await collect(chunks())

    async def close(self) -> None:
        self._closed = True
        for receipt in list(self._receipts):
            if not receipt.done():
                receipt.set_exception(PeerUnavailable("the links of this process are closed"))

    async def _send(self, address: str, header: TensorHeader, payload: bytes | memoryview) -> None:
        if self._closed:
            raise PeerUnavailable(f"{address}: the links of this process are closed")
        lane = self._lanes[address]
        lane.sent += 1
        # Chunks are made now: the payload may change as soon as this call ends, a duplicate may come later.
        chunks = list(frames.split(lane.sent, header, payload))
        receipt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receipts[receipt] = None
        for copy in range(self._network.copies()):
            self._network.spawn(
                self._deliver(address, lane, lane.sent, header, chunks, receipt if copy == 0 else None),
                f"tensor {lane.sent} from {self._owner} to {address}",
                to=address,
            )
        try:
            await receipt
        finally:
            del self._receipts[receipt]

    async def _deliver(
        self,
        address: str,
        lane: _Lane,
        number: int,
        header: TensorHeader,
        chunks: list[bytes],
        receipt: asyncio.Future[None] | None,
    ) -> None:
        network, counts = self._network, self._network.counts
        error: SwarmError | None = PeerUnavailable(f"{address} does not answer")
        before, arrived = lane.last_arrival, asyncio.Event()
        lane.last_arrival = arrived
        try:
            await asyncio.sleep(network.delay())
            if network.keeps_order and before is not None:
                await before.wait()
            arrived.set()
            listening = network.receiver_at(address)
            if listening is None:
                counts.unreachable += 1
                return
            counts.delivered += 1
            counts.duplicated += receipt is None
            counts.reordered += number < lane.newest_delivered
            lane.newest_delivered = max(lane.newest_delivered, number)
            error = await self._hand_over(*listening, number, header, chunks)
            counts.refused += error is not None
            await asyncio.sleep(network.delay())  # the receipt's way back
        except asyncio.CancelledError:
            counts.unreachable += 1
            error = PeerUnavailable(f"{address} does not answer: the connection broke")
            raise
        finally:
            arrived.set()
            if receipt is not None and not receipt.done():
                self._settle(receipt, address, header, sum(map(len, chunks)), error)

    async def _hand_over(
        self, receiver: TensorReceiver, traffic: Traffic, number: int, header: TensorHeader, chunks: list[bytes]
    ) -> SwarmError | None:
        """What a real receiver does with a tensor's frames; gives what the sender shall be told."""
        try:
            if self._network.encodes:
                assembler = frames.Assembler(receiver.admit)
                tensor = [assembler.add(frames.decode(chunk)) for chunk in chunks][-1]
                assert tensor is not None, "split() makes whole tensors"
            else:
                receiver.admit(header)
                payload = b"".join(frames.decode(chunk).payload for chunk in chunks)
                tensor = frames.Tensor(number, header, memoryview(payload), sum(map(len, chunks)))
        except Exception as error:
            return public_error(error)
        return await take(receiver, traffic, tensor)

    def _settle(
        self,
        receipt: asyncio.Future[None],
        address: str,
        header: TensorHeader,
        wire_bytes: int,
        error: SwarmError | None,
    ) -> None:
        self._traffic.sent(address, header.kind, wire_bytes, frames.uncompressed_bytes(header))
        if error is None:
            receipt.set_result(None)
        else:
            receipt.set_exception(error)


# Sessions -------------------------------------------------------------------------------------------------------------


class SimSchedulerLink:
    """SchedulerLink within a SimNetwork."""

    def __init__(self, network: SimNetwork, owner: str, address: str) -> None:
        self._network = network
        self._owner = owner
        self._address = address
        self._closed = False

    async def attach(self, events: AsyncIterator[Event]) -> AsyncGenerator[tuple[int, Command], None]:
        handler = await self._dial()
        session = _Session(self._network, self._owner, self._address)
        session.start(handler, events)
        try:
            async for epoch, command in session.commands:
                yield epoch, command
        finally:
            session.sever(SchedulerUnreachable("the link was closed"))

    async def store(self, header: StoreHeader, payload: bytes | memoryview) -> str:
        content = memoryview(payload)
        if content.nbytes != header.total_bytes:
            raise ValueError(f"the header says {header.total_bytes} bytes, the payload has {content.nbytes}")
        handler = await self._dial()
        storing = self._network.spawn(
            self._store(handler, header, bytes(content)), f"store from {self._owner}", to=self._address
        )
        try:
            await asyncio.wait({storing})
        finally:
            storing.cancel()
        if storing.cancelled():
            raise SchedulerUnreachable(f"{self._address} does not answer: the connection broke")
        return storing.result()

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        handler = await self._dial()
        arriving: Pipe[bytes] = Pipe(INBOX_LIMIT)
        sending = self._network.spawn(
            self._send_chunks(handler, request, arriving), f"fetch by {self._owner}", to=self._address
        )
        try:
            async for chunk in exactly(request, arriving):
                yield chunk
        finally:
            sending.cancel()

    async def close(self) -> None:
        self._closed = True
        self._network.cut(self._owner, self._address)

    async def _dial(self) -> SessionHandler:
        await asyncio.sleep(self._network.delay())
        handler = self._network.handler_at(self._address)
        if handler is None or self._closed:
            raise SchedulerUnreachable(f"{self._address} does not answer")
        return handler

    async def _store(self, handler: SessionHandler, header: StoreHeader, content: bytes) -> str:
        async def chunks() -> AsyncGenerator[bytes, None]:
            for start in range(0, len(content), frames.CHUNK_BYTES):
                await asyncio.sleep(self._network.delay())
                yield content[start : start + frames.CHUNK_BYTES]

        try:
            sha256 = await handler.store(header, whole(header, chunks()))
        except Exception as error:
            raise public_error(error) from error
        await asyncio.sleep(self._network.delay())
        return sha256

    async def _send_chunks(self, handler: SessionHandler, request: FetchRequest, arriving: Pipe[bytes]) -> None:
        try:
            async with aclosing(handler.fetch(request)) as chunks:
                async for chunk in chunks:
                    await asyncio.sleep(self._network.delay())
                    await arriving.put(chunk)
            arriving.end()
        except asyncio.CancelledError:
            arriving.fail(SchedulerUnreachable(f"{self._address} does not answer: the connection broke"))
            raise
        except Exception as error:
            arriving.fail(public_error(error))


class _Session:
    """One attached stage server.

    events -> send -> up -> move -> inbox -> handler -> write -> down -> move -> commands
    """

    def __init__(self, network: SimNetwork, owner: str, address: str) -> None:
        self.owner = owner
        self.address = address
        self.commands: Pipe[tuple[int, Command]] = Pipe(INBOX_LIMIT)
        self._network = network
        self._up: Pipe[tuple[float, Event | bytes]] = Pipe(INBOX_LIMIT)
        self._down: Pipe[tuple[float, tuple[int, Command] | bytes]] = Pipe(INBOX_LIMIT)
        self._inbox: Pipe[Event] = Pipe(INBOX_LIMIT)
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False

    def start(self, handler: SessionHandler, events: AsyncIterator[Event]) -> None:
        self._network.opened(self)
        name = f"session of {self.owner}"
        works = (self._send(events), self._move_up(), self._serve(handler), self._move_down())
        self._tasks = [self._network.spawn(work, name) for work in works]

    def sever(self, error: SwarmError) -> None:
        """The connection is gone, from whichever side."""
        if self._over:
            return
        self._over = True
        self._network.counts.sessions_broken += self.commands.error is None and not self.commands.ended
        self._network.ended(self)
        self.commands.fail(error)
        for task in self._tasks:
            task.cancel()  # the handler's own: `serve_session` lets it see the break first

    async def _send(self, events: AsyncIterator[Event]) -> None:
        try:
            async for event in events:
                content = to_event(event).SerializeToString() if self._network.encodes else event
                await self._up.put((self._arrival(), content))
        except Exception as error:
            self.commands.fail(error)
            self.sever(SchedulerUnreachable("the link was closed"))
        else:
            self._up.end()

    async def _move_up(self) -> None:
        async for at_s, content in self._up:
            await self._wait_until(at_s)
            event = from_event(parse(session_pb2.Event, content)) if isinstance(content, bytes) else content
            await self._inbox.put(event)
        await asyncio.sleep(self._network.delay())
        self._inbox.end()

    async def _serve(self, handler: SessionHandler) -> None:
        try:
            await serve_session(handler, self._inbox, self._write)
        except Exception as error:
            self._down.fail(public_error(error))
        else:
            self._down.end()

    async def _write(self, epoch: int, command: Command) -> None:
        content = to_command(epoch, command).SerializeToString() if self._network.encodes else (epoch, command)
        await self._down.put((self._arrival(), content))

    async def _move_down(self) -> None:
        try:
            async for at_s, content in self._down:
                await self._wait_until(at_s)
                await self.commands.put(
                    from_command(parse(session_pb2.Command, content)) if isinstance(content, bytes) else content
                )
        except SwarmError as error:
            await asyncio.sleep(self._network.delay())
            self.commands.fail(error)
        else:
            await asyncio.sleep(self._network.delay())
            self.commands.end()

    def _arrival(self) -> float:
        return asyncio.get_running_loop().time() + self._network.delay()

    async def _wait_until(self, at_s: float) -> None:
        """The reader of a direction waits for one message at a time, so none overtakes another."""
        self._network.counts.messages += 1
        await asyncio.sleep(max(0.0, at_s - asyncio.get_running_loop().time()))
