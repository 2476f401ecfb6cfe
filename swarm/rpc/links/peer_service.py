"""Tensors and state from neighbours: the gRPC side of the dialled stage server.

    stream ──gate──▶ frames ──▶ Assembler ──admit──▶ receive() ──▶ receipt
                       └──copied from the sender's memory, where a frame says so (memory.py)
                       └──so many bytes have come──▶
    Pull   ──gate──▶ give() ──▶ chunks, as the caller's acknowledgements leave room (swarm/rpc/window.py)

An answer that broke off is kept for a while, and goes on from where its caller says. The ports, and the dialling side,
are in peers.py. Decision: docs/decisions/117.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from typing import Final, TypeAlias, TypeVar

import grpc
import grpc.aio

from swarm.errors import CorruptFrame, DeadlinePassed, Refused, RetryElsewhere, SwarmError
from swarm.rpc import passes
from swarm.rpc.channel import LEAVES_S_MAX, MAX_MESSAGE_BYTES, answering, public_error, reply_with
from swarm.rpc.guard import CALLER, check_caller
from swarm.rpc.links import frames
from swarm.rpc.links.memory import TAKEN_MAX, FileCount, TakenMemory
from swarm.rpc.links.peers import METHOD, PULL, SERVICE, Moved, NoTraffic, StateDonor, TensorReceiver, Traffic
from swarm.rpc.links.state import ALIVE, state_chunks
from swarm.rpc.mapping import from_message, parse
from swarm.rpc.passes import Gate
from swarm.rpc.window import Window
from swarm.types import PeerId
from swarm.wire import frame_pb2
from swarm.wire.messages import Boundary, Pass, StateReply, StateRequest, TensorHeader

MAX_RECEIVING: Final = 64  # tensors of one stream that `receive` works on
PULLS_MAX: Final = 16  # answers that this process holds at a time
PULLS_OF_HOST_MAX: Final = 8
PULL_S_MIN: Final = 10.0  # a caller says what it asks for within that
ALIVE_S: Final = 0.5  # after which the waiting peer hears that this process lives
KEPT_S, KEPT_MAX, KEPT_BYTES_MAX = 60.0, 8, 64 << 20  # answers that broke off
WINDOWS_KEPT_MAX = 64  # of callers that may ask for more, KEPT_S each
# Before compression: no link is measured by such tensors (stage_server/brain/link_codecs).
SMALL_BYTES: Final = 16 << 10
RECEIPT_S: Final = 0.005  # how long the receipt of a small one, or how much has come, may wait for others

_Context: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]


def add_peer_service(
    server: grpc.aio.Server,
    receiver: TensorReceiver,
    traffic: Traffic | None = None,
    donor: StateDonor | None = None,
    gate: Gate | None = None,
) -> None:
    """Serve `receiver`, and `donor` if there is one, to neighbours that dial with `GrpcPeerLinks`.

    Without a gate every caller that gets this far is let in.
    """
    service = _PeerService(receiver, traffic or NoTraffic(), donor, gate)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        METHOD: grpc.stream_stream_rpc_method_handler(service.exchange),
        PULL: grpc.stream_stream_rpc_method_handler(service.pull),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class _PeerService:
    def __init__(self, receiver: TensorReceiver, traffic: Traffic, donor: StateDonor | None, gate: Gate | None) -> None:
        self._receiver = receiver
        self._traffic = traffic
        self._donor = donor
        self._gate = gate
        self._pulls: Counter[str] = Counter()  # under way, by the caller's host
        self._taken = FileCount(TAKEN_MAX)
        self._kept = _Kept()
        self._windows: dict[PeerId, tuple[Window, float]] = {}  # that have learned of the line, and since when

    async def pull(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        """A part of the state, in chunks. A caller that does not read loses its place."""
        async with answering(context), self._entered(context, pulls=True) as shown:
            try:
                async with asyncio.timeout(PULL_S_MIN):
                    asking = parse(frame_pb2.Asking, await anext(requests))
            except TimeoutError:
                raise DeadlinePassed(f"nothing was asked for within {PULL_S_MIN:g} s") from None
            except StopAsyncIteration:
                raise CorruptFrame("a pull asks for nothing") from None
            request = from_message(StateRequest, asking.request)
            _check_sender(shown, request)
            if self._donor is None:
                raise Refused("this process has no state to give")
            host = context.peer().rpartition(":")[0]
            if self._pulls.total() >= PULLS_MAX or self._pulls[host] >= PULLS_OF_HOST_MAX:
                raise RetryElsewhere("as many as this process serves at a time are being served already")
            self._pulls[host] += 1
            try:
                now_s, held_bytes = asyncio.get_running_loop().time(), asking.held_bytes
                kept = self._kept.take(request, asking.checksum, now_s) if held_bytes else None
                if kept is None or held_bytes > kept[0].total_bytes:
                    alive = partial(reply_with, context, ALIVE)
                    kept, held_bytes = await _while_alive(self._donor.give(request), alive), 0
                reply, payload = kept
                try:
                    await self._give(requests, context, request.sender, reply, payload, held_bytes)
                except BaseException:
                    self._kept.keep(request, reply, payload, asyncio.get_running_loop().time())
                    raise
            finally:
                self._pulls[host] -= 1
                if not self._pulls[host]:
                    del self._pulls[host]
            self._traffic.sent(request.sender, "state", reply.total_bytes, reply.total_bytes)

    async def _give(
        self,
        requests: AsyncIterator[bytes],
        context: _Context,
        to: PeerId,
        reply: StateReply,
        payload: bytes | memoryview,
        held_bytes: int,
    ) -> None:
        """Send an answer; a caller's next one begins with the window that this one ends with."""
        now_s = asyncio.get_running_loop().time
        window, since_s = self._windows.pop(to, (None, 0.0))
        if window is None or now_s() - since_s > KEPT_S:
            window = Window(now_s())
        await _give(requests, context, window, reply, payload, held_bytes)
        window.restart(now_s(), has_ended=True)
        self._windows[to] = window, now_s()
        while len(self._windows) > WINDOWS_KEPT_MAX:
            del self._windows[next(iter(self._windows))]

    async def exchange(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        """One neighbour's stream. A frame that cannot be read ends it, since its tensor is unknown."""
        answers = _PeerAnswers(context)
        room = asyncio.Semaphore(MAX_RECEIVING)
        entered = self._entered(context, pulls=False)
        async with answering(context), entered as shown, asyncio.TaskGroup() as tasks, answers:
            assembler = frames.Assembler(partial(self._admit, shown))
            with closing(TakenMemory(self._taken)) as memory:
                async for message in requests:
                    answers.came(len(message), tasks)
                    for frame in _filled(message, memory):
                        if frame.offer is not None:
                            await answers.send(frame.sequence, _taken(memory, frame.offer))
                            continue
                        if frame.is_probe:
                            await answers.tell()
                            continue
                        try:
                            tensor = assembler.add(frame)
                        except Exception as error:
                            await answers.send(frame.sequence, public_error(error))
                            continue
                        if tensor is not None:
                            if room.locked():
                                await _while_alive(room.acquire(), answers.tell)
                            else:
                                await room.acquire()
                            answers.owed += 1
                            tasks.create_task(self._take(tensor, answers, room))

    @asynccontextmanager
    async def _entered(self, context: _Context, *, pulls: bool) -> AsyncIterator[Pass | None]:
        """Pass the gate, if there is one; gives the content of the caller's pass."""
        if self._gate is None:
            yield None
            return
        caller = CALLER.get()
        name = None if caller is None else caller.principal.name
        async with self._gate.enter(passes.shown(context.invocation_metadata()), name, pulls=pulls) as shown:
            yield shown

    def _admit(self, shown: Pass | None, header: TensorHeader) -> Moved | None:
        _check_sender(shown, header)
        return self._receiver.admit(header)

    async def _take(self, tensor: frames.Tensor, answers: _PeerAnswers, room: asyncio.Semaphore) -> None:
        try:
            error = await take(self._receiver, self._traffic, tensor)
            answers.owed -= 1
            hurry = error is not None or not _is_small(tensor.header)
            await answers.send(tensor.sequence, error, hurry=hurry, in_group=True)
        finally:
            room.release()


def _check_sender(shown: Pass | None, message: TensorHeader | StateRequest) -> None:
    """Refused if a message names another sender, or another job, than certificate and pass do."""
    check_caller(message.sender)
    if shown is None:
        return
    if (message.sender, message.incarnation, message.job) != (shown.peer, shown.incarnation, shown.job):
        raise Refused(f"{shown.peer} has no pass to speak in the name of {message.sender}")


def _filled(message: bytes, memory: TakenMemory) -> Iterator[frames.RawFrame]:
    """The frames of a message; a payload in memory is copied when its frame's turn has come.

    Payloads in memory count like payloads in the message, so a small message costs no more copying than a large one.
    """
    left_bytes = MAX_MESSAGE_BYTES - len(message)
    for frame in map(frames.decode, frames.unpack(message)):
        if frame.extent is None:
            yield frame
            continue
        left_bytes -= frame.extent[1]
        if left_bytes < 0:
            raise CorruptFrame(f"a message has more than {MAX_MESSAGE_BYTES} bytes, those in memory included")
        yield frame.filled(memory.read(*frame.extent))


def _taken(memory: TakenMemory, offer: memoryview) -> SwarmError | None:
    """Take the sender's memory; gives why not. CorruptFrame, which ends the stream, if it is no offer."""
    try:
        memory.take(bytes(offer))
    except CorruptFrame:
        raise
    except Refused as error:
        return error
    return None


def _is_small(header: TensorHeader) -> bool:
    """Whether it is a small boundary tensor, for whose receipt nothing waits."""
    return isinstance(header, Boundary) and frames.uncompressed_bytes(header) <= SMALL_BYTES


async def take(receiver: TensorReceiver, traffic: Traffic, tensor: frames.Tensor) -> SwarmError | None:
    """Hand a complete tensor to the receiver; gives the error for the sender, None if all is well."""
    header = tensor.header
    traffic.received(header.sender, frames.kind_of(header), tensor.wire_bytes, frames.uncompressed_bytes(header))
    try:
        await receiver.receive(header, tensor.payload)
    except Exception as error:
        return public_error(error)
    return None


class _PeerAnswers:
    """The receipts of one stream; gRPC allows one write at a time, and waiting receipts go together."""

    def __init__(self, context: _Context) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._waiting: list[frame_pb2.Receipt] = []
        self._soon = False  # a call waits for others
        self._came_bytes = self._told_bytes = 0  # of the stream's messages
        self._telling: asyncio.TimerHandle | None = None
        self._is_told = False  # a task waits for its turn to say how much has come
        self.owed = 0  # tensors that the receiver works on

    async def __aenter__(self) -> None:
        """Until it is left, tasks of a group around it may write `in_group`."""

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Send nothing further. If the stream ends early, let leave what a task writes now (see reply_with): a bare
        write costs a tenth less of what a small tensor does."""
        if self._telling is not None:
            self._telling.cancel()
        if error is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVES_S_MAX), self._lock:
                    pass

    async def send(
        self, sequence: int, error: SwarmError | None, *, hurry: bool = True, in_group: bool = False
    ) -> None:
        """Write a receipt, perhaps along with others; without hurry another call may do so, up to RECEIPT_S later."""
        receipt = frame_pb2.Receipt(sequence=sequence)
        if error is not None:
            receipt.error_code = error.code
            receipt.error_message = error.message
        self._waiting.append(receipt)
        if not hurry:
            if self._soon:
                return
            self._soon = True
            await asyncio.sleep(RECEIPT_S)
            self._soon = False
        async with self._lock:
            if not self._waiting:
                return
            if self.owed:
                await asyncio.sleep(0)  # others that came in the same message are about to be done
            await self._write(in_group=in_group)

    def came(self, size_bytes: int, tasks: asyncio.TaskGroup) -> None:
        """A message has come: the sender hears of it with a receipt, or soon."""
        self._came_bytes += size_bytes
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(RECEIPT_S, self._due, tasks)

    async def tell(self, *, in_group: bool = False) -> None:
        """Say how much has come, even if that is nothing more: this process lives."""
        async with self._lock:
            await self._write(in_group=in_group)

    def _due(self, tasks: asyncio.TaskGroup) -> None:
        self._telling = None
        if self._told_bytes < self._came_bytes and not self._is_told:  # one is enough: its caller may read nothing
            self._is_told = True
            tasks.create_task(self.tell(in_group=True))

    async def _write(self, *, in_group: bool) -> None:
        receipts, self._waiting, self._is_told = self._waiting, [], False
        self._told_bytes = self._came_bytes
        told = frame_pb2.Receipts(receipts=receipts, received_bytes=self._told_bytes)
        try:
            write = self._context.write if in_group else partial(reply_with, self._context)
            await write(told.SerializeToString())
        except Exception as error:
            # Done or broken: the sender is gone, and nobody would read this.
            if not (self._context.done() or isinstance(error, grpc.aio.InternalError)):
                raise


class _Kept:
    """Answers that broke off, kept so that their callers can go on where they were."""

    def __init__(self) -> None:
        self._answers: dict[tuple[StateRequest, str], tuple[StateReply, bytes | memoryview, float]] = {}

    def keep(self, request: StateRequest, reply: StateReply, payload: bytes | memoryview, now_s: float) -> None:
        self._forget(now_s)
        if 0 < reply.total_bytes <= KEPT_BYTES_MAX:
            self._answers[request, reply.checksum] = reply, payload, now_s + KEPT_S
        while len(self._answers) > KEPT_MAX or self._bytes() > KEPT_BYTES_MAX:
            del self._answers[next(iter(self._answers))]

    def take(self, request: StateRequest, checksum: str, now_s: float) -> tuple[StateReply, bytes | memoryview] | None:
        """Remove and return the answer to this request with this checksum, if it is still here."""
        self._forget(now_s)
        found = self._answers.pop((request, checksum), None)
        return None if found is None else found[:2]

    def _bytes(self) -> int:
        return sum(reply.total_bytes for reply, _, _ in self._answers.values())

    def _forget(self, now_s: float) -> None:
        self._answers = {key: answer for key, answer in self._answers.items() if answer[2] > now_s}


_Made = TypeVar("_Made")


async def _while_alive(waiting: Awaitable[_Made], tell: Callable[[], Awaitable[None]]) -> _Made:
    """Wait, and `tell` the caller now and then that this process lives."""
    task = asyncio.ensure_future(waiting)
    try:
        while not (await asyncio.wait({task}, timeout=ALIVE_S))[0]:
            await tell()
        return task.result()
    finally:
        task.cancel()


async def _give(
    requests: AsyncIterator[bytes],
    context: _Context,
    window: Window,
    reply: StateReply,
    payload: bytes | memoryview,
    held_bytes: int,
) -> None:
    """Send an answer from byte `held_bytes` on; DeadlinePassed if its caller acknowledges nothing for too long."""
    loop = asyncio.get_running_loop()
    heard, arrived_bytes = asyncio.Event(), 0

    async def listen() -> None:
        nonlocal arrived_bytes
        async for data in requests:
            now_bytes = parse(frame_pb2.Asking, data).received_bytes
            window.acknowledged(now_bytes - arrived_bytes, loop.time())
            arrived_bytes = now_bytes
            heard.set()

    async def wait() -> None:
        heard.clear()
        try:
            async with asyncio.timeout(max(0.0, window.dead_in_s(loop.time()))):
                await heard.wait()
        except TimeoutError:
            raise DeadlinePassed(f"the answer was not read for {window.patience_s:.3g} s") from None

    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(listen())
        for chunk in state_chunks(reply, payload, held_bytes, lambda: window.message_bytes or window.piece_bytes):
            window.sent(len(chunk), loop.time())
            await reply_with(context, chunk)
            while not window.is_open:
                await wait()
        while window.unacknowledged_bytes:
            await wait()
        listening.cancel()
