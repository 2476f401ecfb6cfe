"""Sessions with stage servers: connections, commands down, events up.

Membership (pure) says what a connection, a silence or a new incarnation means. `Connections` holds the queues and knows
nothing of jobs, so jobs can send before any peer has dialled; `Sessions` reads events and tells jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import unquote

from scheduler.brain.fleet.membership import CALIBRATING, Membership
from scheduler.brain.members.enrolment import Member
from scheduler.jobs.listener import JobTransfer, PeerListener
from scheduler.jobs.ports import SchedulerPorts
from swarm.errors import ClocksDiffer, IncompatibleVersion, Refused, RetryElsewhere, StaleMessage, SwarmError
from swarm.limits import (
    INCARNATION_AHEAD_S,
    LINE_BYTES_MAX,
    PEERS_MAX,
    SESSIONS_AT_ONCE,
    SESSIONS_OF_ONE_AT_ONCE,
    SESSIONS_OF_ONE_PER_S,
    SESSIONS_PER_S,
    Bucket,
    Buckets,
)
from swarm.listening import names_the_dialler
from swarm.pki.names import Role
from swarm.process.lifecycle import own_addresses
from swarm.process.logs import Logger
from swarm.rpc.guard import check_caller
from swarm.rpc.session import CONNECTION
from swarm.text import UNIX_S_MAX, is_address, is_loopback, utc
from swarm.types import NO_JOB, PROTOCOL_VERSION, PeerId, PeerState
from swarm.wire.messages import Command, Event, FetchRequest, Hello, StoreHeader, Welcome

# A peer that leaves this many commands unread has stopped reading.
COMMANDS_WAITING_MAX = 8192
HELLO_S_MAX = 10.0
TICK_S = 0.25
HEARTBEAT_S = 1.0  # how often a stage server says that it is there
CHUNK_BYTES = 1 << 20  # of a file by which a line is measured
STOOD_STILL_S = 0.5  # a tick that is late by more than this says that this process did not run


class PassDesk(Protocol):
    """Gives stage servers passes for the stages that they serve."""

    def welcome(self, peer: PeerId, heartbeat_s: float) -> Welcome:
        """The first command of a session."""

    def renew(self, peer: PeerId) -> None:
        """Give the peer a pass for the stage that it serves now, if any."""

    def cut_off(self, peer: PeerId) -> None:
        """The peer was revoked: everybody is to end its streams, and to take none with the passes that it has."""


@dataclass(slots=True)
class Session:
    """One connection of a stage server, and the commands that wait to go down it; None ends it."""

    incarnation: int
    connection: str = ""  # on which it was dialled, "" in simulation
    commands: asyncio.Queue[Command | None] = field(default_factory=lambda: asyncio.Queue(COMMANDS_WAITING_MAX))
    is_over: bool = False  # then no event of it counts, although it is open until its peer has read that

    def end(self) -> None:
        """Make the command side return; waiting commands are dropped."""
        self.is_over = True
        while self.commands.full():
            self.commands.get_nowait()
        self.commands.put_nowait(None)


class Connections:
    """The present session of each stage server. Jobs send commands here; `Sessions` carries them down."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._sessions: dict[PeerId, Session] = {}
        self._peers: dict[str, PeerId] = {}  # by connection

    def get(self, peer: PeerId) -> Session | None:
        return self._sessions.get(peer)

    def all(self) -> list[tuple[PeerId, Session]]:
        return list(self._sessions.items())

    def open(self, peer: PeerId, incarnation: int, connection: str = "") -> Session:
        """Begin a session; this ends the peer's previous one."""
        if (previous := self._sessions.get(peer)) is not None:
            previous.end()
        session = self._sessions[peer] = Session(incarnation, connection)
        self._peers[connection] = peer
        return session

    def at(self, connection: str) -> PeerId | None:
        """Whose session is on this connection."""
        peer = self._peers.get(connection)
        session = self._sessions.get(peer) if peer is not None else None
        return peer if session is not None and session.connection == connection else None

    def close(self, peer: PeerId, session: Session) -> bool:
        """Forget a session; False if the peer has begun another one meanwhile."""
        if self._peers.get(session.connection) == peer:
            del self._peers[session.connection]
        if (newer := self._sessions.get(peer)) is not session:
            if newer is not None:
                self._peers[newer.connection] = peer
            return False
        del self._sessions[peer]
        return True

    def send(self, peer: PeerId, command: Command) -> None:
        """Queue a command; without a session it is lost, as the peer is about to be declared gone."""
        session = self._sessions.get(peer)
        if session is None:
            return
        try:
            session.commands.put_nowait(command)
        except asyncio.QueueFull:
            self._log.warning("peer does not read its commands", peer=peer, waiting=COMMANDS_WAITING_MAX)
            session.end()


@dataclass(frozen=True, slots=True)
class Sessions:
    """All sessions of one scheduler start; the handler behind the Session service."""

    _ports: SchedulerPorts
    _membership: Membership
    _sessions: Connections
    _listener: PeerListener
    _transfer: JobTransfer
    _tasks: asyncio.TaskGroup
    _passes: PassDesk | None = None  # none: with --insecure
    _beginning: Bucket = field(default_factory=lambda: Bucket(SESSIONS_PER_S, SESSIONS_AT_ONCE), init=False)
    # Over plaintext a caller has as many names as he likes.
    _beginning_of: Buckets = field(
        default_factory=lambda: Buckets(SESSIONS_OF_ONE_PER_S, SESSIONS_OF_ONE_AT_ONCE, PEERS_MAX), init=False
    )

    async def attach(self, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
        """Serve one session: the first event is a Hello, then events go to the listener and commands come out."""
        hello = await self._hello(events)
        check_caller(hello.peer)
        loop = asyncio.get_running_loop()
        connection = CONNECTION.get()
        self._check(hello, connection, loop.time())
        for transition in self._membership.hello(hello, loop.time()):
            self._listener.on_transition(transition)
        session = self._sessions.open(hello.peer, hello.incarnation, connection)
        passes, welcome = self._passes, Welcome(hello.peer, HEARTBEAT_S)
        session.commands.put_nowait(welcome if passes is None else passes.welcome(hello.peer, HEARTBEAT_S))
        self._ports.log.info("peer attached", peer=hello.peer, address=hello.address, device=hello.device)
        self._listener.on_event(hello.peer, hello)
        if passes is not None:
            passes.renew(hello.peer)  # it may go on with a stage that it holds
        reader = self._tasks.create_task(self._read(hello.peer, session, events))
        try:
            while (command := await session.commands.get()) is not None:
                yield self._ports.stores.database.epoch, command
        finally:
            reader.cancel()
            if self._sessions.close(hello.peer, session):
                for transition in self._membership.disconnected(hello.peer, hello.incarnation, loop.time()):
                    self._listener.on_transition(transition)

    async def held(self, header: StoreHeader) -> int:
        """How many first bytes of the file are here already; as `store`, only for a peer that serves that stage."""
        self._check_store(header)
        return await self._transfer.held(header)

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        """Take a stage's weights from a peer that has a session and serves that stage."""
        self._check_store(header)
        if header.job == NO_JOB:
            self._check_line(header.peer, header.total_bytes)
            left_bytes = header.total_bytes
            async for chunk in chunks:
                self._check_line(header.peer, header.total_bytes)  # it measures still
                if (left_bytes := left_bytes - len(chunk)) < 0:
                    raise Refused(f"{header.peer} sent more than the {header.total_bytes} bytes that it named")
            return "measured"
        return await self._transfer.store(header, chunks)

    def _check_store(self, header: StoreHeader) -> None:
        check_caller(header.peer)
        session = self._sessions.get(header.peer)
        connection = CONNECTION.get()
        if session is None or (session.incarnation, session.connection) != (header.incarnation, connection):
            raise StaleMessage(f"{header.peer} has no session; attach before storing")
        known = self._membership.get(header.peer)
        if known is None or known.job != header.job or (header.job and known.stage != header.stage):
            raise Refused(f"{header.peer} does not serve stage {header.stage} of job {header.job}")

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        """Give a stage server that has a session a part of a file that its job starts from."""
        if connection := CONNECTION.get():
            peer = self._sessions.at(connection)
            known = self._membership.get(peer) if peer is not None else None
            if known is None or known.job != request.job:
                raise Refused(f"whoever asks has no session, or does not serve job {request.job}")
            if request.job == NO_JOB:
                self._check_line(known.hello.peer, request.stop - request.start)
                for start in range(request.start, request.stop, CHUNK_BYTES):
                    yield bytes(min(CHUNK_BYTES, request.stop - start))
                return
        async with aclosing(self._transfer.fetch(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _check_line(self, peer: PeerId, size_bytes: int) -> None:
        """Refused unless an idle stage server measures its line now."""
        known = self._membership.get(peer)
        if known is None or known.reason != CALIBRATING or size_bytes > LINE_BYTES_MAX:
            raise Refused(f"{peer} was not asked to measure its line with {size_bytes} bytes")

    async def watch(self) -> None:
        """Let membership notice silence, forever."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            late_s = loop.time() - due_s
            if late_s > STOOD_STILL_S:
                self._ports.log.warning("the scheduler stood still", seconds=round(late_s, 3))
                self._membership.stood_still(late_s, loop.time())
            for transition in self._membership.tick(loop.time(), self._listener.fellows_of):
                self._listener.on_transition(transition)
                if transition.after is PeerState.GONE:
                    self.drop(transition.peer)

    def revoke(self, peer: PeerId, reason: str) -> None:
        """The peer is no member any more: end its session, and let others do its work."""
        for transition in self._membership.revoked(peer, asyncio.get_running_loop().time(), reason):
            self._listener.on_transition(transition)
        self.drop(peer)
        if self._passes is not None:
            self._passes.cut_off(peer)

    def replaced(self, member: Member) -> None:
        """The keys of a member are revoked: a session that began with one of them could save and fetch nothing."""
        if member.role is Role.STAGE_SERVER:
            self.drop(PeerId(member.name))

    def drop(self, peer: PeerId) -> None:
        """End the session of a peer that is gone, so that it dials again if it still can."""
        session = self._sessions.get(peer)
        if session is not None:
            session.end()

    def close(self) -> None:
        """End every session, as the scheduler stops."""
        for _, session in self._sessions.all():
            session.end()

    def _check(self, hello: Hello, connection: str, now_s: float) -> None:
        """Refuse a session that would harm others: over plaintext no caller proves its identity.

        A process that was started again, or that dials again after its connection broke, is not held up: its older
        session has ended by then, is on the same machine, or falls silent within seconds.
        """
        if hello.incarnation > (self._ports.wall_s() + INCARNATION_AHEAD_S) * 1e9:
            started, here = utc(min(hello.incarnation / 1e9, UNIX_S_MAX)), utc(self._ports.wall_s())
            raise ClocksDiffer(
                f"{hello.peer} was started in the future: at {started} by its clock, here it is {here}",
                hint="set the clock that is wrong, then start it again",
            )
        host = hello.address.rpartition(":")[0]
        if is_address(hello.address) and names_the_dialler(host):
            # With --insecure one on loopback elsewhere stays, and gets no stage beside others (members/reach.py).
            is_alone = is_loopback(host) and (self._passes is None or is_here(connection, own_addresses()))
            if not is_alone:
                raise Refused(
                    f"{hello.peer} says that it listens at {host[:64]}, which is another machine for each that dials",
                    hint="start it with --listen or --announce HOST:PORT, at an address that the others reach",
                )
        known, session = self._membership.get(hello.peer), self._sessions.get(hello.peer)
        is_heard = known is not None and known.state not in (PeerState.SUSPECT, PeerState.GONE)
        if session is not None and is_heard:
            same_machine = _host(session.connection) == _host(connection)
            if session.incarnation != hello.incarnation or not same_machine:
                raise StaleMessage(
                    f"{hello.peer} is attached already, and its process answers",
                    hint="two processes run under one identity: stop one, or give each its own --data-dir and token",
                )
        if known is None and self._membership.count >= PEERS_MAX:
            raise Refused(f"{PEERS_MAX} stage servers are known already", hint="stop some, or use another scheduler")
        if not self._beginning_of.take(hello.peer, now_s):
            raise RetryElsewhere(f"too many sessions of {hello.peer} begin", hint="it dials again by itself")
        if not self._beginning.take(now_s):
            raise RetryElsewhere("too many sessions begin at once", hint="the stage server dials again by itself")

    async def _hello(self, events: AsyncIterator[Event]) -> Hello:
        try:
            async with asyncio.timeout(HELLO_S_MAX):
                first = await anext(events)
        except (StopAsyncIteration, TimeoutError):
            raise Refused("a session begins with Hello") from None
        if not isinstance(first, Hello):
            raise Refused(f"a session begins with Hello, not {type(first).__name__}")
        if first.protocol != PROTOCOL_VERSION:
            raise IncompatibleVersion(
                f"this scheduler speaks protocol {PROTOCOL_VERSION}, {first.peer} (swarm {first.product}) speaks "
                f"{first.protocol}",
                hint="install the scheduler's version of swarm on the stage server",
            )
        return first

    async def _read(self, peer: PeerId, session: Session, events: AsyncIterator[Event]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for event in events:
                if session.is_over:
                    return
                if isinstance(event, Hello):
                    raise Refused("a session has one Hello")
                for transition in self._membership.heard(peer, loop.time()):
                    self._listener.on_transition(transition)
                self._listener.on_event(peer, event)
        except SwarmError as error:
            self._ports.log.warning("session broken", peer=peer, reason=error.message)
        finally:
            session.end()


def _host(connection: str) -> str:
    """Whence a connection was dialled, without the port."""
    return connection.rpartition(":")[0]


def host_of(peer: str) -> str:
    """The address of a caller; empty if it is not known."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]").removeprefix("::ffff:") if kind in ("ipv4", "ipv6") else ""


def is_here(peer: str, own_addresses: Collection[str]) -> bool:
    """Whether the caller is on this machine, also where it dials by another of its addresses; so is one not known."""
    host = host_of(peer)
    return not host or is_loopback(host) or host in own_addresses
