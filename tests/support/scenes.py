"""Simulated systems at work, for tests that break something in them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar, TypeVar

from scheduler.api.job_service import drain
from scheduler.brain.explain.facts import explain_peer
from scheduler.jobs.job import Job
from swarm.checkpoint.reader import Checkpoint, list_checkpoints
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.types import JobState, PeerId, PeerState
from tests.support.acts import Played, played
from tests.support.reference import reference
from tests.support.sim import loop as sim
from tests.support.simulated import Done, Members, Rig, Tokens, small_spec, write_text

T = TypeVar("T")
PEERS = 4  # at a desk
BEFORE = (JobState.QUEUED, JobState.PLACING, JobState.LOADING)


def play(
    tokens: Tokens,
    peers: int,
    act: Callable[[Rig], Awaitable[T]],
    *,
    seed: int = 1,
    rng: Random | None = None,
    hold_bytes: int = 1 << 30,
    limit_s: float = 7200.0,
    record: bool = False,
    members: Members | None = None,
) -> T:
    """Run a simulated system of idle peers for as long as `act` takes; give what `act` gives, raise what it raises."""

    async def main() -> T:
        given: list[T] = []
        raised: list[Exception] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                chance = Random(seed) if rng is None else rng
                rig = await Rig.start(
                    tokens, peers, tasks, chance, hold_bytes=hold_bytes, record=record, members=members
                )
                while len(rig.membership.idle_peers()) < peers:
                    await asyncio.sleep(0.1)
                try:
                    given.append(await act(rig))
                except Exception as error:
                    raised.append(error)
                await rig.network.close()
                raise Done
        except* Done:
            pass
        for error in raised:
            raise error
        return given[0]

    return sim.run(main(), seed=seed, limit_s=limit_s)


def resolved(spec: JobSpec) -> JobSpec:
    """The spec of a job on text, one token a byte."""
    return resolve(spec, Basis(ByteTokenizer.vocabulary_size))


@dataclass(frozen=True, slots=True)
class Task:
    """A job and the weights that it must end with."""

    spec: JobSpec
    tokens: Tokens
    sha256: str

    DEFAULTS: ClassVar[dict[str, Any]] = {"pipeline__stages": 2, "training__steps": 4}

    @classmethod
    def make(cls, folder: Path, **changes: Any) -> Task:
        values = {**cls.DEFAULTS, **changes}
        values.setdefault("config__num_hidden_layers", values["pipeline__stages"])
        spec = resolved(small_spec(write_text(folder), **values))
        tokens = Tokens.make(folder, spec)
        return cls(spec, tokens, reference(spec, tokens).sha256)


class SavingTask(Task):
    """A job of eight steps that saves a checkpoint at every second one."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "pipeline__stages": 2,
        "training__steps": 8,
        "training__global_batch_sequences": 6,
        "checkpoint__every_steps": 2,
    }


@dataclass(slots=True)
class Run:
    """A job at work, for a test that breaks something."""

    rig: Rig
    job: Job
    rng: Random
    sha256: str = ""  # of the weights that it must end with

    async def until_step(self, step: int) -> None:
        """Return some time after so many commits, at a random moment of the step that follows."""
        while self.job.progress.steps_done < step or self.job.record.state in BEFORE:
            await asyncio.sleep(0.01)
            if self.job.record.state.is_final:
                return
        await asyncio.sleep(self.rng.uniform(0.0, 0.3))

    async def until_it_holds_something(self, peer: PeerId) -> None:
        """Return when the peer has accumulated what is not committed, or the job is over."""
        while self.job.brain is not None:
            ledger = self.job.brain._state.ledger
            if any(ledger.share(step, peer) for step in ledger.open_steps()):
                return
            await asyncio.sleep(0.001)

    def spare(self) -> list[PeerId]:
        """Replicas that are not the last of their stage."""
        pools = [[peer for peer in pool if peer in self.rig.servers] for pool in self.job.stages.values()]
        return [peer for pool in pools if len(pool) > 1 for peer in pool]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a counter's series with these labels."""
        samples = [sample for metric in self.rig.metrics.registry.collect() for sample in metric.samples]
        return sum(found.value for found in samples if found.name == name and labels.items() <= found.labels.items())

    async def restart_scheduler(self) -> None:
        """Kill the scheduler, and start one on its database."""
        await self.rig.kill_scheduler()
        await self.rig.start_scheduler()
        self.job = self.rig.jobs.registry.find(self.job.record.id)

    async def succeeds(self) -> None:
        await self.rig.finished(self.job)
        assert self.job.record.state is JobState.SUCCEEDED, self.job.record.reason
        assert self.job.record.weights_sha256 == self.sha256


def train(
    task: Task,
    peers: int,
    seed: int,
    breaking: Callable[[Run], Awaitable[object]],
    hold_bytes: int = 1 << 30,
    *,
    record: bool = False,
) -> Run:
    """Run the job to its end while `breaking` is at work; it must succeed with the right weights."""

    async def act(rig: Rig) -> Run:
        job = await rig.jobs.submit(task.spec, task.tokens.of_job(), {})
        run = Run(rig, job, Random(f"{seed} breaks"), task.sha256)
        await breaking(run)
        await run.succeeds()
        return run

    return play(task.tokens, peers, act, seed=seed, hold_bytes=hold_bytes, limit_s=400.0, record=record)


def training(peers: int, seed: int, **changes: Any) -> Played:
    """A test of a Run: a Task with these changes in a system of `peers`, which succeeds when the test is over."""
    return played(lambda act, tmp_path: train(Task.make(tmp_path, **changes), peers, seed, act))


def replayed(run: Run) -> float:
    """How many microbatches were computed again."""
    return run.total("swarm_microbatches_replayed_total")


def add_peer(run: Run, name: str, **options: Any) -> PeerId:
    """Start one more stage server."""
    run.rig.add_peer(PeerId(name), run.rig.tasks, Random(run.rng.random()), **options)
    return PeerId(name)


async def serves(run: Run, peer: PeerId) -> None:
    """Return when the peer is a replica, or the job is over."""
    while not run.job.record.state.is_final:
        known = run.rig.membership.get(peer)
        is_replica = any(peer in replicas for replicas in run.job.stages.values())
        if is_replica and known is not None and known.state is PeerState.SERVING and known.job:
            return
        await asyncio.sleep(0.01)


async def drained(run: Run, peer: str) -> list[str]:
    """What `drain` tells until the peer serves no job."""
    said = []
    async for known, waits_for in drain(run.rig.jobs, run.rig.membership, peer, "test"):
        said.append(waits_for)
        if not waits_for:
            assert not known.job
    return said


def about_peer(run: Run, peer: PeerId) -> dict[str, str]:
    """What `explain` tells of the peer, by topic."""
    known, now_s = run.rig.membership.find(peer), asyncio.get_running_loop().time()
    idle = next((candidate for candidate in run.rig.jobs.idle() if candidate.peer == peer), None)
    assert run.job.run is not None
    situation = run.job.situation() if known.job else None
    return {fact.topic: fact.text for fact in explain_peer(known, situation, idle, {}, now_s)}


@dataclass(slots=True)
class Scene:
    """A job that saves and goes back, for a test that breaks something."""

    rig: Rig
    task: Task
    job: Job
    rng: Random

    async def until_step(self, step: int) -> None:
        while self.job.progress.steps_done < step or self.job.record.state is not JobState.RUNNING:
            assert not self.job.record.state.is_final, self.job.record.reason
            await asyncio.sleep(0.005)

    async def until(self, *states: JobState) -> None:
        async for _ in self.rig.jobs.watch(self.job):
            if self.job.record.state in states:
                return
        assert self.job.record.state in states, self.job.record.reason

    async def until_reason(self, text: str) -> None:
        async for _ in self.rig.jobs.watch(self.job):
            if text in self.job.record.reason:
                return
        raise AssertionError(self.job.record.reason)

    async def until_kept(self, step: int) -> None:
        """Return when a checkpoint at this step or a later one is there."""
        while not any(checkpoint.step >= step for checkpoint in self.checkpoints()):
            await asyncio.sleep(0.005)

    def kill_stage(self, stage: int) -> list[PeerId]:
        """Kill all that serve the stage, as with kill -9."""
        victims = list(self.job.stages[stage])
        for peer in victims:
            self.rig.kill(peer)
        return victims

    def add_peer(self, name: str) -> None:
        self.rig.add_peer(PeerId(name), self.rig.tasks, Random(self.rng.random()))

    def checkpoints(self) -> list[Checkpoint]:
        job = self.job.record.id
        return list_checkpoints(self.rig.jobs.stores.checkpoints.storage(self.job.spec, job), job)[0]

    def damage(self, checkpoint: Checkpoint) -> None:
        folder = self.task.tokens.root / "jobs" / self.job.record.id / "checkpoints" / checkpoint.name
        path = folder / "optimizer" / "embed.safetensors"
        path.write_bytes(path.read_bytes()[:-1])

    def said(self) -> str:
        return "\n".join(line.message for line in self.rig.jobs.stores.logs.of(self.job.record.id).kept()[0])

    def sample(self, name: str, **labels: str) -> float | None:
        return self.rig.metrics.registry.get_sample_value(name, {"job_id": self.job.record.id, **labels})

    async def succeeds(self, *, may_stand_still: bool = False) -> None:
        """The job ends with the right weights, and each of its steps counts once."""
        await self.rig.finished(self.job, may_stand_still=may_stand_still)
        assert self.job.record.state is JobState.SUCCEEDED, self.job.record.reason
        assert self.job.record.weights_sha256 == self.task.sha256
        assert self.job.record.hint == ""
        batches, steps = self.task.tokens.batches(self.task.spec), self.task.spec.training.steps
        assert self.job.progress.steps_done == steps
        assert self.job.progress.tokens == sum(batches.tokens_of(step) for step in range(steps))


def stall(task: Task, peers: int, act: Callable[[Scene], Awaitable[None]], *, seed: int = 1) -> None:
    """Submit the job to a system of `peers` and let `act` do the rest."""

    async def submitted(rig: Rig) -> None:
        job = await rig.jobs.submit(task.spec, task.tokens.of_job(), ByteTokenizer().tokenizer_files())
        await act(Scene(rig, task, job, Random(f"{seed} breaks")))

    play(task.tokens, peers, submitted, seed=seed)


def saving(peers: int = 2, **changes: Any) -> Played:
    """A test of a Scene: a SavingTask with these changes, submitted to a system of `peers`."""
    return played(lambda act, tmp_path: stall(SavingTask.make(tmp_path, **changes), peers, act))


def make_spec(folder: Path, **changes: object) -> JobSpec:
    """A job of six steps in two stages."""
    values: dict[str, object] = {
        "pipeline__stages": 2,
        "training__steps": 6,
        "training__global_batch_sequences": 6,
        "config__num_hidden_layers": 4,
        "config__tie_word_embeddings": True,
    }
    return resolved(small_spec(write_text(folder), **{**values, **changes}))


@dataclass(slots=True)
class Desk:
    """A system with idle peers, for a test that submits jobs to it."""

    rig: Rig
    tokens: Tokens
    spec: JobSpec  # of a job on these data

    async def submit(self, spec: JobSpec | None = None, **whose: Any) -> Job:
        files = ByteTokenizer().tokenizer_files()
        return await self.rig.jobs.submit(spec or self.spec, self.tokens.of_job(), files, **whose)

    async def until_step(self, job: Job, step: int) -> None:
        async for _ in self.rig.jobs.watch(job):
            if job.progress.steps_done >= step:
                return

    async def until_state(self, job: Job, *states: JobState) -> None:
        async for _ in self.rig.jobs.watch(job):
            if job.record.state in states:
                return
        assert job.record.state in states, job.record.reason

    def checkpoints(self, job: Job) -> list[Checkpoint]:
        return list_checkpoints(self.rig.jobs.stores.checkpoints.storage(job.spec, job.record.id), job.record.id)[0]

    def said(self, job: Job) -> str:
        return "\n".join(line.message for line in self.rig.jobs.stores.logs.of(job.record.id).kept()[0])

    def sample(self, name: str, **labels: str) -> float:
        return self.rig.metrics.registry.get_sample_value(name, labels) or 0.0


def at_desk(
    spec: JobSpec, tokens: Tokens, act: Callable[[Desk], Awaitable[None]], *, peers: int = PEERS, seed: int = 1
) -> None:
    """Run a system with idle peers for as long as `act` takes."""

    async def main(rig: Rig) -> None:
        await act(Desk(rig, tokens, spec))

    play(tokens, peers, main, seed=seed)


def of_desk(peers: int = PEERS, **changes: object) -> Played:
    """A test of a Desk, whose spec is `make_spec` with these changes."""

    def run(act: Callable[[Desk], Awaitable[None]], tmp_path: Path) -> None:
        spec = make_spec(tmp_path, **changes)
        at_desk(spec, Tokens.make(tmp_path, spec), act, peers=peers)

    return played(run)
