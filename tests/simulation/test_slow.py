"""The claim: a replica that became ten times as slow is routed around within a step, and used again later."""

from __future__ import annotations

import asyncio
from statistics import median

import pytest

from swarm.types import PeerId
from tests.support.scenes import Run, training


async def step_s(run: Run, steps: int) -> list[float]:
    """How long each of the next steps takes."""
    loop, took_s = asyncio.get_running_loop(), []
    for _ in range(steps):
        before, began_s = run.job.progress.steps_done, loop.time()
        while run.job.progress.steps_done == before and not run.job.record.state.is_final:
            await asyncio.sleep(0.001)
        took_s.append(loop.time() - began_s)
    return took_s


def given(run: Run, peer: PeerId) -> float:
    """Hops that the peer was given so far."""
    return run.total("swarm_route_decisions_total", stage="0", peer=peer)


@pytest.mark.usefixtures("late_soon")
@training(6, 4, training__steps=36, training__global_batch_sequences=24, pipeline__overlap=0)
async def test_a_slow_replica_is_routed_around_and_used_again(run: Run) -> None:
    figures: dict[str, float] = {}
    await run.until_step(3)
    figures["healthy"] = median(await step_s(run, 3))
    peer = run.job.stages[0][0]
    run.rig.slowness[peer] = 10.0
    await step_s(run, 1)
    figures["slow"] = median(await step_s(run, 4))
    run.rig.slowness.clear()
    before = given(run, peer)
    while given(run, peer) == before and run.job.progress.steps_done < 30:  # a trial comes after a long rest
        await step_s(run, 1)
    await step_s(run, 3)
    figures["after"] = given(run, peer) - before
    figures["late"] = run.total("swarm_reroutes_total", reason="timeout")
    await run.succeeds()
    assert figures["slow"] <= 1.3 * figures["healthy"], figures
    assert figures["late"] > 0, "what it had begun was given to others"
    assert figures["after"] > 1, "it is used again, not only tried"
