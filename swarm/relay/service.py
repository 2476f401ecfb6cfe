"""The Relay service: puts stage servers through to each other and carries their bytes, which it cannot read.

    Connect ──requests──▶ Accept's answers
    Connect's answers ◀──requests── Accept        the handler of Connect carries both ways

A message is read when the one before has been written, so HTTP/2's windows are the credit, and a link holds one message
and two windows at a time. A link ends when both directions have, when either caller is gone, after RELAY_IDLE_S_MAX
without a byte, GRACE_S after the pass with which it was dialled, or when either end is revoked.

Decision: docs/decisions/057.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio

from swarm.errors import NotAdmitted, PeerUnavailable, Refused, RoleForbids, SwarmError
from swarm.limits import RELAY_CHUNK_BYTES, RELAY_IDLE_S_MAX
from swarm.pki.names import Role
from swarm.relay.budget import Budget
from swarm.relay.metrics import RelayMetrics
from swarm.relay.switchboard import Listening, Opening, Switchboard
from swarm.rpc import passes
from swarm.rpc.channel import answering, reply_with
from swarm.rpc.guard import CALLER, Caller
from swarm.rpc.links.tunnel import CONNECTION_KEY, OPEN_S_MAX, SERVICE, TO_KEY
from swarm.rpc.mapping import parse
from swarm.types import PeerId
from swarm.wire import relay_pb2
from swarm.wire.messages import CutOff, Pass, Welcome

GRACE_S = 60.0  # that a link goes on after the pass with which it was dialled; then its ends dial anew

_Context: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]
_Used: TypeAlias = tuple[str, PeerId, PeerId]


def may_relay(caller: Caller, method: str) -> None:
    """Only stage servers may call a relay; their passes say which."""
    if caller.principal.role is not Role.STAGE_SERVER:
        raise RoleForbids(f"{caller.principal} is no stage server and may not call {method.rpartition('/')[2]}")


@dataclass(eq=False, slots=True)
class _Link:
    """A link between two callers; `accepted` has the second one's messages, and the context to answer it."""

    opening: Opening
    ends_s: float
    accepted: asyncio.Future[tuple[AsyncIterator[bytes], _Context]]
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class RelayService:
    """Serves Listen, Accept and Connect. Until a scheduler has said whose passes are good, none is."""

    def __init__(
        self,
        cluster: str,
        metrics: RelayMetrics,
        on_bytes: Callable[[bytes], bytes] = lambda payload: payload,
        budget: Budget | None = None,
    ) -> None:
        """`on_bytes` sees all that is carried and may change it, to prove that the ends notice."""
        self._board = Switchboard(cluster)
        self._metrics = metrics
        self._on_bytes = on_bytes
        self._budget = budget or Budget()
        self._key = b""
        self._ahead_s = 0.0  # the scheduler's clock, beyond the event loop's
        self._links: dict[str, _Link] = {}
        self._used: Counter[_Used] = Counter()
        metrics.watch(lambda: len(self._links), lambda: self._board.listeners)

    # What the scheduler says, and hears -------------------------------------------------------------------------

    def welcomed(self, welcome: Welcome) -> None:
        self._key = welcome.pass_key
        self._ahead_s = welcome.unix_s - asyncio.get_running_loop().time()
        for order in welcome.cut_off:
            self.cut_off(order)

    def cut_off(self, order: CutOff) -> None:
        """End what a stage server has here that was revoked."""
        line = self._board.cut_off(order.peer, order.unix_s)
        if line is not None:
            line.openings.put_nowait(None)
        for link in list(self._links.values()):
            if order.peer in (link.opening.shown.peer, link.opening.to):
                link.broken.set()

    def take_used(self) -> Counter[_Used]:
        """Bytes by (job, from, to) since the last call."""
        used, self._used = self._used, Counter()
        return used

    # Calls ------------------------------------------------------------------------------------------------------

    async def listen(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        async with answering(context):
            peer, line = _caller(), Listening()
            older = self._board.listen(peer, line)
            if older is not None:
                older.openings.put_nowait(None)
            await reply_with(context, relay_pb2.ListenDown().SerializeToString())
            reading = asyncio.create_task(self._hear(peer, line, requests))
            try:
                while (opening := await line.openings.get()) is not None:
                    told = relay_pb2.ListenDown(
                        connection=opening.connection, sender=opening.shown.peer, job=opening.shown.job
                    )
                    await reply_with(context, told.SerializeToString())
            finally:
                reading.cancel()
                self._board.hang_up(peer, line)

    async def _hear(self, peer: PeerId, line: Listening, requests: AsyncIterator[bytes]) -> None:
        """The passes of one that listens, as they are renewed."""
        try:
            async for data in requests:
                token = parse(relay_pb2.ListenUp, data).token
                try:
                    self._board.show(peer, line, self._read(token) if token else None, self._now_unix_s())
                except NotAdmitted as error:
                    self._metrics.process.auth_failed(error.code)
        except SwarmError:
            pass
        finally:
            line.openings.put_nowait(None)

    async def connect(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        async with answering(context):
            try:
                shown = self._read(passes.shown(context.invocation_metadata()))
                self._budget.check(shown.job)
                to = PeerId(_metadata(context, TO_KEY))
                opening, line = self._board.connect(_caller(), shown, to, self._now_unix_s())
            except NotAdmitted as error:
                self._metrics.process.auth_failed(error.code)
                raise
            ends_s = shown.expires_unix_s + GRACE_S - self._ahead_s
            link = _Link(opening, ends_s, asyncio.get_running_loop().create_future())
            self._links[opening.connection] = link
            try:
                await context.send_initial_metadata(())  # the relay has heard: the caller may wait for the other end
                line.openings.put_nowait(opening)
                try:
                    async with asyncio.timeout(OPEN_S_MAX):
                        theirs, answers = await link.accepted
                except TimeoutError:
                    raise PeerUnavailable(f"{to} did not accept within {OPEN_S_MAX:g} s") from None
                await reply_with(context, relay_pb2.Bytes().SerializeToString())
                pumps = (
                    self._pump(link, requests, answers, "to_listener"),
                    self._pump(link, theirs, context, "from_listener"),
                )
                await _all(pumps, link.broken, ends_s)
            finally:
                link.ended.set()
                del self._links[opening.connection]
                self._board.ended(opening)

    async def accept(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        """Lend the link this end of it: the handler of the other one does the carrying."""
        async with answering(context):
            opening = self._board.accept(_caller(), _metadata(context, CONNECTION_KEY))
            link = self._links[opening.connection]
            link.accepted.set_result((requests, context))
            try:
                await link.ended.wait()
            finally:
                link.broken.set()  # gRPC ends this call when the caller is gone

    async def _pump(self, link: _Link, source: AsyncIterator[bytes], sink: _Context, direction: str) -> None:
        """Carry one direction to its end."""
        loop = asyncio.get_running_loop()
        shown, peer = link.opening.shown, link.opening.to
        pair = (shown.peer, peer) if direction == "to_listener" else (peer, shown.peer)
        try:
            async with asyncio.timeout(RELAY_IDLE_S_MAX) as idle:
                async for data in source:
                    message = parse(relay_pb2.Bytes, data)
                    size_bytes = len(message.payload)
                    if size_bytes > RELAY_CHUNK_BYTES:
                        raise Refused(f"a message of {size_bytes} bytes; {RELAY_CHUNK_BYTES} are the limit")
                    if pause_s := self._budget.take(shown.job, size_bytes, loop.time()):
                        idle.reschedule(loop.time() + pause_s + RELAY_IDLE_S_MAX)
                        await asyncio.sleep(pause_s)
                    payload = self._on_bytes(message.payload)
                    await sink.write(relay_pb2.Bytes(payload=payload, end=message.end).SerializeToString())
                    self._metrics.carried(direction, size_bytes)
                    self._used[shown.job, *pair] += size_bytes
                    if message.end:
                        return
                    idle.reschedule(loop.time() + RELAY_IDLE_S_MAX)
        except TimeoutError:
            raise PeerUnavailable(f"the link was idle for {RELAY_IDLE_S_MAX:g} s") from None
        except grpc.aio.BaseError:
            pass  # the one to be written to is gone
        raise PeerUnavailable("the link was broken off")

    def _read(self, token: bytes) -> Pass:
        return passes.read(token, self._key)

    def _now_unix_s(self) -> float:
        return asyncio.get_running_loop().time() + self._ahead_s


async def _all(pumps: Iterable[Coroutine[Any, Any, None]], broken: asyncio.Event, ends_s: float) -> None:
    """Until all have ended; PeerUnavailable as soon as one fails, the link is broken, or its time is over."""
    breaking = asyncio.create_task(broken.wait())
    carrying = {asyncio.create_task(pump) for pump in pumps}
    under_way = set(carrying)
    try:
        async with asyncio.timeout_at(ends_s):
            while under_way:
                done, _ = await asyncio.wait({*under_way, breaking}, return_when=asyncio.FIRST_COMPLETED)
                if breaking in done or any(task.cancelled() for task in done):
                    raise PeerUnavailable("the link was broken off")
                for task in done:
                    task.result()
                under_way -= done
    except TimeoutError:
        raise PeerUnavailable("the pass with which the link was dialled has ended") from None
    finally:
        for task in (breaking, *carrying):
            task.cancel()
        await asyncio.wait({breaking, *carrying})


def add_relay_service(server: grpc.aio.Server, service: RelayService) -> None:
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Listen": grpc.stream_stream_rpc_method_handler(service.listen),
        "Accept": grpc.stream_stream_rpc_method_handler(service.accept),
        "Connect": grpc.stream_stream_rpc_method_handler(service.connect),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _caller() -> PeerId:
    caller = CALLER.get()
    assert caller is not None, "the guard stands before every call"
    return PeerId(caller.principal.name)


def _metadata(context: _Context, key: str) -> str:
    value = next((value for name, value in context.invocation_metadata() or () if name == key), "")
    return value if isinstance(value, str) else ""
