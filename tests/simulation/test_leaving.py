"""The claim: whoever leaves its stage in order loses no work, and moves go where they help; bitwise."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm.types import PeerId, PeerState
from tests.support.scenes import Run, Task, add_peer, replayed, train, training
from tests.support.simulated import stale

SHAPES = [
    {"pipeline__overlap": 0},
    {"pipeline__overlap": 3, "pipeline__sync_steps": 2},
    {**stale(1), "config__tie_word_embeddings": True, "pipeline__stages": 3},
]


def drain(run: Run, peer: PeerId) -> None:
    """What the scheduler does when a stage server says that it is leaving."""
    for transition in run.rig.membership.leaving(peer, asyncio.get_running_loop().time(), "test"):
        run.rig.parts.listener.on_transition(transition)


async def left(run: Run, peer: PeerId) -> None:
    while not run.job.record.state.is_final:
        known = run.rig.membership.get(peer)
        assert known is not None
        if not known.job:
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_drained_replicas_hand_their_work_over_without_any_being_done_again(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    task = Task.make(tmp_path, **{"training__steps": 8, **shape})
    stages = len(task.spec.pipeline.split)
    released: list[int] = []

    async def drain_one_of_each(run: Run) -> None:
        for stage in range(stages):
            await run.until_step(stage + 1)
            peer = run.rng.choice(run.job.stages[stage])
            drain(run, peer)
            await left(run, peer)
            assert not run.job.record.state.is_final
            assert peer not in run.job.stages[stage]
            released.append(run.job.progress.steps_done)
            known = run.rig.membership.get(peer)
            assert known is not None
            assert known.state is PeerState.DRAINING, "it is not given another stage"

    run = train(task, 2 * stages, 1, drain_one_of_each)
    assert len(released) == stages
    assert replayed(run) == 0


@training(2, 2, training__steps=8)
async def test_the_last_of_a_stage_stays_until_another_has_joined(run: Run) -> None:
    await run.until_step(1)
    (old,) = run.job.stages[0]
    drain(run, old)
    await run.until_step(3)
    assert run.job.stages[0] == [old]
    new = add_peer(run, "new", stage=0)
    await left(run, old)
    assert run.job.stages[0] == [new]
    await run.succeeds()
    assert replayed(run) == 0


@pytest.mark.parametrize("seed", range(2))
def test_drains_deaths_and_joins_at_random(tmp_path: Path, seed: int) -> None:
    task = Task.make(tmp_path, training__steps=9, **stale(seed % 2))

    async def churn(run: Run) -> None:
        number = 0
        await run.until_step(0)
        while not run.job.record.state.is_final:
            number += 1
            add_peer(run, f"new-{number}")
            await asyncio.sleep(run.rng.uniform(0.1, 3.0))
            spare = run.spare()
            if spare and not run.job.record.state.is_final:
                chosen = run.rng.choice(spare)
                if run.rng.random() < 0.6:
                    drain(run, chosen)
                else:
                    run.rig.kill(chosen)

    train(task, 4, seed, churn)


@pytest.mark.usefixtures("moves_soon")
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_replica_moves_to_the_stage_that_limits(tmp_path: Path, staleness: int) -> None:
    task = Task.make(tmp_path, training__steps=24, **stale(staleness))

    async def unbalance(run: Run) -> None:
        await run.until_step(1)
        for peer in list(run.job.stages[1])[1:]:
            run.rig.kill(peer)
        while not run.job.record.state.is_final:
            if sorted(map(len, run.job.stages.values())) == [2, 2]:
                return
            await asyncio.sleep(0.05)

    assert train(task, 6, 7, unbalance).total("swarm_rebalances_total") == 1
