"""A tensor that comes further is not sent a second time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stage_server.replica.deliveries import HANGING_S, Deliveries
from stage_server.replica.packing import Letter
from swarm.rpc.links.peers import Moved
from swarm.types import Direction, Hop, JobId, Microbatch, PeerId
from swarm.wire.messages import Need
from tests.support.sim import loop as sim

TO = Hop(PeerId("b"), 1, 1, "b:1")
LETTER = Letter(Need(JobId("j"), Microbatch(0, 0, 0), Direction.FORWARD, 0, 1, PeerId("a"), 1), b"")


class Line:
    """Takes four times HANGING_S for a tensor, and says now and then how it comes further, or does not."""

    def __init__(self, *, moves: bool) -> None:
        self.copies, self._moves = 0, moves

    async def send(self, address: str, header: Need, payload: bytes, *, to: PeerId, moved: Moved) -> None:
        self.copies += 1
        for _ in range(8):
            await asyncio.sleep(HANGING_S / 2)
            if self._moves:
                moved()


@pytest.mark.parametrize(("moves", "copies"), [(True, 1), (False, 3)])
def test_a_tensor_that_a_slow_line_still_carries_is_not_sent_a_second_time(moves: bool, copies: int) -> None:
    """Whoever waited for five seconds asked, and was sent a second copy behind the first: eight tensors of 256 KiB take
    seven seconds over 2.5 Mbit/s, so a slow line carried each of them twice."""

    async def main() -> int:
        line, tasks = Line(moves=moves), set[asyncio.Task[None]]()

        def start(work: Any) -> None:
            tasks.add(asyncio.ensure_future(work))

        ports: Any = SimpleNamespace(links=line, work=SimpleNamespace(start=start))
        codecs: Any = SimpleNamespace(start=lambda to, now_s: None)
        deliveries = Deliveries(ports, codecs)
        deliveries.learn([TO])
        for _ in range(3):
            deliveries.send(TO, "y", lambda: LETTER, lambda: True)
            await asyncio.sleep(1.1 * HANGING_S)
        await asyncio.gather(*tasks)
        return line.copies

    assert sim.run(main(), seed=0) == copies
