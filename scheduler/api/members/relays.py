"""Relays of the swarm: keeps the list and their traffic, and tells all stage servers of them.

A relay attaches like a stage server and is none: it is in no membership, so no job can be given to it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from scheduler.api.members.passes import Passes
from scheduler.api.sessions import HEARTBEAT_S, Connections
from scheduler.brain.explain.facts import Fact
from swarm.errors import IncompatibleVersion, Refused, RetryElsewhere, SwarmError
from swarm.limits import (
    MEMBERS_MAX,
    RELAY_ROWS_MAX,
    RELAYS_MAX,
    SESSIONS_OF_ONE_AT_ONCE,
    SESSIONS_OF_ONE_PER_S,
    Buckets,
)
from swarm.process.logs import Logger
from swarm.rpc import channel
from swarm.rpc.guard import CALLER
from swarm.rpc.mapping import to_message
from swarm.text import printable, size
from swarm.types import PROTOCOL_VERSION, PeerId
from swarm.wire import jobs_pb2, relay_pb2, relay_pb2_grpc
from swarm.wire.messages import CutOff, RelayAt, UseRelays, Welcome

HELLO_S_MAX = 10.0
TEXT_MAX = 128  # characters of a name that a relay reports
STATE = "relay"  # of relays, where stage servers have theirs

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(eq=False, slots=True)
class _Attached:
    at: RelayAt
    product: str
    since_unix_s: float
    commands: asyncio.Queue[Welcome | CutOff | None] = field(default_factory=asyncio.Queue)


@channel.answers
class RelayDesk(relay_pb2_grpc.RelaysServicer):
    """Serves relays, and answers for them."""

    def __init__(
        self, passes: Passes, connections: Connections, log: Logger, wall_s: Callable[[], float] = time.time
    ) -> None:
        self._passes, self._connections, self._log, self._wall_s = passes, connections, log, wall_s
        self._attached: dict[str, _Attached] = {}
        self._is_any_here = False
        self._beginning = Buckets(SESSIONS_OF_ONE_PER_S, SESSIONS_OF_ONE_AT_ONCE, MEMBERS_MAX)
        self._carried: OrderedDict[tuple[str, str, str, str], int] = OrderedDict()  # (relay, job, from, to) -> bytes
        passes.on_cut_off = self._cut_off
        self.on_change: Callable[[bool], None] = lambda here: None  # hears whether any relay is here

    async def Attach(
        self, request_iterator: AsyncIterator[relay_pb2.RelayUp], context: Context
    ) -> AsyncIterator[relay_pb2.RelayDown]:
        caller = CALLER.get()
        assert caller is not None, "the guard stands before every call"
        name = caller.principal.name
        one = await self._hello(name, request_iterator)
        if (older := self._attached.get(name)) is not None:
            older.commands.put_nowait(None)
        self._attached[name] = one
        one.commands.put_nowait(self._passes.welcome(PeerId(name), HEARTBEAT_S))
        self._log.info("relay attached", relay=name, address=one.at.address)
        self._tell()
        reading = asyncio.create_task(self._read(one, request_iterator))
        try:
            while (command := await one.commands.get()) is not None:
                body = to_message(command)
                is_welcome = isinstance(command, Welcome)
                yield relay_pb2.RelayDown(welcome=body) if is_welcome else relay_pb2.RelayDown(cut_off=body)
        finally:
            reading.cancel()
            if self._attached.get(name) is one:
                del self._attached[name]
                self._log.warning("relay is gone", relay=name)
                self._tell()

    def revoke(self, name: str) -> None:
        """The relay is no member any more."""
        if (one := self._attached.get(name)) is not None:
            one.commands.put_nowait(None)

    def close(self) -> None:
        """End every session, as the scheduler stops."""
        for relay in self._attached.values():
            relay.commands.put_nowait(None)

    # Answers -----------------------------------------------------------------------------------------------------

    def views(self) -> list[jobs_pb2.PeerView]:
        """Relays as `swarm peers` lists them."""
        return [
            jobs_pb2.PeerView(
                id=relay.at.name,
                state=STATE,
                since_unix_s=relay.since_unix_s,
                address=relay.at.address,
                device=STATE,
                stage=-1,
                product=relay.product,
            )
            for relay in self._attached.values()
        ]

    def facts(self, peer: PeerId) -> list[Fact]:
        """The bytes that relays carried to and from the peer."""
        to, of = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for (relay, job, sender, receiver), size_bytes in self._carried.items():
            if receiver == peer:
                to[relay, job] += size_bytes
            if sender == peer:
                of[relay, job] += size_bytes
        return [
            Fact(
                "relay",
                f"through relay {relay}, job {job}: {size(to[relay, job])} came to it, {size(of[relay, job])} from it",
                {"received_bytes": to[relay, job], "sent_bytes": of[relay, job]},
            )
            for relay, job in sorted({*to, *of})
        ]

    # Inside ------------------------------------------------------------------------------------------------------

    async def _hello(self, name: str, messages: AsyncIterator[relay_pb2.RelayUp]) -> _Attached:
        try:
            async with asyncio.timeout(HELLO_S_MAX):
                first = await anext(aiter(messages))
        except (StopAsyncIteration, TimeoutError):
            raise Refused("a relay begins with its Hello") from None
        hello = first.hello
        if hello.protocol != PROTOCOL_VERSION:
            raise IncompatibleVersion(
                f"this scheduler speaks protocol {PROTOCOL_VERSION}, relay {name} speaks {hello.protocol}",
                hint="install the scheduler's version of swarm on the relay",
            )
        if name not in self._attached and len(self._attached) >= RELAYS_MAX:
            raise RetryElsewhere(f"{RELAYS_MAX} relays are here already")
        if not self._beginning.take(name, asyncio.get_running_loop().time()):  # all stage servers hear of each
            raise RetryElsewhere(f"too many sessions of relay {name} begin", hint="it dials again by itself")
        at = RelayAt(name, channel.check_address(hello.address))
        return _Attached(at, printable(hello.product[:TEXT_MAX]), self._wall_s())

    async def _read(self, one: _Attached, messages: AsyncIterator[relay_pb2.RelayUp]) -> None:
        try:
            async for message in messages:
                for row in message.carried:
                    self._count(one.at.name, row)
        except SwarmError as error:
            self._log.warning("relay lost", relay=one.at.name, reason=error.message)
        finally:
            one.commands.put_nowait(None)

    def _count(self, relay: str, row: relay_pb2.Carried) -> None:
        names = (row.job, row.sender, row.to)
        if any(len(name) > TEXT_MAX for name in names):
            return
        key = (relay, printable(row.job), printable(row.sender), printable(row.to))
        self._carried[key] = self._carried.pop(key, 0) + row.size_bytes
        if len(self._carried) > RELAY_ROWS_MAX:
            self._carried.popitem(last=False)

    def _tell(self) -> None:
        """All stage servers: these relays are here."""
        relays = tuple(sorted((relay.at for relay in self._attached.values()), key=lambda at: at.name))
        self._passes.relays = relays
        for peer, _ in self._connections.all():
            self._connections.send(peer, UseRelays(relays))
        if bool(relays) != self._is_any_here:
            self._is_any_here = bool(relays)
            self.on_change(self._is_any_here)

    def _cut_off(self, order: CutOff) -> None:
        for relay in self._attached.values():
            relay.commands.put_nowait(order)
