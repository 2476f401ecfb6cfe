"""What a job uses is counted for its project: stage-server seconds, tokens, bytes of relays; in simulated time."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from scheduler.jobs.usage import LOOK_S, WRITE_S, UsageMeter
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import DatabaseUnavailable
from swarm.job.partition import resolve
from swarm.types import JobId, PeerId
from tests.support.sim import loop as sim
from tests.support.simulated import Done, Rig, Tokens, small_spec, write_text


def test_seconds_tokens_and_relayed_bytes_of_a_job_arrive_once_a_minute(tmp_path: Path) -> None:
    changes = {"pipeline__stages": 1, "training__steps": 10}
    spec = resolve(
        small_spec(write_text(tmp_path), **changes), vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1
    )
    tokens = Tokens.make(tmp_path, spec)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                rig = await Rig.start(tokens, 2, tasks, Random(1))
                rig.slowness = dict.fromkeys((PeerId("peer-0"), PeerId("peer-1")), 40.0)
                usage, writes = rig.ports.stores.usage, [0.0]
                meter, write = UsageMeter(rig.jobs.registry, rig.membership, rig.ports), usage.write

                async def noted(unix_s: float) -> None:
                    writes.append(loop.time())
                    if len(writes) == 2:
                        raise DatabaseUnavailable("it is away")
                    await write(unix_s)

                usage.write = noted  # type: ignore[method-assign]

                async def stored() -> list[dict[str, Any]]:
                    return await usage.of("default", 0)

                writes[0] = loop.time()
                running = tasks.create_task(meter.run())
                await asyncio.sleep(30.0)
                job = await rig.jobs.submit(spec, tokens.of_job(), {})
                began_s = loop.time()
                meter.carried(job.record.id, 1000)
                meter.carried(JobId("nobody's"), 1 << 40)
                assert await stored() == []
                await rig.finished(job)
                took_s = loop.time() - began_s
                assert took_s > 4 * LOOK_S
                await asyncio.sleep(2 * WRITE_S)
                (row,) = await stored()
                assert row["tokens"] == job.progress.tokens == 10 * 12 * 16
                assert row["relay_bytes"] == 1000
                assert row["peer_s"] == pytest.approx(2 * took_s, abs=2 * (LOOK_S + rig.ports.settle_s))
                waits_s = [after - before for before, after in pairwise(writes)]
                assert min(waits_s) >= WRITE_S

                running.cancel()
                meter.carried(job.record.id, 24)
                await meter.close()
                assert [one["relay_bytes"] for one in await stored()] == [1024]
                await rig.network.close()
                raise Done
        except* Done:
            pass

    sim.run(main(), seed=1, limit_s=7200.0)
