"""Jobs with islands on the rig of simulated stage servers, and one process beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from scheduler.jobs.job import Job
from swarm.checkpoint.reader import Checkpoint
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.islands import outer_courses
from swarm.job.leases import Cut
from swarm.job.outer_log import OUTER_LOG, Entry, OuterRecord, TookPart, read
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.types import JobState, PeerId
from tests.support.reference import Reference, reference
from tests.support.scenes import play
from tests.support.simulated import Rig, Tokens, small_spec, write_text


def diloco(source: Path, islands: int = 2, **changes: object) -> JobSpec:
    changes = {
        "islands__count": islands,
        "averaging__mode": "diloco",
        "outer__every_steps": 2,
        "training__steps": 3,
        "training__global_batch_sequences": 4 * islands,
        "pipeline__stages": 2,
        "data__validation_ratio": 0.005,
        "training__eval_every_steps": 3,
    } | changes
    return resolve(small_spec(source, **changes), Basis(ByteTokenizer.vocabulary_size))


def streaming(source: Path, islands: int = 2, **changes: object) -> JobSpec:
    """Two fragments, each captured every 4 steps and merged 1 step later."""
    changes = {
        "averaging__mode": "streaming",
        "outer__every_steps": 4,
        "outer__fragments": 2,
        "outer__overlap_steps": 1,
        "training__steps": 11,
    } | changes
    return diloco(source, islands, **changes)


def gaia(source: Path, islands: int = 2, **changes: object) -> JobSpec:
    """What is significant, captured every 2 steps and merged 1 step later; about half of all numbers."""
    changes = {"averaging__mode": "gaia", "outer__threshold": 0.3, "training__steps": 11} | changes
    return diloco(source, islands, **changes)


def by_speed(folder: Path, islands: int = 2, **changes: object) -> JobSpec:
    values: dict[str, object] = {
        "islands__shares": "speed",
        "training__steps": 12,
        "training__global_batch_sequences": 16,
        "training__microbatch_sequences": 1,
        "pipeline__stages": 1,
    }
    return diloco(write_text(folder), islands, **values | changes)


Story = Callable[[Rig, Job], Awaitable[None]]


async def nothing(rig: Rig, job: Job) -> None:
    pass


def run(spec: JobSpec, tokens: Tokens, peers: int, story: Story = nothing, seed: int = 1) -> tuple[Job, Rig]:
    """Play the job to its end while `story` goes on."""

    async def act(rig: Rig) -> tuple[Job, Rig]:
        job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())
        await rig.tasks.create_task(story(rig, job))
        job = rig.jobs.registry.find(job.record.id)
        await rig.finished(job)
        return job, rig

    return play(tokens, peers, act, seed=seed, limit_s=200.0)


def trained(
    folder: Path, spec: JobSpec, peers: int, story: Story = nothing, seed: int = 1, *, with_log: bool = False
) -> Job:
    """The job as it ended: with the weights of one process, which knows what became of islands if there is a log."""
    tokens = Tokens.make(folder, spec)
    job, _ = run(spec, tokens, peers, story, seed)
    check(job, reference(spec, tokens, log_of(job)) if with_log else reference(spec, tokens))
    if with_log and spec.islands.shares == "equal":
        assert job.progress.tokens == tokens_that_count(spec, tokens, log_of(job))
    return job


def check(job: Job, expected: Reference) -> None:
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    assert job.record.weights_sha256 == expected.sha256
    progress = job.progress
    assert (progress.steps_done, progress.loss) == (len(expected.losses), expected.losses[-1])
    assert progress.tokens > 0
    last = expected.evaluations[-1]
    assert (progress.evaluation_step, progress.evaluation_loss) == (last.version, last.loss)
    assert job.newest is not None
    assert job.newest.step == len(expected.losses)


def tokens_that_count(spec: JobSpec, tokens: Tokens, log: Sequence[Entry]) -> int:
    """The tokens of all steps whose islands took part in the exchange behind them, with equal shares."""
    first, *_ = paths = outer_courses(spec)
    exchanges = [(merge.behind, merge.fragment) for merge in first.outer]
    took_part, tokens_of = TookPart(log, spec.island_count, exchanges), tokens.batches(spec).tokens_of
    portions = (paths[n].inner.at(step).portion for step in range(spec.training.steps) for n in took_part.islands(step))
    return sum(map(tokens_of, portions))


async def until(rig: Rig, job: Job, says: Callable[[Job], bool]) -> None:
    while not says(job):
        await asyncio.sleep(0.005)


async def restart(rig: Rig) -> None:
    """The scheduler is killed, and another one starts a moment later."""
    await rig.kill_scheduler()
    await asyncio.sleep(0.2)
    await rig.start_scheduler()


async def paused(rig: Rig, job: Job) -> Checkpoint:
    """The checkpoint with which a person's pause ends."""
    await rig.jobs.pause(job, "a break")
    await until(rig, job, lambda one: one.record.state is JobState.PAUSED)
    assert job.newest is not None
    return job.newest


def lose(rig: Rig, job: Job, island: int) -> None:
    """All stage servers of its first stage die."""
    for peer in peers_of(job, island):
        rig.kill(peer)


def in_the_second_step(job: Job) -> bool:
    return job.progress.steps_done == 1


def peers_of(job: Job, island: int) -> list[PeerId]:
    """Those of its first stage."""
    return [peer for peer, place in sorted(job.record.peers.items()) if place == island * len(job.spec.pipeline.split)]


def log_of(job: Job) -> tuple[Entry, ...]:
    """What became of the islands, as the newest checkpoint says."""
    assert job.newest is not None
    with job.newest.open(f"model/{OUTER_LOG}") as file:
        return read(file.read())


def exchanges_of(log: Sequence[Entry]) -> list[OuterRecord]:
    return [record for record in log if isinstance(record, OuterRecord)]


def cuts_of(log: Sequence[Entry]) -> list[Cut]:
    return [record for record in log if isinstance(record, Cut)]
