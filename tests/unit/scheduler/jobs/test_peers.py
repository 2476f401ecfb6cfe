"""When the scheduler asks a stage server without work to measure itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from scheduler.brain.fleet.membership import Membership
from scheduler.jobs.peers import Peers
from swarm.types import PeerId
from swarm.wire.messages import Calibrate, Hello
from tests.support.sim import loop as sim

A = PeerId("a")


def test_nobody_calibrates_while_a_job_waits_for_peers() -> None:
    async def main() -> None:
        members, waiting, sent = Membership(), ["job"], list[object]()
        members.hello(Hello(A, 1, 1, "0", "", "", "cpu", 1, 0, -1), 0.0)
        others: Any = SimpleNamespace(waiting=lambda: waiting, send=lambda *told: sent.append(told))
        peers = Peers(others, others, members, others, others, others)
        asking = asyncio.create_task(peers.calibrate())
        await asyncio.sleep(60.0)
        assert sent == []
        waiting.clear()
        await asyncio.sleep(60.0)
        assert sent == [(A, Calibrate(5.0))]
        asking.cancel()

    sim.run(main(), seed=1, limit_s=3600.0)
