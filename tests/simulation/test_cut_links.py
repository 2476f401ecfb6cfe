"""The claim: a job goes on while a replica cannot reach the next stage, or the one before, however long that lasts."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.scenes import Run, training


@pytest.mark.parametrize("way", ["there", "back", "both"])
@training(4, 1, training__steps=8, training__global_batch_sequences=8, pipeline__overlap=4, limits__min_replicas=2)
async def test_a_replica_cut_off_from_a_neighbouring_stage_for_good_holds_nothing_up(run: Run, way: str) -> None:
    await run.until_step(3)
    await asyncio.sleep(run.rng.uniform(0.0, 0.3))
    stage = run.rng.choice((0, 1))
    one = f"address-of-{run.rng.choice(run.job.stages[stage])}"
    for other in run.job.stages[1 - stage]:
        if way != "back":
            run.rig.network.weather.stop(one, f"address-of-{other}")
        if way != "there":
            run.rig.network.weather.stop(f"address-of-{other}", one)
    began_s = asyncio.get_running_loop().time()
    await run.rig.finished(run.job)
    took_s = asyncio.get_running_loop().time() - began_s
    assert took_s < 60.0, f"{took_s:.1f} s"
