"""Links lose, stop and break as they are told, are counted, and heal."""

import asyncio

import pytest

from swarm.errors import PeerUnavailable
from swarm.wire.messages import Boundary
from tests.support.headers import header_of
from tests.support.sim import loop as sim
from tests.support.sim.fabric import Counts
from tests.support.sim.network import SimNetwork
from tests.support.sim.processes import Process
from tests.support.sim.weather import DETECT_S, Weather


class Receiver:
    def __init__(self) -> None:
        self.order: list[int] = []

    def admit(self, header: Boundary) -> None:
        pass

    async def receive(self, header: Boundary, payload: memoryview) -> None:
        self.order.append(header.microbatch.index)


async def send_all(network: SimNetwork, count: int) -> int:
    """Send tensors from a to b; how many the sender believes lost."""
    links = network.peer_links("a")
    sent = [links.send("b", header_of(4, index), b"abcd") for index in range(count)]
    return sum(isinstance(result, PeerUnavailable) for result in await asyncio.gather(*sent, return_exceptions=True))


def test_a_tensor_or_its_receipt_is_lost_and_the_sender_learns_that_something_was() -> None:
    async def main() -> tuple[int, int, Counts]:
        network = SimNetwork(sim.rng("n"), weather=Weather(sim.rng("w"), loss=0.3))
        receiver = Receiver()
        network.add_receiver("b", receiver)
        return await send_all(network, 400), len(receiver.order), network.counts

    lost, arrived, counts = sim.run(main(), seed=1)
    assert counts.lost == lost
    assert 160 < lost < 250  # 0.3 + 0.7 * 0.3
    assert 240 < arrived < 320  # some receipts were lost on the way back


def test_copies_come_late() -> None:
    async def main() -> tuple[int, float]:
        weather = Weather(sim.rng("w"), duplicate_ratio=1.0, copies_max=5, late_s_max=60.0)
        network = SimNetwork(sim.rng("n"), weather=weather)
        receiver = Receiver()
        network.add_receiver("b", receiver)
        await send_all(network, 50)
        sent_s = asyncio.get_running_loop().time()
        await asyncio.sleep(70)
        assert set(receiver.order) == set(range(50))
        return len(receiver.order), sent_s

    arrived, sent_s = sim.run(main(), seed=1)
    assert 50 * 2.5 < arrived < 50 * 4.5
    assert sent_s < 1.0


@pytest.mark.parametrize("link", [("a", "b"), ("b", "a")], ids=["there", "back"])
def test_a_link_that_stops_holds_what_it_carries_and_breaks_when_it_stays_stopped(link: tuple[str, str]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = SimNetwork(sim.rng("n"))
        receiver = Receiver()
        network.add_receiver("b", receiver)
        network.weather.stop(*link)
        loop.call_later(1.0, network.weather.let, *link)
        assert await send_all(network, 3) == 0
        assert 1.0 <= loop.time() < 1.1
        network.weather.stop(*link)
        network.weather.stop(*link)
        network.weather.let(*link)  # one cause of two
        before_s, before = loop.time(), len(receiver.order)
        assert await send_all(network, 3) == 3
        assert loop.time() - before_s == pytest.approx(DETECT_S)
        assert len(receiver.order) - before == (0 if link == ("a", "b") else 3)
        network.weather.calm()
        assert await send_all(network, 3) == 0

    sim.run(main(), seed=1)


def test_a_frozen_receiver_is_found_dead_and_takes_what_came_when_it_wakes_up() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        network, receiver = SimNetwork(sim.rng("n")), Receiver()
        process = Process("b")

        async def serve() -> None:
            network.add_receiver("b", receiver)
            await asyncio.Event().wait()

        process.start(serve())
        await asyncio.sleep(0)
        network.freeze("b")
        assert await send_all(network, 3) == 3
        assert loop.time() == pytest.approx(DETECT_S)
        assert receiver.order == []
        process.thaw()
        await asyncio.sleep(1.0)
        assert sorted(receiver.order) == [0, 1, 2]
        process.kill()
        network.kill("b")
        assert await send_all(network, 1) == 1
        await network.close()

    sim.run(main(), seed=1)
