"""Sessions and stores between simulated stage servers and their scheduler: SchedulerLink over a Fabric."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from swarm.errors import SchedulerUnreachable, SwarmError
from swarm.rpc.channel import public_error
from swarm.rpc.links import frames
from swarm.rpc.mapping import from_command, from_event, parse, to_command, to_event
from swarm.rpc.session import INBOX_LIMIT, Pipe, SessionHandler, exactly, serve_session
from swarm.types import Pieces
from swarm.wire import session_pb2
from swarm.wire.messages import Command, Event, FetchRequest, StoreHeader
from tests.support.sim.fabric import Fabric
from tests.support.sim.processes import Process


class SimSchedulerLink:
    """The SchedulerLink of one process."""

    def __init__(self, network: Fabric, owner: str, address: str) -> None:
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

    async def store(self, header: StoreHeader, payload: bytes | Pieces) -> str:
        if len(payload) != header.total_bytes:
            raise ValueError(f"the header says {header.total_bytes} bytes, the payload has {len(payload)}")
        handler = await self._dial()
        storing = self._network.spawn(
            self._store(handler, header, payload[:]),
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
            async for chunk in exactly(arriving, request.stop - request.start, request.path, "asked for were"):
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
        async def chunks(held_bytes: int) -> AsyncGenerator[bytes, None]:
            for start in range(held_bytes, len(content), frames.CHUNK_BYTES):
                await asyncio.sleep(self._network.delay())
                yield content[start : start + frames.CHUNK_BYTES]

        try:
            held_bytes = await handler.held(header) if header.sha256 else 0
            weights = exactly(chunks(held_bytes), header.total_bytes, "the weights", "the header says", held_bytes)
            sha256 = await handler.store(header, weights)
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

    def __init__(self, network: Fabric, owner: str, address: str) -> None:
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
