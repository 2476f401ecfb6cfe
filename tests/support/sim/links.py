"""Tensors and state between simulated stage servers: PeerLinks over a Fabric."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from swarm.errors import CorruptFrame, PeerUnavailable, SwarmError
from swarm.rpc.channel import public_error
from swarm.rpc.links import frames
from swarm.rpc.links.peer_service import take
from swarm.rpc.links.peers import SHUNNED_S, Moved, StateDonor, TensorReceiver, Traffic
from swarm.rpc.links.state import collect, state_chunks
from swarm.types import PeerId
from swarm.wire.messages import StateReply, StateRequest, TensorHeader
from tests.support.sim.fabric import Fabric, Flight
from tests.support.sim.processes import Process


@dataclass(slots=True)
class _Lane:
    """What one process has sent to one address so far."""

    sent: int = 0
    newest_delivered: int = 0
    last_arrival: asyncio.Event | None = None


class SimPeerLinks:
    """The PeerLinks of one process."""

    def __init__(self, network: Fabric, owner: str, traffic: Traffic) -> None:
        self._network = network
        self._owner = owner
        self._traffic = traffic
        self._lanes: dict[str, _Lane] = defaultdict(_Lane)
        self._receipts: dict[asyncio.Future[None], None] = {}
        self._process = Process.current()
        self._closed = False
        self.revoked: list[PeerId] = []  # the links to whom were to be broken
        self._shunned: dict[PeerId, float] = {}

    async def send(
        self,
        address: str,
        header: TensorHeader,
        payload: bytes | memoryview,
        *,
        to: PeerId | None = None,
        moved: Moved | None = None,
    ) -> None:
        self._check(address, to)
        try:
            await self._send(address, header, payload)
        except CorruptFrame:
            self._check(address, to)
            await self._send(address, header, payload)

    async def pull(
        self, address: str, request: StateRequest, limit_bytes: int, *, to: PeerId | None = None
    ) -> tuple[StateReply, memoryview]:
        self._check(address, to)
        if self._process is not None and self._process.is_dead:
            raise asyncio.CancelledError
        network = self._network
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flight = Flight(self._owner, address, broken)
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

    def cut_off(self, peer: PeerId) -> None:
        self.revoked.append(peer)
        self._shunned[peer] = asyncio.get_running_loop().time() + SHUNNED_S

    def _check(self, address: str, to: PeerId | None) -> None:
        if self._closed:
            raise PeerUnavailable(f"{address}: the links of this process are closed")
        if to is not None and asyncio.get_running_loop().time() < self._shunned.get(to, 0.0):
            raise PeerUnavailable(f"{to} was revoked")

    async def close(self) -> None:
        self._closed = True
        for receipt in list(self._receipts):
            if not receipt.done():
                receipt.set_exception(PeerUnavailable("the links of this process are closed"))

    async def _send(self, address: str, header: TensorHeader, payload: bytes | memoryview) -> None:
        self._network.observer.sending(self._owner, address, header)
        if self._process is not None and self._process.is_dead:
            raise asyncio.CancelledError
        lane = self._lanes[address]
        lane.sent += 1
        # Chunks are made now: the payload may change as soon as this call ends, a duplicate may come later.
        chunks = [b"".join(frame) for frame in frames.split(lane.sent, header, payload)]
        receipt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receipts[receipt] = None
        for copy, late_s in enumerate(self._network.weather.lateness()):
            flight = Flight(self._owner, address, receipt if copy == 0 else None)
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
        self, flight: Flight, lane: _Lane, number: int, header: TensorHeader, chunks: list[bytes], late_s: float
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
        """What a real receiver does with a tensor's frames; returns the error that the sender is told."""
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
        self._traffic.sent(address, frames.kind_of(header), wire_bytes, frames.uncompressed_bytes(header))
        if error is None:
            receipt.set_result(None)
        else:
            receipt.set_exception(error)


async def _given(donor: StateDonor, request: StateRequest) -> tuple[StateReply, bytes | memoryview]:
    try:
        return await donor.give(request)
    except Exception as error:
        raise public_error(error) from error
