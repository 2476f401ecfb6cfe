"""The claim: whatever dies or is cut off at whatever moment, the weights are those of one process.

Real flows, brain and torch on virtual time and a transport that delays, reorders and duplicates. One lost or doubled
gradient anywhere would change the hash.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import Fenced
from swarm.types import JobState, PeerState
from tests.support.scenes import Run, Task, replayed, train, training
from tests.support.simulated import SCHEDULER, stale

SHAPES = [
    {"pipeline__overlap": 0},
    {"pipeline__overlap": 3, "pipeline__sync_steps": 2},
    {**stale(1), "config__tie_word_embeddings": True},
    {"pipeline__overlap": 0, "pipeline__stages": 3, "model__recompute": True},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stage_servers_are_killed_one_after_the_other(tmp_path: Path, shape: dict[str, Any]) -> None:
    task = Task.make(tmp_path, **shape)
    stages = len(task.spec.pipeline.split)

    async def kill(run: Run) -> None:
        for step in (0, 1, 2, 3):
            await run.until_step(step)
            spare = run.spare()
            if spare and not run.job.record.state.is_final:
                victim = run.rng.choice(spare)
                await run.until_it_holds_something(victim)
                run.rig.kill(victim)

    assert replayed(train(task, 3 * stages, 1, kill)) > 0, "nothing was lost, so nothing was shown"


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_sessions_break_while_both_sides_live(tmp_path: Path, shape: dict[str, Any]) -> None:
    task = Task.make(tmp_path, **shape)

    async def cut(run: Run) -> None:
        await run.until_step(0)
        peers = [peer for pool in run.job.stages.values() for peer in pool]
        while not run.job.record.state.is_final:
            await asyncio.sleep(run.rng.uniform(0.1, 0.8))
            run.rig.network.cut(f"address-of-{run.rng.choice(peers)}", SCHEDULER)

    run = train(task, 4, 1, cut)
    assert run.rig.network.counts.sessions_broken > 1
    states = {peer.state for peer in run.rig.membership.peers()}
    assert states <= {PeerState.IDLE, PeerState.SUSPECT}, "nobody was lost for it"


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_the_scheduler_is_killed_and_started_again(tmp_path: Path, shape: dict[str, Any]) -> None:
    task = Task.make(tmp_path, **shape)

    async def restart(run: Run) -> None:
        for step in (0, 2, 3):
            await run.until_step(step)
            if run.job.record.state.is_final:
                break
            await run.rig.kill_scheduler()
            await asyncio.sleep(run.rng.uniform(0.1, 3.0))
            before_s = asyncio.get_running_loop().time()
            await run.rig.start_scheduler()
            steps = run.job.progress.steps_done
            run.job = run.rig.jobs.registry.find(run.job.record.id)
            if run.job.record.state is JobState.RUNNING:
                assert run.job.progress.steps_done in (steps, steps + 1), "nothing is rolled back"
                steps = run.job.progress.steps_done
                await run.until_step(steps + 1)
                assert asyncio.get_running_loop().time() - before_s < 3.0

    run = train(task, 4, 1, restart)
    assert run.rig.store.epoch > 2


@training(4, 1)
async def test_a_second_scheduler_on_the_same_database_ends_the_first_and_takes_its_job(run: Run) -> None:
    """The first must not write a row that the second does not know of; its stage servers go over to the second."""
    await run.until_step(1)
    first, store = run.rig.scheduler, run.rig.store
    run.rig.network.kill(SCHEDULER)  # the first goes on, but nobody reaches it at this address any more
    await run.rig.start_scheduler()
    with pytest.raises(Fenced):
        await store.put_job(run.job.record)
    run.job = run.rig.jobs.registry.find(run.job.record.id)
    first.cancel()
    await asyncio.wait({first})


def test_outputs_that_were_evicted_are_computed_again(tmp_path: Path) -> None:
    """With room for one output hardly anything that a lost neighbour's successor asks for is held."""
    task = Task.make(tmp_path)

    async def kill(run: Run) -> None:
        await run.until_step(1)
        run.rig.kill(run.rng.choice(run.spare()))

    run = train(task, 4, 1, kill, hold_bytes=1)
    values = [metrics.registry.get_sample_value for metrics in run.rig.server_metrics]
    stages = [{"stage": str(stage)} for stage in range(2)]
    assert sum(value("swarm_outputs_evicted_total", stage) or 0.0 for value in values for stage in stages) > 10
