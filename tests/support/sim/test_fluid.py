"""The fluid network carries bytes as fast as its lines allow, and shares them fairly."""

from __future__ import annotations

import asyncio

import pytest

from swarm.types import JobId, PeerId, Round, UnitName
from swarm.wire.messages import Slice, TensorHeader
from tests.support.sim import loop as sim
from tests.support.sim.fluid import FluidNetwork, Line, fair


def a_slice(number: int) -> Slice:
    return Slice(JobId("job"), 0, 0, UnitName("u"), Round(1, 1), False, number, PeerId("a"), 1, "float32", 25, 100)


def test_tensors_to_one_follow_in_order_and_those_to_others_share_the_uplink() -> None:
    arrived: list[tuple[float, str, int]] = []

    async def main() -> None:
        def take(address: str, header: TensorHeader, payload: memoryview) -> None:
            assert isinstance(header, Slice)
            arrived.append((asyncio.get_running_loop().time(), address, header.start))

        network = FluidNetwork({"a": Line(100.0, 1.0), "b": Line(1.0, 1e9), "c": Line(1.0, 25.0)}, take)
        links = network.links("a")
        async with asyncio.TaskGroup() as tasks:
            for number, to in enumerate("bbc"):
                tasks.create_task(links.send(to, a_slice(number), bytes(100)))

    sim.run(main(), seed=0)
    assert [what for _, *what in arrived] == [["b", 0], ["b", 1], ["c", 2]]
    assert [at_s for at_s, *_ in arrived] == pytest.approx([4 / 3, 8 / 3, 4.0])


def test_the_tightest_end_is_shared_first() -> None:
    lines = {"a": Line(4.0, 4.0), "b": Line(4.0, 1.0), "c": Line(4.0, 4.0)}
    assert fair([("a", "b"), ("c", "b"), ("a", "c")], lines) == [0.5, 0.5, 3.5]
