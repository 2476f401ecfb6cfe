"""Faults on purpose: carries out `swarm chaos` on a stage server that was started with --allow-chaos.

    Chaos ──▶ Harm ──┬─ kill, freeze: signals to this process
                     ├─ HarmedDevice: computing takes longer
                     ├─ HarmedLinks, HarmedReceiver: nothing passes to and from a neighbour
                     └─ garble: a byte of a frame is flipped on its way out

Without the flag none of this is built and every order is refused. One fault of a kind at a time: a new order replaces
the old one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import NoReturn, TypeVar

from stage_server.device import Device, Timed
from swarm.errors import PeerUnavailable
from swarm.process.logs import Logger
from swarm.rpc.links.peers import Moved, Neighbour, PeerLinks
from swarm.types import PeerId
from swarm.wire.messages import Chaos, StateReply, StateRequest, TensorHeader

T = TypeVar("T")

# The order's answer has left by then.
KILL_AFTER_S = 0.05
# Nobody answers what is sent into a partition. Keep-alive takes this long to break a silent connection.
UNANSWERED_S = 2.0
ANYBODY = ""


class Harm:
    """The faults of this process that go on now."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self.factor = 1.0  # how many times as long computing takes
        self._cut: tuple[str, str] | None = None  # peer and address that are out of reach; empty: all
        self._one_in = 0  # frames; 0: none is garbled
        self._garbled = 0
        self._rng = Random(0)
        self._ends: dict[str, asyncio.TimerHandle] = {}

    def begin(self, order: Chaos) -> None:
        """Begin a fault; it ends by itself."""
        loop = asyncio.get_running_loop()
        self._log.warning("chaos begins", fault=order.harm, for_s=order.for_s, factor=order.factor)
        self._rng.seed(order.seed)
        match order.harm:
            case "kill":
                loop.call_later(KILL_AFTER_S, os.kill, os.getpid(), signal.SIGKILL)
            case "freeze":
                self._freeze(order.for_s)
            case "slow":
                self.factor = max(1.0, order.factor)
            case "partition":
                self._cut = (order.peer, order.address)
            case "corrupt":
                self._one_in = max(1, round(order.factor))
        if order.harm in self._ends:
            self._ends.pop(order.harm).cancel()
        self._ends[order.harm] = loop.call_later(order.for_s, self._end, order.harm)

    def _end(self, fault: str) -> None:
        match fault:
            case "slow":
                self.factor = 1.0
            case "partition":
                self._cut = None
            case "corrupt":
                self._one_in = 0
        self._log.warning("chaos ends", fault=fault, garbled_frames=self._garbled)

    def _freeze(self, for_s: float) -> None:
        """Stop this process; another process has to let it go on."""
        me = str(os.getpid())
        script = 'sleep "$2"; kill -STOP "$1"; sleep "$3"; kill -CONT "$1"'
        subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", me, str(KILL_AFTER_S), str(for_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    # What the parts of the stage server ask ------------------------------------------------------------------------

    def cuts_address(self, address: str) -> bool:
        """A peer that only relays lead to has an empty address, and is cut off together with others of its kind."""
        return self._cut is not None and (self._cut == (ANYBODY, ANYBODY) or self._cut[1] == address)

    def cuts_peer(self, peer: str) -> bool:
        return self._cut is not None and self._cut[0] in (ANYBODY, peer)

    def garble(self, frame: bytes) -> bytes:
        """The frame to send; its last byte, which the checksum covers, may be changed."""
        if not self._one_in or self._rng.randrange(self._one_in):
            return frame
        self._garbled += 1
        return frame[:-1] + bytes([frame[-1] ^ 0x10])


class HarmedDevice:
    """A device that can be slow; otherwise `inner`."""

    def __init__(self, inner: Device, harm: Harm) -> None:
        self.name = inner.name
        self._inner = inner
        self._harm = harm

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        return self._inner.run(lambda: self._slowly(work))

    def timed(self, work: Callable[[], T]) -> Awaitable[Timed[T]]:
        return self._inner.timed(lambda: self._slowly(work))

    def aside(self, work: Callable[[], T]) -> Awaitable[T]:
        return self._inner.aside(work)

    def release(self) -> None:
        self._inner.release()

    def _slowly(self, work: Callable[[], T]) -> T:
        started_s = time.perf_counter()
        result = work()
        time.sleep((self._harm.factor - 1.0) * (time.perf_counter() - started_s))  # on the compute thread
        return result


class HarmedLinks:
    """Links that can be cut; otherwise `inner`."""

    def __init__(self, inner: PeerLinks, harm: Harm) -> None:
        self._inner = inner
        self._harm = harm

    async def send(
        self,
        address: str,
        header: TensorHeader,
        payload: bytes | memoryview,
        *,
        to: PeerId | None = None,
        moved: Moved | None = None,
    ) -> None:
        if self._harm.cuts_address(address):
            await _unanswered(f"{address} does not answer: cut off by swarm chaos")
        await self._inner.send(address, header, payload, to=to, moved=moved)

    async def pull(
        self, address: str, request: StateRequest, limit_bytes: int, *, to: PeerId | None = None
    ) -> tuple[StateReply, memoryview]:
        if self._harm.cuts_address(address):
            await _unanswered(f"{address} does not answer: cut off by swarm chaos")
        return await self._inner.pull(address, request, limit_bytes, to=to)

    def cut_off(self, peer: PeerId) -> None:
        self._inner.cut_off(peer)

    async def close(self) -> None:
        await self._inner.close()


class HarmedReceiver:
    """The receiver `inner`, without the messages that a partition cuts off."""

    def __init__(self, inner: Neighbour, harm: Harm) -> None:
        self._inner = inner
        self._harm = harm

    def admit(self, header: TensorHeader) -> Moved | None:
        return self._inner.admit(header)

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        if self._harm.cuts_peer(header.sender):
            await _unanswered(f"cut off from {header.sender} by swarm chaos")
        await self._inner.receive(header, payload)

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes | memoryview]:
        if self._harm.cuts_peer(request.sender):
            await _unanswered(f"cut off from {request.sender} by swarm chaos")
        return await self._inner.give(request)


async def _unanswered(message: str) -> NoReturn:
    await asyncio.sleep(UNANSWERED_S)
    raise PeerUnavailable(message)
