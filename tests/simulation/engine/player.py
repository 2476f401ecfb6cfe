"""Plays one seed of a scenario and judges it; run.py plays many."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random

import torch

from scheduler.storage.job_record import JobTokens
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.course import PLAIN
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.model.stage import Stage
from swarm.reference.trainer import sha256_of, train_step
from swarm.types import JobState
from tests.simulation.engine import checkers
from tests.simulation.engine.checkers import Facts
from tests.simulation.engine.counting import CountingStage, batches_of, counting_files, counting_spec, write_samples
from tests.simulation.engine.faults import heal, inject
from tests.simulation.engine.history import Calm, Ended, History, JobIs
from tests.simulation.engine.scenario import Scenario, Shape
from tests.simulation.engine.world import World, sim_task
from tests.support.sim import loop as sim
from tests.support.sim.loop import SimulationStuck
from tests.support.simulated import Tokens, small_spec, write_text

POLL_S = 0.1
LIMIT_S = 3600.0


@dataclass(slots=True)
class Result:
    """What became of one run."""

    scenario: Scenario
    seed: int
    shape: Shape
    history: History
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # what was done to the traffic, and faults by kind
    edges: Counter[str] = field(default_factory=Counter)
    microbatches: int = 0  # in committed steps
    virtual_s: float = 0.0
    description: str = ""
    log: tuple[str, ...] = ()

    @property
    def replay(self) -> str:
        """The command that does the same again."""
        return f"python -m tests.simulation.run --scenario '{self.scenario.name}' --seed {self.seed}"

    def __str__(self) -> str:
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.counts.items()) if count)
        return (
            f"{self.scenario.name} seed {self.seed}: {self.microbatches} microbatches in {self.virtual_s:.1f} "
            f"simulated s, {len(self.history.records)} records; {faults}"
        )

    def explain(self) -> str:
        """Everything that a person needs to find out why the run failed."""
        return "\n".join(
            [f"{self.scenario.name}, seed {self.seed}: {self.shape}"]
            + [f"FAILED: {failure}" for failure in self.failures]
            + [f"replay: {self.replay}", "", self.description]
        )


def play(scenario: Scenario, seed: int) -> Result:
    """One run of a scenario, judged; the same for the same scenario and seed."""
    torch.set_num_threads(1)
    global_dice = random.getstate()
    random.seed(seed)  # tenacity's pauses come from the module's generator
    shape = scenario.workload.drawn(Random(f"{seed}/shape"))
    job = _prepared(shape)
    root = Path(tempfile.mkdtemp(prefix="swarm-sim-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    result = Result(scenario, seed, shape, History())
    try:
        shutil.copytree(job.root / "shards", root / "shards")
        with nullcontext() if shape.real else counting_files():
            sim.run(_run(result, job, root), seed=seed, limit_s=LIMIT_S)
    except SimulationStuck as error:
        result.failures.append(f"I11: {error}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
        random.setstate(global_dice)
    result.failures += checkers.judge(result.history, facts_of(shape))
    result.counts.update(result.history.faults())
    return result


def facts_of(shape: Shape) -> Facts:
    """The facts of a job that are known without playing it."""
    job = _prepared(shape)
    return Facts(
        shape.stages,
        shape.microbatches,
        shape.steps,
        job.tokens_per_step,
        job.digests,
        job.weights,
        job.samples,
        shape.tied,
        shape.real,
    )


async def _run(result: Result, job: _Prepared, root: Path) -> None:
    scenario, shape = result.scenario, result.shape
    world = World(scenario, shape, job.spec, job.tokens, root)
    result.history = world.history
    loop = asyncio.get_running_loop()
    with world.logging():
        try:
            await _play_out(world, scenario, shape, result)
        finally:
            result.virtual_s = loop.time()
            result.description = world.describe() if result.failures else ""
            result.log = tuple(world.log_lines)
            counts = world.network.counts
            result.counts.update(
                duplicated=counts.duplicated, reordered=counts.reordered, lost=counts.lost, refused=counts.refused
            )
            result.edges.update(world.edge_passed)
            await world.close()
            world.look_at_checkpoints()


async def _play_out(world: World, scenario: Scenario, shape: Shape, result: Result) -> None:
    loop = asyncio.get_running_loop()
    world.start_scheduler()
    for number in range(shape.stages * shape.replicas + shape.spares):
        world.start_peer(f"peer-{number}")
    side = world.scheduler
    assert side is not None
    while side.membership is None or len(side.membership.idle_peers()) < len(world.peers):
        await asyncio.sleep(POLL_S)
        if any(ended.unexpected for _, ended in world.history.of(Ended)):
            return  # a checker says so
    assert side.jobs is not None
    record = (await _of_no_fault(world, side.jobs.submit(world.spec, world.tokens, {}))).record
    world.job_id = record.id
    harm = [sim_task(inject(world, fault, number)) for number, fault in enumerate(scenario.faults)]
    sampling = sim_task(world.sample_forever())
    watched = [sampling, *harm]
    started_s, state = loop.time(), ""
    try:
        while True:
            await asyncio.sleep(POLL_S)
            for task in watched:
                if task.done() and not task.cancelled():
                    task.result()
            job = world.job
            if job is not None and job.record.state.value != state:
                state = job.record.state.value
                world.history.add("", 0, JobIs(state, job.record.reason))
                if "no step was committed for" in job.record.reason:  # it may heal by itself, and is a bug all the same
                    result.failures.append(f"I11: {job.record.reason}")
            if JobState(state or "queued").is_final:
                break
            if not world.is_calm and loop.time() - started_s > scenario.safety_s:
                for task in harm:
                    task.cancel()
                world.history.add("", 0, Calm())
                heal(world)
            if loop.time() - started_s > scenario.safety_s + scenario.calm_s:
                result.failures.append(f"I11: the job is {state} {scenario.calm_s:g} s after the last fault")
                return
        if state not in scenario.expect:
            job = world.job
            reason = job.record.reason if job is not None else ""
            result.failures.append(f"the job is {state}, expected {' or '.join(scenario.expect)}: {reason}")
        world.sample()
        if job is not None:
            result.microbatches = job.progress.steps_done * shape.microbatches
            if state == "succeeded" and job.record.weights_sha256 != result_sha256(shape):
                result.failures.append("I4: the final weights are not those of one process")
    finally:
        for task in watched:
            task.cancel()


async def _of_no_fault(world: World, work):  # type: ignore[no-untyped-def]
    """Await a client's call that is made before the faults begin."""
    world.is_calm = True
    try:
        return await work
    finally:
        world.is_calm = False


# What is trained -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A job with its data, and the results of one process."""

    spec: JobSpec
    tokens: JobTokens
    root: Path
    tokens_per_step: tuple[int, ...]
    digests: tuple[tuple[str, ...], ...]  # after step t: per stage
    weights: tuple[str, ...]  # sha256 after step t
    samples: int


def _prepared(shape: Shape) -> _Prepared:
    """The job of a shape; the results of one process do not depend on peers and routes."""
    made = _trained(replace(shape, replicas=1, spares=0, routing="uniform", compute_s=(0.0, 0.0)))
    return replace(made, spec=made.spec.having("pipeline", routing=shape.routing))


@lru_cache(maxsize=512)
def _trained(shape: Shape) -> _Prepared:
    folder = Path(tempfile.mkdtemp(prefix="swarm-sim-data-"))
    if shape.real:
        spec, tokens, batches = _real_job(folder, shape)
        samples = 0
    else:
        spec = counting_spec(
            stages=shape.stages,
            steps=shape.steps,
            microbatches=shape.microbatches,
            overlap=shape.overlap,
            tied=shape.tied,
            routing=shape.routing,
            optimizer=shape.optimizer,
            checkpoint_every=shape.checkpoint_every,
        )
        samples = shape.steps * shape.microbatches
        tokens = write_samples(folder, samples)
        batches = batches_of(folder, tokens, spec)
    kind = Stage if shape.real else CountingStage
    stages = [kind(spec, stage, torch.device("cpu")) for stage in range(shape.stages)]
    digests, counts, weights = [], [], []
    for step in range(shape.steps):
        counts.append(train_step(stages, spec, batches, PLAIN.at(step)).tokens)
        digests.append(tuple(stage.digest() for stage in stages))
        weights.append(sha256_of(stages))
    return _Prepared(spec, tokens, folder, tuple(counts), tuple(digests), tuple(weights), samples)


def result_sha256(shape: Shape) -> str:
    """The weights that one process ends with."""
    return _prepared(shape).weights[-1]


def _real_job(folder: Path, shape: Shape):  # type: ignore[no-untyped-def]
    spec = resolve(
        small_spec(
            write_text(folder),
            pipeline__stages=shape.stages,
            pipeline__overlap=shape.overlap,
            pipeline__routing=shape.routing,
            training__steps=shape.steps,
            training__global_batch_sequences=2 * shape.microbatches,
            training__optimizer=shape.optimizer,
            config__tie_word_embeddings=shape.tied,
        ),
        Basis(ByteTokenizer.vocabulary_size, stages=shape.stages),
    )
    tokens = Tokens.make(folder, spec)
    return spec, tokens.of_job(), tokens.batches(spec)
