"""The network of a simulation: the same ports as gRPC, between objects in one process.

Tensors travel each on its own: after a random delay, so they overtake each other, and some arrive twice. Session
messages are delayed too but keep their order in each direction, as a stream does. Everything passes through the real
encoding (unless `codec` is off), and everything that was done to the traffic is counted: a test that wants disorder can
assert that it got some. What links do to traffic is in weather.py; a process (processes.py) that listens here is served
in its own tasks, so that a frozen one answers nothing. All chance comes from the generator that is handed in.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from swarm.errors import CorruptFrame, PeerUnavailable, SchedulerUnreachable, SwarmError
from swarm.messages import Command, Event, FetchRequest, StateReply, StateRequest, StoreHeader, TensorHeader
from swarm.rpc import frames
from swarm.rpc.channel import public_error
from swarm.rpc.mapping import from_command, from_event, parse, to_command, to_event
from swarm.rpc.peers import NoTraffic, StateDonor, TensorReceiver, Traffic, collect, state_chunks, take
from swarm.rpc.session import INBOX_LIMIT, Pipe, SessionHandler, exactly, serve_session, whole
from swarm.sim.processes import Process
from swarm.sim.weather import DELAY_S, DETECT_S, Weather
from swarm.wire import session_pb2

T = TypeVar("T")


@dataclass(slots=True)
class Counts:
    """What the network did so far. Tensors, except where it says otherwise."""

    delivered: int = 0  # handed to a receiver, duplicates included
    reordered: int = 0  # delivered after one that was sent later on the same link
    duplicated: int = 0  # delivered once more
    refused: int = 0  # by their receiver
    lost: int = 0  # they, or their receipts
    unreachable: int = 0  # nobody listened, or the receiver was killed meanwhile
    messages: int = 0  # session messages, both directions
    sessions_broken: int = 0


class Observer:
    """Sees what passes, in the order in which it happens, and may kill a process at exactly that point."""

    def sending(self, owner: str, address: str, header: TensorHeader) -> None:
        """`owner` hands a tensor to its link."""

    def delivered(self, owner: str, address: str, header: TensorHeader, error: SwarmError | None) -> None:
        """The receiver took a tensor, or refused it; `owner` does not know yet."""

    def event_leaves(self, owner: str, event: Event) -> None:
        """A stage server hands an event to its session."""

    def event_arrived(self, owner: str, event: Event) -> None:
        """The scheduler's side of the session has the event."""

    def command_arrived(self, owner: str, epoch: int, command: Command) -> None:
        """The stage server's side of the session has the command, the stage server has not seen it."""


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
        weather: Weather | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.counts = Counts()
        self.weather = weather or Weather(rng, delay_s=delay_s, duplicate_ratio=duplicate_ratio)
        self.weather.on_broken = self.break_links
        self.observer = observer or Observer()
        self._reorder = reorder
        self._codec = codec
        self._context = contextvars.copy_context()  # that of no process, as a rule
        self._processes: dict[str, Process | None] = {}
        self._flights: dict[_Flight, None] = {}
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
        self._processes[address] = Process.current()

    def add_handler(self, address: str, handler: SessionHandler) -> None:
        """Let a scheduler listen for sessions at `address`."""
        self._handlers[address] = handler
        self._processes[address] = Process.current()

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

    def freeze(self, address: str) -> None:
        """The process at `address` is stopped (SIGSTOP); after DETECT_S those who talk to it find it dead."""
        process = self._processes[address]
        assert process is not None, f"{address} is no process"
        process.freeze()
        this = process.freezes

        def detect() -> None:
            if process.is_frozen and process.freezes == this:
                for flight in [flight for flight in self._flights if address in (flight.owner, flight.address)]:
                    flight.break_off()
                for session in [session for session in self._sessions if address in (session.owner, session.address)]:
                    session.sever(SchedulerUnreachable(f"{session.address} does not answer: the connection broke"))

        asyncio.get_running_loop().call_later(DETECT_S, detect, context=self._context)

    def break_links(self, one: str, other: str) -> None:
        """Whatever the two have open with each other breaks; what is under way between them may still arrive."""
        for flight in [flight for flight in self._flights if {flight.owner, flight.address} == {one, other}]:
            flight.break_off()
        self.cut(one, other)
        self.cut(other, one)

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

    def delay(self, sender: str = "", receiver: str = "") -> float:
        return self.weather.delay(sender, receiver)

    def spawn(
        self, work: Coroutine[Any, Any, T], name: str, to: str | None = None, within: str | None = None
    ) -> asyncio.Task[T]:
        """Run `work` beside its caller, as part of the process at `within` or of none.

        Cancelled when the network closes, `to` is killed or the process is.
        """
        process = self._processes.get(within) if within is not None else None
        context = process.context if process is not None else self._context.copy()
        task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        if to is not None:
            tasks_to = self._tasks_to[to]
            tasks_to[task] = None
            task.add_done_callback(lambda done: tasks_to.pop(done, None))
        return task

    async def reaches(self, owner: str, address: str) -> bool:
        """Whether a connection from `owner` to `address` comes about; takes its time to find out."""
        await asyncio.sleep(self.delay(owner, address))
        passes = await self.weather.passage(owner, address) and await self.weather.passage(address, owner)
        process = self._processes.get(address)
        if passes and process is not None and process.is_frozen:
            await asyncio.sleep(DETECT_S)
            return not process.is_frozen
        return passes

    def departs(self, flight: _Flight) -> None:
        self._flights[flight] = None

    def landed(self, flight: _Flight) -> None:
        self._flights.pop(flight, None)

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


class _Flight:
    """One tensor on its way, and what its sender will be told."""

    def __init__(self, owner: str, address: str, receipt: asyncio.Future[None] | None) -> None:
        self.owner = owner
        self.address = address
        self.receipt = receipt  # of the first copy; the others have none
        self.broken = False

    def break_off(self) -> None:
        """The connection broke: the sender is told so now, whatever becomes of the tensor."""
        self.broken = True
        if self.receipt is not None and not self.receipt.done():
            self.receipt.set_exception(PeerUnavailable(f"{self.address} does not answer: the connection broke"))


class SimPeerLinks:
    """PeerLinks within a SimNetwork."""

    def __init__(self, network: SimNetwork, owner: str, traffic: Traffic) -> None:
        self._network = network
        self._owner = owner
        self._traffic = traffic
        self._lanes: dict[str, _Lane] = defaultdict(_Lane)
        self._receipts: dict[asyncio.Future[None], None] = {}
        self._process = Process.current()
        self._closed = False

    async def send(self, address: str, header: TensorHeader, payload: bytes | memoryview) -> None:
        try:
            await self._send(address, header, payload)
        except CorruptFrame:
            await self._send(address, header, payload)

    async def pull(self, address: str, request: StateRequest, limit_bytes: int) -> tuple[StateReply, memoryview]:
        if self._closed:
            raise PeerUnavailable(f"{address}: the links of this process are closed")
        if self._process is not None and self._process.is_dead:
            raise asyncio.CancelledError
        network = self._network
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flight = _Flight(self._owner, address, broken)
        network.departs(flight)
        pulling = network.spawn(self._pull(address, request, limit_bytes), f"pull by {self._owner}", to=address)
        try:
            either: tuple[asyncio.Future[Any], ...] = (pulling, broken)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pulling.cancel()
            network.landed(flight)
        if broken.done():
            broken.result()
        if pulling.cancelled():
            raise PeerUnavailable(f"{address} does not answer: the connection broke")
        reply, payload = pulling.result()
        self._traffic.received(address, "state", reply.total_bytes, reply.total_bytes)
        return reply, payload

    async def _pull(self, address: str, request: StateRequest, limit_bytes: int) -> tuple[StateReply, memoryview]:
        network, weather = self._network, self._network.weather
        reached = await network.reaches(self._owner, address)
        donor = network.donor_at(address)
        if donor is None or not reached:
            raise PeerUnavailable(f"{address} does not answer")
        giving = network.spawn(_given(donor, request), f"giving at {address}", within=address)
        try:
            await asyncio.wait({giving})
        finally:
            giving.cancel()
        if giving.cancelled():  # the donor was killed over it
            raise PeerUnavailable(f"{address} does not answer: the connection broke")
        reply, payload = giving.result()

        async def chunks() -> AsyncGenerator[bytes, None]:
            for chunk in state_chunks(reply, payload):
                await asyncio.sleep(weather.delay_in_stream(address, self._owner))
                if not await weather.passage(address, self._owner):
                    raise PeerUnavailable(f"{address} does not answer: the connection broke")
                yield chunk

        return await collect(chunks(), limit_bytes)

    async def close(self) -> None:
        self._closed = True
        for receipt in list(self._receipts):
            if not receipt.done():
                receipt.set_exception(PeerUnavailable("the links of this process are closed"))

    async def _send(self, address: str, header: TensorHeader, payload: bytes | memoryview) -> None:
        if self._closed:
            raise PeerUnavailable(f"{address}: the links of this process are closed")
        self._network.observer.sending(self._owner, address, header)
        if self._process is not None and self._process.is_dead:
            raise asyncio.CancelledError
        lane = self._lanes[address]
        lane.sent += 1
        # Chunks are made now: the payload may change as soon as this call ends, a duplicate may come later.
        chunks = list(frames.split(lane.sent, header, payload))
        receipt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receipts[receipt] = None
        for copy, late_s in enumerate(self._network.weather.lateness()):
            flight = _Flight(self._owner, address, receipt if copy == 0 else None)
            self._network.spawn(
                self._deliver(flight, lane, lane.sent, header, chunks, late_s),
                f"tensor {lane.sent} from {self._owner} to {address}",
                to=address,
            )
        try:
            await receipt
        finally:
            del self._receipts[receipt]

    async def _deliver(
        self, flight: _Flight, lane: _Lane, number: int, header: TensorHeader, chunks: list[bytes], late_s: float
    ) -> None:
        network, counts, weather = self._network, self._network.counts, self._network.weather
        owner, address = flight.owner, flight.address
        error: SwarmError | None = PeerUnavailable(f"{address} does not answer")
        before, arrived = lane.last_arrival, asyncio.Event()
        lane.last_arrival = arrived
        network.departs(flight)
        try:
            await asyncio.sleep(late_s + weather.delay(owner, address))
            if network.keeps_order and before is not None:
                await before.wait()
            arrived.set()
            passed = await weather.passage(owner, address)
            if not passed or weather.loses():
                counts.lost += 1
                await asyncio.sleep(weather.report_s())
                return
            listening = network.receiver_at(address)
            if listening is None:
                counts.unreachable += 1
                return
            counts.delivered += 1
            counts.duplicated += flight.receipt is None
            counts.reordered += number < lane.newest_delivered
            lane.newest_delivered = max(lane.newest_delivered, number)
            handing = network.spawn(
                self._hand_over(*listening, number, header, chunks), f"receiving at {address}", within=address
            )
            try:
                await asyncio.wait({handing})
            finally:
                handing.cancel()
            if handing.cancelled():  # the receiver was killed over it
                counts.unreachable += 1
                return
            outcome = handing.result()
            counts.refused += outcome is not None
            network.observer.delivered(owner, address, header, outcome)
            await asyncio.sleep(weather.delay(address, owner))
            if weather.loses() or not await weather.passage(address, owner):
                counts.lost += 1
                await asyncio.sleep(weather.report_s())
                return
            error = outcome
        except asyncio.CancelledError:
            counts.unreachable += 1
            error = PeerUnavailable(f"{address} does not answer: the connection broke")
            raise
        finally:
            arrived.set()
            network.landed(flight)
            if flight.receipt is not None and not flight.receipt.done():
                self._settle(flight.receipt, address, header, sum(map(len, chunks)), error)

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


async def _given(donor: StateDonor, request: StateRequest) -> tuple[StateReply, bytes | memoryview]:
    try:
        return await donor.give(request)
    except Exception as error:
        raise public_error(error) from error


class SimSchedulerLink:
    """SchedulerLink within a SimNetwork."""

    def __init__(self, network: SimNetwork, owner: str, address: str) -> None:
        self._network = network
        self._owner = owner
        self._address = address
        self._process = Process.current()
        self._closed = False

    async def attach(self, events: AsyncIterator[Event]) -> AsyncGenerator[tuple[int, Command], None]:
        handler = await self._dial()
        if self._process is not None and self._process.is_dead:
            raise asyncio.CancelledError
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
            self._store(handler, header, bytes(content)),
            f"store from {self._owner}",
            to=self._address,
            within=self._address,
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
            self._send_chunks(handler, request, arriving),
            f"fetch by {self._owner}",
            to=self._address,
            within=self._address,
        )
        # Also if the task was cancelled before its first step; after an end this changes nothing.
        broken = SchedulerUnreachable(f"{self._address} does not answer: the connection broke")
        sending.add_done_callback(lambda _: arriving.fail(broken))
        try:
            async for chunk in exactly(request, arriving):
                yield chunk
        finally:
            sending.cancel()

    async def close(self) -> None:
        self._closed = True
        self._network.cut(self._owner, self._address)

    async def _dial(self) -> SessionHandler:
        reached = await self._network.reaches(self._owner, self._address)
        handler = self._network.handler_at(self._address)
        if handler is None or self._closed or not reached:
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
        self._process = Process.current()

    def start(self, handler: SessionHandler, events: AsyncIterator[Event]) -> None:
        self._network.opened(self)
        name = f"session of {self.owner}"
        self._tasks = [
            self._network.spawn(self._send(events), name, within=self.owner),
            self._network.spawn(self._move_up(), name),
            self._network.spawn(self._serve(handler), name, within=self.address),
            self._network.spawn(self._move_down(), name),
        ]

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
                self._network.observer.event_leaves(self.owner, event)
                if self._process is not None and self._process.is_dead:
                    return
                content = to_event(event).SerializeToString() if self._network.encodes else event
                await self._up.put((self._arrival(self.owner, self.address), content))
        except Exception as error:
            self.commands.fail(error)
            self.sever(SchedulerUnreachable("the link was closed"))
        else:
            self._up.end()

    async def _move_up(self) -> None:
        async for at_s, content in self._up:
            if not await self._travelled(at_s, self.owner, self.address):
                return
            event = from_event(parse(session_pb2.Event, content)) if isinstance(content, bytes) else content
            self._network.observer.event_arrived(self.owner, event)
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
        await self._down.put((self._arrival(self.address, self.owner), content))

    async def _move_down(self) -> None:
        try:
            async for at_s, content in self._down:
                if not await self._travelled(at_s, self.address, self.owner):
                    return
                arrived = from_command(parse(session_pb2.Command, content)) if isinstance(content, bytes) else content
                self._network.observer.command_arrived(self.owner, *arrived)
                await self.commands.put(arrived)
        except SwarmError as error:
            await asyncio.sleep(self._network.delay())
            self.commands.fail(error)
        else:
            await asyncio.sleep(self._network.delay())
            self.commands.end()

    def _arrival(self, sender: str, receiver: str) -> float:
        return asyncio.get_running_loop().time() + self._network.weather.delay_in_stream(sender, receiver)

    async def _travelled(self, at_s: float, sender: str, receiver: str) -> bool:
        """Whether the next message got through; else the connection is broken.

        The reader of a direction waits for one message at a time, so none overtakes another.
        """
        self._network.counts.messages += 1
        await asyncio.sleep(max(0.0, at_s - asyncio.get_running_loop().time()))
        passed = await self._network.weather.passage(sender, receiver)
        if not passed:
            self.sever(SchedulerUnreachable(f"{self.address} does not answer: the connection broke"))
        return passed
