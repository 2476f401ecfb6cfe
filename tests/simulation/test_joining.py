"""The claim: a peer that joins a job at work, whenever it comes, changes no bit of the weights and stops nobody.

Real flows, brain and torch on virtual time and a transport that delays, reorders and duplicates.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm.wire.messages import Admit, Command, Event, Follow, Loaded
from tests.support.scenes import BEFORE, Run, Task, add_peer, serves, train, training
from tests.support.sim.fabric import Observer
from tests.support.sim.network import SimNetwork
from tests.support.simulated import stale

SHAPES = [
    {"pipeline__overlap": 0},
    {"pipeline__overlap": 3, "pipeline__sync_steps": 2},
    {**stale(1), "config__tie_word_embeddings": True, "training__optimizer": "lamb"},
    {**stale(1), "pipeline__stages": 1, "config__tie_word_embeddings": True},
    {"pipeline__overlap": 0, "pipeline__stages": 3, "training__optimizer": "muon"},
    {"training__optimizer": "sgd", "training__momentum": 0.9},
    {"pipeline__overlap": 3, "pipeline__sync_steps": 2, "model__dtype": "bfloat16_parameters"},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_new_peer_becomes_a_replica_and_the_old_one_of_its_stage_may_die(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    task = Task.make(tmp_path, **{"training__steps": 8, **shape})
    stages = len(task.spec.pipeline.split)
    joined = []

    async def replace_all(run: Run) -> None:
        await run.until_step(1)
        for stage in range(stages):
            (old,) = run.job.stages[stage]
            new = add_peer(run, f"new-{stage}", stage=stage)
            await serves(run, new)
            assert run.job.run is not None, "the job was over before the peer had joined"
            assert run.job.stages[stage] == [old, new]
            joined.append(run.job.progress.steps_done)
            run.rig.kill(old)
            await asyncio.sleep(0.5)

    run = train(task, stages, 1, replace_all)
    assert len(joined) == stages
    assert joined[0] >= 1, "the state had moved on from the start"
    assert run.job.run is None


@pytest.mark.parametrize("seed", range(2))
def test_peers_come_and_go_at_random(tmp_path: Path, seed: int) -> None:
    task = Task.make(tmp_path, training__steps=10, **stale(seed % 2))

    async def churn(run: Run) -> None:
        number = 0
        while run.job.record.state in BEFORE:
            await asyncio.sleep(0.1)
        while not run.job.record.state.is_final:
            number += 1
            add_peer(run, f"new-{number}")
            await asyncio.sleep(run.rng.uniform(0.1, 4.0))
            spare = run.spare()
            if spare and not run.job.record.state.is_final and run.rng.random() < 0.7:
                run.rig.kill(run.rng.choice(spare))

    train(task, 4, seed, churn)


@training(4, 3, training__steps=10)
async def test_a_donor_dies_while_it_gives(run: Run) -> None:
    await run.until_step(2)
    old = list(run.job.stages[1])
    new = add_peer(run, "new", stage=1)
    while not run.job.brain.is_joining(new):  # type: ignore[union-attr]
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.03)
    assert run.job.brain is not None
    assert run.job.brain.is_joining(new), "it was faster than this test"
    run.rig.kill(old[0])
    await serves(run, new)
    assert new in run.job.stages[1]


@training(4, 5, training__steps=10)
async def test_a_peer_that_was_thought_gone_wakes_up_and_joins_again(run: Run) -> None:
    await run.until_step(1)
    peer = run.job.stages[0][0]
    run.rig.network.cut(f"address-of-{peer}", "scheduler")
    for transition in run.rig.membership.disconnected(peer, 1, asyncio.get_running_loop().time(), "test"):
        run.rig.parts.listener.on_transition(transition)
    await asyncio.sleep(0.05)
    # The scheduler gives it up while the peer still holds its stage.
    known = run.rig.membership.get(peer)
    assert known is not None
    late_s = asyncio.get_running_loop().time() + 60.0
    for transition in run.rig.membership.tick(late_s):
        if transition.peer == peer:
            run.rig.parts.listener.on_transition(transition)
    await serves(run, peer)
    assert peer in run.job.stages[0]


class CutWhen(Observer):
    """Breaks a joiner's session just when it reports, is answered, or is admitted; a few times."""

    def __init__(self, network: SimNetwork, moment: type[Event | Command], times: int) -> None:
        self.network, self.moment, self.times = network, moment, times

    def _cut(self, owner: str) -> None:
        if self.times:
            self.times -= 1
            self.network.cut(owner, "scheduler")

    def event_leaves(self, owner: str, event: Event) -> None:
        if isinstance(event, Loaded) and event.join and self.moment is Loaded:
            self._cut(owner)

    def command_arrived(self, owner: str, epoch: int, command: Command) -> None:
        if isinstance(command, self.moment) and not (isinstance(command, Follow) and not command.answered):
            self._cut(owner)


@pytest.mark.parametrize(("moment", "seed"), [(Loaded, 0), (Follow, 0), (Admit, 0)])
def test_a_session_breaks_between_report_and_admission(
    tmp_path: Path, moment: type[Event | Command], seed: int
) -> None:
    """The report was lost with it, and the joiner waited for the answer for as long as the job ran."""
    task = Task.make(tmp_path, training__steps=14)

    async def cut(run: Run) -> None:
        await run.until_step(1)
        run.rig.network.observer = observer = CutWhen(run.rig.network, moment, 3)
        news = [add_peer(run, f"new-{stage}", stage=stage) for stage in range(2)]
        for new in news:
            await serves(run, new)
        assert not run.job.record.state.is_final, "it never got in"
        assert observer.times < 3 or moment is Follow, "nothing was cut"

    train(task, 4, seed, cut)


@pytest.mark.parametrize("seed", range(4))
def test_the_scheduler_is_killed_when_a_peer_has_just_joined(tmp_path: Path, seed: int) -> None:
    """Found on real processes: the job waited for ever for commits that were made before the peer came."""
    task = Task.make(tmp_path, training__steps=8)

    async def join_and_restart(run: Run) -> None:
        await run.until_step(2)
        new = add_peer(run, "new", stage=seed % 2)
        await serves(run, new)
        await asyncio.sleep(run.rng.choice((0.0, 0.01, 0.1)))
        assert not run.job.record.state.is_final
        await run.rig.kill_scheduler()
        await asyncio.sleep(run.rng.uniform(0.1, 2.0))
        await run.rig.start_scheduler()
        run.job = run.rig.jobs.registry.find(run.job.record.id)
        before_s, steps = asyncio.get_running_loop().time(), run.job.progress.steps_done
        await run.until_step(steps + 1)
        # A peer that is known but was not told of its admission is waited for as long as any: grace_s.
        assert asyncio.get_running_loop().time() - before_s < 10.0

    train(task, 4, seed, join_and_restart)
