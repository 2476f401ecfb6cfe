"""The simulated network disturbs as much as it says, counts it, and does the same again with the same seed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from random import Random

import pytest

from swarm.errors import PeerUnavailable, SchedulerUnreachable
from swarm.rpc.session import DRAIN_S
from swarm.wire.messages import Boundary, Command, Event, FetchRequest, Heartbeat, StoreHeader, Void
from tests.support.headers import header_of
from tests.support.sim import loop as sim
from tests.support.sim.fabric import Counts
from tests.support.sim.network import SimNetwork


class Receiver:
    def __init__(self) -> None:
        self.order: list[int] = []

    def admit(self, header: Boundary) -> None:
        pass

    async def receive(self, header: Boundary, payload: memoryview) -> None:
        self.order.append(header.microbatch.index)


def flood(seed: int, **options: object) -> tuple[list[int], Counts, float]:
    """Send 200 tensors at once; gives the order of arrival, the counts and the simulated end."""

    async def main() -> tuple[list[int], Counts, float]:
        network = SimNetwork(sim.rng("network"), **options)  # type: ignore[arg-type]
        receiver, links = Receiver(), network.peer_links("a")
        network.add_receiver("b", receiver)
        async with asyncio.TaskGroup() as tasks:
            for index in range(200):
                tasks.create_task(links.send("b", header_of(4, index), b"abcd"))
        await asyncio.sleep(1)  # duplicates may still be on their way
        await network.close()
        return receiver.order, network.counts, asyncio.get_running_loop().time()

    return sim.run(main(), seed=seed)


def test_tensors_overtake_each_other_and_it_is_counted() -> None:
    order, counts, _ = flood(1)
    assert sorted(order) == list(range(200))
    assert order != sorted(order)
    assert counts.delivered == 200
    assert counts.reordered == sum(index < max(order[:at]) for at, index in enumerate(order) if at)
    assert counts.reordered > 100
    assert counts.duplicated == 0


def test_order_is_kept_on_request() -> None:
    order, counts, _ = flood(1, reorder=False)
    assert order == list(range(200))
    assert counts.reordered == 0


def test_some_tensors_come_twice_and_it_is_counted() -> None:
    order, counts, _ = flood(1, duplicate_ratio=0.25)
    assert set(order) == set(range(200))
    assert len(order) == counts.delivered == 200 + counts.duplicated
    assert 25 < counts.duplicated < 80


def test_the_same_seed_does_the_same_and_another_does_not() -> None:
    assert flood(3, duplicate_ratio=0.1) == flood(3, duplicate_ratio=0.1)
    assert flood(3)[0] != flood(4)[0]


def test_time_passes_as_the_delays_say() -> None:
    _, _, end_s = flood(1, delay_s=(0.5, 0.5))
    assert end_s == 0.5 + 0.5 + 1.0


def test_deliveries_to_a_killed_process_fail_at_once_and_what_it_sent_still_arrives() -> None:
    async def main() -> Counts:
        network = SimNetwork(sim.rng("network"), delay_s=(1.0, 2.0))
        receiver = Receiver()
        network.add_receiver("a", receiver)
        network.add_receiver("b", Receiver())
        to_b = asyncio.create_task(network.peer_links("a").send("b", header_of(4, 0), b"abcd"))
        to_a = asyncio.create_task(network.peer_links("b").send("a", header_of(4, 1), b"abcd"))
        await asyncio.sleep(0.5)
        network.kill("b")
        with pytest.raises(PeerUnavailable, match="b does not answer"):
            await to_b
        assert asyncio.get_running_loop().time() == 0.5
        await to_a
        assert receiver.order == [1]
        return network.counts

    assert sim.run(main(), seed=1).unreachable == 1


class Handler:
    """Answers each heartbeat; remembers how its sessions ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def attach(self, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
        try:
            async for event in events:
                assert isinstance(event, Heartbeat)
                yield 1, Void(0, event.sequence, 0)
            self.ends.append("end")
        except PeerUnavailable:
            self.ends.append("broken")

    async def held(self, header: StoreHeader) -> int:
        return 0

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        raise NotImplementedError

    def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        raise NotImplementedError


async def beats() -> AsyncIterator[Event]:
    sequence = 0
    while True:
        yield Heartbeat(sequence)
        sequence += 1
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("breaker", ["kill scheduler", "kill peer", "cut"])
def test_a_broken_session_is_seen_on_both_sides(breaker: str) -> None:
    async def main() -> None:
        network, handler = SimNetwork(sim.rng("network")), Handler()
        network.add_handler("scheduler", handler)
        link = network.scheduler_link("peer", "scheduler")
        received: list[tuple[int, Command]] = []
        with pytest.raises(SchedulerUnreachable):  # noqa: PT012 - the break has to come in the middle
            async with aclosing(link.attach(beats())) as commands:
                async for command in commands:
                    received.append(command)
                    if len(received) == 50:
                        match breaker:
                            case "kill scheduler":
                                network.kill("scheduler")
                            case "kill peer":
                                network.kill("peer")
                            case _:
                                network.cut("peer", "scheduler")
        assert received[:50] == [(1, Void(0, sequence, 0)) for sequence in range(50)]
        await asyncio.sleep(0.1)  # the handler first reads what had arrived
        assert handler.ends == ["broken"]
        assert network.counts.sessions_broken == 1
        assert network.counts.messages >= 100
        await network.close()

    sim.run(main(), seed=1)


def test_a_handler_that_does_not_notice_the_break_is_cancelled() -> None:
    class Deaf(Handler):
        async def attach(self, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
            try:
                yield 1, Void(0, 0, 0)
                await asyncio.Event().wait()
            finally:
                self.ends.append(f"at {asyncio.get_running_loop().time():.0f} s")

    async def main() -> None:
        network, handler = SimNetwork(Random(1)), Deaf()
        network.add_handler("scheduler", handler)
        commands = network.scheduler_link("peer", "scheduler").attach(beats())
        await anext(commands)
        network.cut("peer", "scheduler")
        await asyncio.sleep(60)
        assert handler.ends == [f"at {DRAIN_S:.0f} s"]
        await network.close()

    sim.run(main(), seed=1)
