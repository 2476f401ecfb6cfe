"""The claim: whatever dies or is cut off at whatever moment, the weights are those of one process.

Real flows, brain and torch on virtual time and a transport that delays, reorders and duplicates. One lost or doubled
gradient anywhere would change the hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from scheduler.jobs.job import Job
from swarm.data import ByteTokenizer
from swarm.errors import Fenced
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec
from swarm.reference.trainer import train_local
from swarm.sim import loop as sim
from swarm.types import JobState, PeerId, PeerState
from tests.support.simulated import SCHEDULER, Done, Rig, Tokens, small_spec, write_text


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


BEFORE = (JobState.QUEUED, JobState.PLACING, JobState.LOADING)


@dataclass(frozen=True, slots=True)
class Task:
    """A job and the weights that it must end with."""

    spec: JobSpec
    tokens: Tokens
    sha256: str

    @classmethod
    def make(cls, folder: Path, **changes: Any) -> Task:
        spec = small_spec(write_text(folder), **{"pipeline__stages": 2, "training__steps": 4, **changes})
        spec = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
        tokens = Tokens.make(folder, spec)
        return cls(spec, tokens, train_local(spec, tokens.batches(spec), device=torch.device("cpu")).sha256)


@dataclass(slots=True)
class Run:
    """A job under way, for whoever breaks things."""

    rig: Rig
    job: Job
    rng: Random

    async def until_step(self, step: int) -> None:
        """Return some time after so many commits, at a random moment of the step that follows."""
        while self.job.progress.steps_done < step or self.job.record.state in BEFORE:
            await asyncio.sleep(0.01)
            if self.job.record.state.is_final:
                return
        await asyncio.sleep(self.rng.uniform(0.0, 0.3))

    async def until_it_holds_something(self, peer: PeerId) -> None:
        """Return when the peer has accumulated what is not committed, or the job is over."""
        while self.job.driver is not None:
            ledger = self.job.driver.brain._state.ledger
            if any(ledger.share(step, peer) for step in ledger.open_steps()):
                return
            await asyncio.sleep(0.001)

    def spare(self) -> list[PeerId]:
        """Replicas that are not the last of their stage."""
        pools = [[peer for peer in pool if peer in self.rig.servers] for pool in self.job.stages.values()]
        return [peer for pool in pools if len(pool) > 1 for peer in pool]


def train(
    task: Task, peers: int, seed: int, breaking: Callable[[Run], Awaitable[None]], hold_bytes: int = 1 << 30
) -> Run:
    """Run the job to its end while `breaking` is at work; it must succeed with the right weights."""

    async def main() -> Run:
        run: Run | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                database = f"sqlite:///{task.tokens.root / f'{seed}.db'}"
                rig = await Rig.start(task.tokens, peers, tasks, Random(seed), database=database, hold_bytes=hold_bytes)
                while len(rig.membership.idle_peers()) < peers:
                    await asyncio.sleep(0.1)
                job = await rig.jobs.submit(task.spec, task.tokens.of_job(), {})
                run = Run(rig, job, Random(f"{seed} breaks"))
                await breaking(run)
                await rig.finished(run.job)
                assert run.job.record.state is JobState.SUCCEEDED, run.job.record.reason
                assert run.job.record.weights_sha256 == task.sha256
                await rig.network.close()
                raise Done
        except* Done:
            pass
        assert run is not None
        return run

    return sim.run(main(), seed=seed, limit_s=400.0)


def replayed(run: Run) -> float:
    samples = [sample for metric in run.rig.metrics.registry.collect() for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.name == "swarm_microbatches_replayed_total")


SHAPES = [
    {"pipeline__staleness": 0},
    {"pipeline__staleness": 1},
    {"pipeline__staleness": 1, "config__tie_word_embeddings": True},
    {"pipeline__staleness": 0, "pipeline__stages": 3, "model__recompute": True},
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
            run.job = run.rig.jobs.find(run.job.record.id)
            if run.job.record.state is JobState.RUNNING:
                assert run.job.progress.steps_done in (steps, steps + 1), "nothing is rolled back"
                steps = run.job.progress.steps_done
                await run.until_step(steps + 1)
                assert asyncio.get_running_loop().time() - before_s < 3.0

    run = train(task, 4, 1, restart)
    assert run.rig.store.epoch > 2


def test_a_second_scheduler_on_the_same_database_ends_the_first_and_takes_its_job(tmp_path: Path) -> None:
    """The first must not write a row that the second does not know of; its stage servers go over to the second."""
    task = Task.make(tmp_path)

    async def take_over(run: Run) -> None:
        await run.until_step(1)
        first, store = run.rig.scheduler, run.rig.store
        run.rig.network.kill(SCHEDULER)  # the first goes on, but nobody reaches it at this address any more
        await run.rig.start_scheduler()
        with pytest.raises(Fenced):
            await store.put_job(run.job.record)
        run.job = run.rig.jobs.find(run.job.record.id)
        first.cancel()
        await asyncio.wait({first})

    train(task, 4, 1, take_over)


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
