"""Tensors from stage server to stage server: the ports, and the gRPC side of the dialling stage server.

    send() --> queue --> writer --frames--> reader --> Assembler --> receive()        one stream per neighbour,
    send() <-- future <-- reader <--receipts-- lock <-----------------+               dialled by the sender

The writer alternates between the frames of the tensors under way, so a small tensor does not wait for a large one.
Tensors under way to one neighbour are bounded by the sender (`MAX_BYTES_IN_FLIGHT`) and by the receiver. Bytes on the
line are bounded by a window (`swarm/rpc/window.py`): the receiver says how many have come. So the buffers of a slow
link hold what it carries in about a second. A link that makes progress is alive, and a neighbour is dead if it answers
nothing for longer than its link usually takes. Where nothing is under way, the sender asks (`PROBE_S`).

A link that breaks fails the tensors under way on it and is forgotten; the next `send` dials again. A link that was
dialled with an older pass is replaced, and ends once all tensors under way on it are answered. Large payloads lie in
memory that a receiver on the same host reads (memory.py). The dialled side is in peer_service.py.

A pull is a stream of its own with a window of its own. If it breaks, the next one goes on from the byte that came.

Not chosen: gRPC's pings as the sign of life, because a ping waits behind all that lies in buffers, and its patience is
fixed when the channel is made. They only keep the way open through routers. Decision: docs/decisions/082.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import grpc
import grpc.aio

from swarm.errors import ERROR_BY_CODE, CorruptFrame, PeerUnavailable, SwarmError, leaves
from swarm.pki.identity import Wallet
from swarm.rpc import passes
from swarm.rpc.channel import check_address, public_error, translate, write
from swarm.rpc.links import frames
from swarm.rpc.links.dialling import Connection, Dialler, Paths
from swarm.rpc.links.frames import Parts
from swarm.rpc.links.memory import FileCount, LentMemory, lent_files
from swarm.rpc.links.state import Arriving
from swarm.rpc.mapping import parse, to_message
from swarm.rpc.window import PIECE_BYTES_MIN, Window
from swarm.types import PeerId
from swarm.wire import frame_pb2
from swarm.wire.messages import StateReply, StateRequest, TensorHeader

SERVICE: Final = "swarm.wire.Peer"
METHOD: Final = "Exchange"
PULL: Final = "Pull"
MAX_BYTES_IN_FLIGHT: Final = 64 << 20  # per neighbour; a larger tensor goes alone
SHUNNED_S: Final = 60.0  # that nobody of a revoked name is dialled: orders from before may still name it
RECEIPTS_BYTES_MAX: Final = 1 << 20  # of one message; honest ones have as many as tensors are received at a time
PATIENCE_S_MIN: Final = 2.5  # with a neighbour on a quick link that answers nothing: like that with a session
PROBE_S: Final = 0.5  # after which a link on which nothing is under way is tried
_LEAST_CHARGE_BYTES: Final = 1 << 10  # so that tensors without payload are bounded too

_Call: TypeAlias = grpc.aio.StreamStreamCall[bytes, bytes]
Moved: TypeAlias = Callable[[], None]


class PeerLinks(Protocol):
    """The sending side: one process's links to its neighbours."""

    async def send(
        self,
        address: str,
        header: TensorHeader,
        payload: bytes | memoryview,
        *,
        to: PeerId | None = None,
        moved: Moved | None = None,
    ) -> None:
        """Deliver one tensor to the stage server at `address`; returns once its receiver accepted it.

        Where processes prove who they are, `to` must answer there; None: any stage server of the swarm. `moved` is
        called whenever more of what is on its way to that neighbour has arrived.

        Tensors of concurrent calls may arrive in any order, and one may arrive twice. If the receiver reports
        corruption, the tensor is sent once more. `payload` must not change until `send` returns or, if it was
        cancelled, until the link is gone. Raises PeerUnavailable (no answer, broken connection), or the receiver's
        error: Refused, StaleMessage, CorruptFrame (twice in a row), RetryElsewhere, ... The deadline is the caller's
        (`asyncio.timeout`).
        """

    async def pull(
        self, address: str, request: StateRequest, limit_bytes: int, *, to: PeerId | None = None
    ) -> tuple[StateReply, memoryview]:
        """A part of a stage's state from the replica at `address`, whole and checked, of at most `limit_bytes`.

        Raises PeerUnavailable, CorruptFrame, or the replica's error: StaleMessage (it does not serve that stage),
        RetryElsewhere (it is busy), Refused. The deadline is the caller's.
        """

    def cut_off(self, peer: PeerId) -> None:
        """Break off all links to a revoked stage server, and do not dial its name for SHUNNED_S.

        Tensors on their way to it and pulls from it fail with PeerUnavailable.
        """

    async def close(self) -> None:
        """Break all links; tensors in flight fail with PeerUnavailable."""


class StateDonor(Protocol):
    """The answering side of `pull`: a replica."""

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes | memoryview]:
        """The part that was asked for; StaleMessage, RetryElsewhere or Refused."""


class TensorReceiver(Protocol):
    """The receiving side: takes the tensors that arrive at a stage server."""

    def admit(self, header: TensorHeader) -> Moved | None:
        """Check a header before its payload is accepted; raise a SwarmError to refuse the tensor.

        What it gives is called whenever a part of the payload has come, but for the last. `total_bytes` will be
        delivered: compare it with the bytes that dtype, shape and codec need.
        """

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        """Take a complete, checked tensor; returning is the receipt, a SwarmError is sent to the sender.

        May run for several tensors at once; not returning holds the sender back. `payload` is read-only and owned by
        the receiver from here on.
        """


class Traffic(Protocol):
    """Counts bytes: `wire_bytes` as framed, `tensor_bytes` as the same tensor uncompressed (float32 or float64)."""

    def sent(self, address: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None: ...

    def received(self, peer: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None: ...


class NoTraffic:
    def sent(self, address: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None:
        pass

    def received(self, peer: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None:
        pass


# The sending side ----------------------------------------------------------------------------------------------------


class GrpcPeerLinks:
    """PeerLinks over gRPC: one stream per address, dialled by the first `send`."""

    def __init__(
        self,
        traffic: Traffic | None = None,
        *,
        max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
        on_wire: Callable[[bytes], bytes] | None = None,
        wallet: Wallet | None = None,
        paths: Paths | None = None,
    ) -> None:
        """`on_wire` sees each outgoing frame and may change it, to prove that the receiver notices.

        With an identity in `wallet`, links to other machines prove who is at either end. Its pass goes with each call.
        `paths` lead through relays where an address does not answer.
        """
        self._on_wire = on_wire
        self._wallet = wallet or Wallet()
        self._dialler = Dialler(self._wallet, paths)
        self._traffic = traffic or NoTraffic()
        self._max_bytes_in_flight = max_bytes_in_flight
        self._lent = lent_files()
        self._links: dict[tuple[str, PeerId | None], _Link] = {}
        self._retired: dict[_Link, PeerId | None] = {}  # which end by themselves
        self._pulls: dict[asyncio.Timeout, PeerId | None] = {}  # under way
        self._shunned: dict[PeerId, float] = {}  # until when
        self._closed = False

    async def send(
        self,
        address: str,
        header: TensorHeader,
        payload: bytes | memoryview,
        *,
        to: PeerId | None = None,
        moved: Moved | None = None,
    ) -> None:
        try:
            await self._link(address, to).send(header, payload, moved)
        except CorruptFrame:
            await self._link(address, to).send(header, payload, moved)

    async def pull(
        self, address: str, request: StateRequest, limit_bytes: int, *, to: PeerId | None = None
    ) -> tuple[StateReply, memoryview]:
        self._check(address, to)
        until_cut_off = asyncio.timeout(None)
        self._pulls[until_cut_off] = to
        try:
            async with until_cut_off:
                arriving = Arriving(limit_bytes)
                while not arriving.is_whole:
                    await self._pull(address, request, arriving, to)
        except TimeoutError:
            if not until_cut_off.expired():
                raise
            raise PeerUnavailable(f"{to} was revoked") from None
        finally:
            del self._pulls[until_cut_off]
        reply, payload = arriving.result()
        self._traffic.received(address, "state", reply.total_bytes, reply.total_bytes)
        return reply, payload

    async def _pull(self, address: str, request: StateRequest, arriving: Arriving, to: PeerId | None) -> None:
        """Go on with a pull until all has come, or it breaks off and something new had come.

        A connection of its own: a joiner asks each replica seldom, and the state must not delay tensors.
        """
        loop, held_bytes = asyncio.get_running_loop(), arriving.held_bytes
        connection = await self._dialler.dial(address, to)
        try:
            method: Any = connection.channel.stream_stream(f"/{SERVICE}/{PULL}")
            call: _Call = method(metadata=passes.metadata(self._wallet.pass_token))
            await call.wait_for_connection()
            with suppress(asyncio.InvalidStateError):  # the call has ended: reading tells why
                await write(call, arriving.asking(to_message(request)))
            patience, heard_s, received_bytes = Window(loop.time()), loop.time(), 0
            while True:
                async with asyncio.timeout(max(0.0, patience.dead_in_s(loop.time()))):
                    data = await call.read()
                if not isinstance(data, bytes):
                    break
                received_bytes += len(data)
                patience.measured(loop.time() - heard_s, loop.time())
                heard_s = loop.time()
                arriving.add(data)
                with suppress(asyncio.InvalidStateError):
                    await write(call, frame_pb2.Asking(received_bytes=received_bytes).SerializeToString())
            arriving.end()
        except TimeoutError:
            error: SwarmError = PeerUnavailable(f"{address} said nothing for {patience.patience_s:.3g} s")
        except grpc.RpcError as failure:
            error = translate(failure, address, unavailable=PeerUnavailable)
        else:
            return
        finally:
            await connection.close()
        if type(error) is PeerUnavailable:
            self._dialler.broke(connection)
            if arriving.held_bytes > held_bytes:
                return
        raise error from None

    def cut_off(self, peer: PeerId) -> None:
        now_s = asyncio.get_running_loop().time()
        self._shunned = {name: until_s for name, until_s in self._shunned.items() if until_s > now_s}
        self._shunned[peer] = now_s + SHUNNED_S
        for pull in [pull for pull, to in self._pulls.items() if to == peer and not pull.expired()]:
            pull.reschedule(0.0)
        for link in [link for (_, to), link in self._links.items() if to == peer]:
            link.cut()
        for link in [link for link, to in self._retired.items() if to == peer]:
            link.cut()

    async def close(self) -> None:
        self._closed = True
        for link in [*self._links.values(), *self._retired]:
            await link.close()
        self._links.clear()

    def _check(self, address: str, to: PeerId | None) -> None:
        if self._closed:
            raise PeerUnavailable(f"{address}: the links of this process are closed")
        if to is not None and asyncio.get_running_loop().time() < self._shunned.get(to, 0.0):
            raise PeerUnavailable(f"{to} was revoked")

    def _link(self, address: str, to: PeerId | None) -> _Link:
        self._check(address, to)
        if address:  # else relays lead there
            check_address(address)
        link, token = self._links.get((address, to)), self._wallet.pass_token
        if link is not None and link.error is None and link.token != token:
            self._retired[link] = to
            link.retire(self._retired.pop)
            link = None
        if link is None or link.error is not None:
            name, limit = address or f"{to} through relays", self._max_bytes_in_flight
            dial = partial(self._dialler.dial, address, to)
            link = _Link(name, self._traffic, limit, self._on_wire, dial, token, self._dialler.broke, self._lent)
            self._links[address, to] = link
        return link


@dataclass(slots=True)
class _Outgoing:
    """A tensor on its way; `receipt` is done when the receiver answered or the link broke."""

    sequence: int
    header: TensorHeader
    content: Iterator[Parts]
    charge_bytes: int
    receipt: asyncio.Future[None]
    moved: Moved | None = None
    wire_bytes: int = 0


class _Link:
    """One stream to one neighbour; once broken (`error` is set) it stays broken."""

    def __init__(
        self,
        address: str,
        traffic: Traffic,
        max_bytes_in_flight: int,
        on_wire: Callable[[bytes], bytes] | None,
        dial: Callable[[], Awaitable[Connection]],
        token: bytes,
        broke: Callable[[Connection], None],
        lent: FileCount,
    ) -> None:
        self._on_wire = on_wire
        self._dial = dial
        self._broke = broke
        self.token = token
        self._retires = False
        self.error: SwarmError | None = None
        self._address = address
        self._traffic = traffic
        self._max_bytes = max_bytes_in_flight
        self._free_bytes = max_bytes_in_flight
        self._sequence = 0
        self._admission: deque[int] = deque()  # sequences that wait for free bytes, in order
        self._queue: deque[int] = deque()  # sequences that wait for the writer
        self._unanswered: dict[int, _Outgoing] = {}
        self._memory = LentMemory(lent)
        self._offered: int | None = None  # the sequence of the memory's offer, until it is answered
        self._room_bytes = 0  # of the message that is being made
        self._is_full = False  # the writer waits until more has arrived
        self._window = Window(asyncio.get_running_loop().time(), patience_s_min=PATIENCE_S_MIN)
        self._arrived_bytes = 0  # of this stream, as the neighbour says
        self._probes = False
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._serve(), name=f"link to {address}")

    async def send(self, header: TensorHeader, payload: bytes | memoryview, moved: Moved | None) -> None:
        if self.error is not None:
            raise _again(self.error)
        sequence = self._sequence = self._sequence + 1
        lend = partial(self._memory.write, sequence)
        content = frames.split(sequence, header, payload, lend, lambda: max(self._room_bytes, PIECE_BYTES_MIN))
        charge_bytes = min(max(frames.payload_bytes(header), _LEAST_CHARGE_BYTES), self._max_bytes)
        receipt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unanswered[sequence] = _Outgoing(sequence, header, content, charge_bytes, receipt, moved)
        self._admission.append(sequence)
        self._admit()
        # If cancelled after the first frame, the rest is still sent: half a tensor would stay open at the receiver.
        await receipt

    def retire(self, ended: Callable[[_Link], object]) -> None:
        """Nothing more is sent: end when all that is under way has been answered, and say so."""
        self._task.add_done_callback(lambda _: ended(self))
        self._retires = True
        self._wake.set()

    def cut(self) -> None:
        """Break now."""
        self._break(PeerUnavailable(f"{self._address}: the link was closed"))
        self._task.cancel()

    async def close(self) -> None:
        self.cut()
        await asyncio.wait({self._task})

    def _admit(self) -> None:
        """Hand the writer the tensors that fit into the bytes in flight; cancelled tensors cost nothing."""
        while self._admission:
            outgoing = self._unanswered[self._admission[0]]
            if outgoing.receipt.cancelled():
                del self._unanswered[self._admission.popleft()]
                continue
            if outgoing.charge_bytes > self._free_bytes:
                return
            self._free_bytes -= outgoing.charge_bytes
            self._queue.append(self._admission.popleft())
            self._wake.set()

    async def _serve(self) -> None:
        """Run the stream until it breaks, then fail everything that waits for a receipt."""
        error: SwarmError = PeerUnavailable(f"{self._address}: the link was closed")
        connection: Connection | None = None
        loop = asyncio.get_running_loop()
        try:
            dialled_s = loop.time()
            connection = await self._dial()
            if connection.is_straight:
                self._memory.begin()
            method: Any = connection.channel.stream_stream(f"/{SERVICE}/{METHOD}")
            call: _Call = method(metadata=passes.metadata(self.token))
            await call.wait_for_connection()
            self._window.measured(loop.time() - dialled_s, loop.time())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(call))
                tasks.create_task(self._read(call))
                tasks.create_task(self._watch())
        except* grpc.RpcError as group:
            failure = next(leaves(group))
            assert isinstance(failure, grpc.RpcError)
            error = translate(failure, self._address, unavailable=PeerUnavailable)
            if connection is not None and type(error) is PeerUnavailable:
                self._broke(connection)
        except* _Silent as group:
            error = PeerUnavailable(str(next(leaves(group))))
            assert connection is not None
            self._broke(connection)
        except* Exception as group:
            error = public_error(group)
        finally:
            self._break(error)
            self._memory.close()
            if connection is not None:
                await connection.close()

    async def _write(self, call: _Call) -> None:
        opened: deque[_Outgoing] = deque()
        while True:
            self._is_full = not self._window.is_open
            batch = [] if self._is_full else self._batch(opened)
            if not batch:
                if self._retires and not self._unanswered:
                    raise PeerUnavailable(f"{self._address}: the link was replaced by one with a newer pass")
                self._wake.clear()
                await self._wake.wait()
                continue
            message = frames.message(batch)
            self._window.sent(len(message), asyncio.get_running_loop().time())
            try:
                await write(call, message)
            except asyncio.InvalidStateError:
                return  # the stream has ended; the reader learns why

    def _batch(self, opened: deque[_Outgoing]) -> list[Parts]:
        """The frames of the next message, of each tensor one in turn, until they have MESSAGE_BYTES."""
        if (offer := self._memory.offer()) is not None:  # alone, as a tensor in company is copied once more
            self._offered = self._sequence = self._sequence + 1
            return [frames.offer(self._offered, offer)]
        if self._probes:
            self._probes = False
            return [frames.PROBE]
        batch: list[Parts] = []
        batch_bytes = 0
        self._room_bytes = self._window.message_bytes or self._window.piece_bytes
        while batch_bytes < frames.MESSAGE_BYTES and self._room_bytes > 0 and len(batch) < frames.MAX_FRAMES:
            self._open(opened)
            if not opened:
                break
            outgoing = opened.popleft()
            if outgoing.wire_bytes and outgoing.sequence not in self._unanswered:
                continue  # refused already: an extent taken now would never be released
            written_bytes = self._memory.written_bytes
            frame = next(outgoing.content, None)
            if frame is None:
                continue  # complete
            if self._on_wire is not None:
                frame = [self._on_wire(b"".join(frame))]
            line_bytes = sum(map(len, frame))
            self._room_bytes -= line_bytes
            frame_bytes = line_bytes + self._memory.written_bytes - written_bytes
            outgoing.wire_bytes += frame_bytes
            batch_bytes += frame_bytes
            batch.append(frame)
            opened.append(outgoing)
        return batch

    def _open(self, opened: deque[_Outgoing]) -> None:
        """Begin with tensors of the queue, as many as may be open; cancelled tensors are never begun."""
        while self._queue and len(opened) < frames.MAX_OPEN_TENSORS:
            sequence = self._queue.popleft()
            outgoing = self._unanswered[sequence]
            if outgoing.receipt.cancelled():
                self._forget(sequence)
            else:
                opened.append(outgoing)

    async def _watch(self) -> None:
        """Break the link once the neighbour has answered nothing for too long; probe it if nothing is under way."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + PROBE_S
            await asyncio.sleep(PROBE_S)
            if loop.time() - due_s > PROBE_S:
                self._window.heard(loop.time())  # this process stood still, and has not read what came
            elif self._window.dead(loop.time()):
                raise _Silent(f"{self._address} has answered nothing for {self._window.patience_s:.3g} s")
            if not self._window.unacknowledged_bytes:
                self._probes = True
                self._wake.set()

    def _heard(self, arrived_bytes: int) -> None:
        """The neighbour says how many bytes of the stream have come."""
        now_s = asyncio.get_running_loop().time()
        if arrived_bytes < self._arrived_bytes:
            raise CorruptFrame(f"{self._address} has received {arrived_bytes} bytes, and had {self._arrived_bytes}")
        more_bytes, self._arrived_bytes = arrived_bytes - self._arrived_bytes, arrived_bytes
        self._window.acknowledged(more_bytes, now_s)
        self._window.heard(now_s)
        if more_bytes:
            if self._is_full:
                self._wake.set()
            for outgoing in self._unanswered.values():
                if outgoing.moved is not None:
                    outgoing.moved()

    async def _read(self, call: _Call) -> None:
        async for data in call:
            if len(data) > RECEIPTS_BYTES_MAX:
                raise CorruptFrame(f"{self._address} answered with {len(data)} bytes at once")
            message = parse(frame_pb2.Receipts, data)
            self._heard(message.received_bytes)
            for receipt in message.receipts:
                if receipt.sequence == self._offered:
                    self._offered = None
                    self._memory.answered(is_taken=not receipt.error_code)
                    continue
                outgoing = self._unanswered.get(receipt.sequence)
                if outgoing is None or not outgoing.wire_bytes:
                    raise CorruptFrame(f"{self._address} answered tensor {receipt.sequence}, which was not sent")
                self._forget(receipt.sequence)
                self._settle(outgoing, receipt)
        raise PeerUnavailable(f"{self._address} ended the stream")

    def _forget(self, sequence: int) -> None:
        self._free_bytes += self._unanswered.pop(sequence).charge_bytes
        self._memory.release(sequence)
        self._admit()
        if self._retires:
            self._wake.set()

    def _settle(self, outgoing: _Outgoing, receipt: frame_pb2.Receipt) -> None:
        header = outgoing.header
        self._traffic.sent(
            self._address, frames.kind_of(header), outgoing.wire_bytes, frames.uncompressed_bytes(header)
        )
        if outgoing.receipt.done():
            return  # cancelled
        if receipt.error_code:
            named = ERROR_BY_CODE.get(receipt.error_code, SwarmError)
            outgoing.receipt.set_exception(named(receipt.error_message))
        else:
            outgoing.receipt.set_result(None)

    def _break(self, error: SwarmError) -> None:
        if self.error is not None:
            return
        self.error = error
        for outgoing in self._unanswered.values():
            if not outgoing.receipt.done():
                outgoing.receipt.set_exception(_again(error))
        self._unanswered.clear()
        self._admission.clear()
        self._queue.clear()


class _Silent(Exception):
    """The neighbour answers nothing any more."""


def _again(error: SwarmError) -> SwarmError:
    return type(error)(error.message, hint=error.hint)
