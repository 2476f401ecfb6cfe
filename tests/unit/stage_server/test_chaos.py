"""What a stage server does to itself when `swarm chaos` says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import torch

from stage_server.chaos import UNANSWERED_S, Harm, HarmedDevice, HarmedLinks, HarmedReceiver
from stage_server.device import ThreadDevice
from swarm.errors import CorruptFrame, PeerUnavailable
from swarm.process.logs import get_logger
from swarm.rpc.links import frames
from swarm.rpc.links.peers import Moved
from swarm.types import Direction, JobId, Microbatch, PeerId
from swarm.wire.messages import Boundary, Chaos, TensorHeader
from tests.support.sim import loop as sim

NEAR, FAR, ALL = PeerId("near"), PeerId("far"), PeerId("")


class Links:
    """Takes everything."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(
        self,
        address: str,
        header: TensorHeader,
        payload: bytes | memoryview,
        *,
        to: PeerId | None = None,
        moved: Moved | None = None,
    ) -> None:
        self.sent.append(address)

    async def close(self) -> None:
        pass

    def admit(self, header: TensorHeader) -> None:
        pass

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        self.sent.append(header.sender)


def order(fault: str, *, for_s: float = 5.0, factor: float = 4.0, peer: PeerId = ALL, address: str = "") -> Chaos:
    return Chaos(fault, for_s, factor, peer, address, 7)


def header(sender: PeerId, total_bytes: int = 4) -> TensorHeader:
    at, shape = Microbatch(0, 0, 0), (total_bytes // 4,)
    return Boundary(JobId("j"), at, Direction.FORWARD, 1, 0, sender, 1, "float32", shape, "none", total_bytes)


def test_a_partition_swallows_what_passes_between_two_for_its_time_and_no_longer() -> None:
    async def main() -> None:
        harm, inner = Harm(get_logger("test")), Links()
        links, receiver = HarmedLinks(inner, harm), HarmedReceiver(inner, harm)
        harm.begin(order("partition", peer=FAR, address="far:1"))
        started_s = asyncio.get_running_loop().time()
        for call in (
            lambda: links.send("far:1", header(NEAR), b"1234"),
            lambda: receiver.receive(header(FAR), memoryview(b"1234")),
        ):
            with pytest.raises(PeerUnavailable):
                await call()
        assert asyncio.get_running_loop().time() == started_s + 2 * UNANSWERED_S
        await links.send("near:1", header(NEAR), b"1234")
        await receiver.receive(header(NEAR), memoryview(b"1234"))
        assert inner.sent == ["near:1", NEAR]
        await asyncio.sleep(5.0)
        await links.send("far:1", header(NEAR), b"1234")
        assert inner.sent[-1] == "far:1"

        harm.begin(order("partition"))
        with pytest.raises(PeerUnavailable):
            await links.send("near:1", header(NEAR), b"1234")

    sim.run(main(), seed=0)


def test_a_garbled_frame_is_refused_by_its_checksum() -> None:
    async def main() -> None:
        harm = Harm(get_logger("test"))
        sound = b"".join(next(frames.split(1, header(NEAR), b"1234")))
        assert harm.garble(sound) == sound
        harm.begin(order("corrupt", factor=3.0))
        seen = [harm.garble(sound) for _ in range(300)]
        assert 60 < sum(frame != sound for frame in seen) < 140
        for frame in seen:
            assembler = frames.Assembler(lambda _: None)
            if frame == sound:
                assert assembler.add(frames.decode(frame)) is not None
            else:
                with pytest.raises(CorruptFrame):
                    assembler.add(frames.decode(frame))
        await asyncio.sleep(5.0)
        assert harm.garble(sound) == sound

    sim.run(main(), seed=0)


@pytest.fixture
def thread() -> Iterator[ThreadDevice]:
    device = ThreadDevice(torch.device("cpu"), 1)
    yield device
    device.close()


async def test_a_slow_device_takes_so_many_times_as_long_and_gives_the_same(thread: ThreadDevice) -> None:
    harm = Harm(get_logger("test"))
    device = HarmedDevice(thread, harm)

    def work() -> int:
        time.sleep(0.01)  # at least: however busy the machine is
        return 7

    quick = await device.timed(work)
    harm.begin(order("slow", factor=50.0))
    slow = await device.timed(work)
    assert slow.result == quick.result
    assert slow.seconds >= 50 * 0.01
    assert await device.run(work) == await device.aside(work) == quick.result
