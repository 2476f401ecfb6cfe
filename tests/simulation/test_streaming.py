"""Islands that merge fragments in turn while they train on: the weights are those of one process, whatever becomes of
single stage servers.

Real flows, brains and torch, as in test_islands.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from scheduler.brain.islands.brain import IslandsBrain
from scheduler.jobs.job import Job
from swarm.checkpoint.reader import Checkpoint
from swarm.errors import InvalidConfig
from swarm.job.spec import JobSpec
from swarm.types import JobState, PeerId, PeerState
from tests.support.effort import others
from tests.support.islands import check, diloco, in_the_second_step, log_of, peers_of, run, until
from tests.support.reference import reference
from tests.support.simulated import Rig, Tokens, write_text


def streaming(source: Path, islands: int = 2, **changes: object) -> JobSpec:
    """Two fragments, each captured every 4 steps and merged 1 step later."""
    changes = {
        "averaging__mode": "streaming",
        "outer__every_steps": 4,
        "outer__fragments": 2,
        "outer__overlap_steps": 1,
        "training__steps": 11,
        "training__eval_every_steps": 3,
    } | changes
    return diloco(source, islands, **changes)


def is_exchanging(job: Job) -> bool:
    """Rounds run while islands train on."""
    brain = job.brain
    return isinstance(brain, IslandsBrain) and brain._outer._exchanging is not None and not brain._outer.waiting_for()


@pytest.mark.parametrize(
    ("islands", "peers", "changes"),
    [
        (3, 3, {"pipeline__stages": 1, "outer__compression": "int8", "config__attention_dropout": 0.1}),
        (2, 4, {"outer__compression": "bfloat16", "outer__every_steps": 5, "outer__overlap_steps": 2}),
        (2, 6, {"pipeline__overlap": 1, "training__eval_every_steps": 1}),
        *others(
            (2, 8, {"config__tie_word_embeddings": True}),
            (1, 3, {"pipeline__stages": 1, "outer__compression": "none", "outer__mixing": 0.0}),
            (2, 2, {"pipeline__stages": 1, "outer__overlap_steps": 0, "outer__fragments": 1}),
        ),
    ],
)
def test_a_swarm_that_streams_ends_with_the_weights_of_one_process(
    tmp_path: Path, islands: int, peers: int, changes: dict[str, object]
) -> None:
    spec = streaming(write_text(tmp_path), islands, **changes)
    tokens = Tokens.make(tmp_path, spec)
    job, _ = run(spec, tokens, peers)
    check(job, reference(spec, tokens))
    assert job.record.timeline == 0, "it was taken back"
    portions = range(spec.training.steps * islands)
    assert job.progress.tokens == sum(tokens.batches(spec).tokens_of(portion) for portion in portions)


@pytest.mark.parametrize("seed", [1, *others(2)])
def test_an_envoy_that_dies_while_islands_train_on_is_replaced_by_one_that_holds_the_proposal(
    tmp_path: Path, seed: int
) -> None:
    spec = streaming(write_text(tmp_path), pipeline__stages=1, outer__overlap_steps=1)
    tokens = Tokens.make(tmp_path, spec)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, is_exchanging)
        brain = job.brain
        assert isinstance(brain, IslandsBrain)
        assert brain._outer._exchanging is not None
        (envoys,) = (one.newest[-1].envoys for one in brain._outer._exchanging._rounds.values())
        rig.kill(envoys[seed - 1].peer)

    job, _ = run(spec, tokens, 4, story, seed)
    check(job, reference(spec, tokens))
    assert job.record.timeline == 0


@pytest.mark.parametrize("seed", [2, *others(1, 3)])
def test_a_scheduler_that_is_killed_while_islands_stream_goes_on(tmp_path: Path, seed: int) -> None:
    spec = streaming(write_text(tmp_path), pipeline__stages=1)
    tokens, random = Tokens.make(tmp_path, spec), Random(seed)

    async def story(rig: Rig, job: Job) -> None:
        steps = random.randrange(2, 10)
        await until(rig, job, lambda one: one.progress.steps_done >= steps)
        if seed > 1:
            await until(rig, job, is_exchanging)
        await rig.kill_scheduler()
        await asyncio.sleep(0.2)
        await rig.start_scheduler()

    job, _ = run(spec, tokens, 4, story, seed)
    check(job, reference(spec, tokens))
    assert job.record.timeline == 0


def test_a_stage_server_that_joins_between_capture_and_merge_may_be_the_last_of_its_island(tmp_path: Path) -> None:
    """It fetches what its island proposes with the rest of the state."""
    changes = {"training__steps": 24, "outer__every_steps": 12, "outer__overlap_steps": 5, "outer__compression": "int8"}
    spec = streaming(write_text(tmp_path), pipeline__stages=1, **changes)
    tokens = Tokens.make(tmp_path, spec)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        lost, left = peers_of(job, 1)
        rig.kill(lost)
        await until(rig, job, lambda _: rig.membership.find(lost).state is PeerState.SUSPECT)
        rig.add_peer(PeerId("another"), rig.tasks, Random(7))
        await until(rig, job, lambda one: "another" in one.record.peers)
        await until(rig, job, lambda _: rig.membership.find("another").state is PeerState.SERVING)
        rig.kill(left)

    job, _ = run(spec, tokens, 4, story)
    check(job, reference(spec, tokens))
    assert (job.record.timeline, job.record.peers[PeerId("another")]) == (0, 1)


def test_a_job_that_streams_is_paused_and_goes_on_with_the_bits_that_it_would_have_had(tmp_path: Path) -> None:
    """Islands differ where it is saved: each has weights of its own, and has trained what it will propose."""
    spec = streaming(write_text(tmp_path), training__steps=16, checkpoint__every_steps=3)
    tokens, kept = Tokens.make(tmp_path, spec), list[Checkpoint]()

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 4)
        await rig.jobs.pause(job, "a break")
        await until(rig, job, lambda one: one.record.state is JobState.PAUSED)
        assert job.newest is not None
        assert {"weights", "islands/01/weights"} <= {file.path.rpartition("/")[0] for file in job.newest.files}
        kept.append(job.newest)
        await rig.jobs.resume(job, "", None)

    job, _ = run(spec, tokens, 4, story)
    check(job, reference(spec, tokens))
    assert job.record.first_steps == (0, kept[0].step)
    resumed = reference(spec, tokens, start=kept[0])
    assert resumed.sha256 == job.record.weights_sha256
    assert resumed.losses == reference(spec, tokens).losses[kept[0].step :]


def test_a_job_that_was_paused_amid_its_last_period_goes_on_with_as_many_steps_only(tmp_path: Path) -> None:
    """With more of them islands divide the data of this period otherwise: some was trained twice, and some never."""
    spec = streaming(write_text(tmp_path), training__steps=10)
    tokens = Tokens.make(tmp_path, spec)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 8)
        await rig.jobs.pause(job, "a break")
        await until(rig, job, lambda one: one.record.state is JobState.PAUSED)
        assert job.newest is not None
        assert job.newest.step == 9
        values = job.spec.model_dump()
        values["training"] |= {"steps": 16}
        with pytest.raises(InvalidConfig, match="would be trained twice"):
            await rig.jobs.resume(job, "", JobSpec.model_validate(values))
        await rig.jobs.resume(job, "", None)

    job, _ = run(spec, tokens, 4, story)
    check(job, reference(spec, tokens))


@pytest.mark.parametrize("lost", [0, *others(1)])
def test_an_island_that_is_lost_begins_anew_from_the_outer_weights(tmp_path: Path, lost: int) -> None:
    spec = streaming(write_text(tmp_path), training__steps=20, config__tie_word_embeddings=True)
    tokens = Tokens.make(tmp_path, spec)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done == 4 + lost)
        for peer in peers_of(job, lost):  # those of the other stage join the island that is left
            rig.kill(peer)

    job, _ = run(spec, tokens, 8, story)
    log = log_of(job)
    other = 1 - lost
    assert log[0].islands == (other,)
    assert [one.begins for one in log if one.begins] == [{lost: other}]
    assert log[-1].after_step < 18, "both islands are there in the end"
    check(job, reference(spec, tokens, log))
    assert job.record.timeline == 0


@pytest.mark.parametrize("seed", [1, *others(2)])
def test_a_killed_scheduler_knows_which_of_the_islands_that_stream_was_lost(tmp_path: Path, seed: int) -> None:
    spec = streaming(write_text(tmp_path), 3, pipeline__stages=1, training__steps=14)
    tokens = Tokens.make(tmp_path, spec)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, is_exchanging)
        rig.kill(peers_of(job, seed)[0])
        await until(rig, job, lambda one: one.progress.steps_done >= 5 + seed)
        await rig.kill_scheduler()
        await asyncio.sleep(0.2)
        await rig.start_scheduler()

    job, _ = run(spec, tokens, 3, story, seed)
    log = log_of(job)
    assert {one.islands for one in log} == {tuple({0, 1, 2} - {seed})}, "for want of a second stage server"
    check(job, reference(spec, tokens, log))
    assert job.record.timeline == 0


@pytest.mark.parametrize("late", [1, *others(0)])
def test_a_checkpoint_without_an_island_counts_what_another_has_trained_once(tmp_path: Path, late: int) -> None:
    """Whoever has no weights of its own there begins with the outer ones, and with the optimizer's state of another.

    With late microbatches an exchange once overwrote weights that were still evaluated, and the job waited for ever.
    """
    spec = streaming(write_text(tmp_path), pipeline__stages=1, training__steps=14, pipeline__overlap=late)
    tokens, paused = Tokens.make(tmp_path, spec), list[Checkpoint]()

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        rig.kill(peers_of(job, 0)[0])
        await until(rig, job, lambda one: one.progress.steps_done == 5)
        await rig.jobs.pause(job, "a break")
        await until(rig, job, lambda one: one.record.state is JobState.PAUSED)
        assert job.newest is not None
        paused.append(job.newest)
        rig.add_peer(PeerId("another"), rig.tasks, Random(7))
        await rig.jobs.resume(job, "", None)

    job, _ = run(spec, tokens, 2, story)
    expected = reference(spec, tokens, start=paused[0])
    assert (job.record.state, job.record.weights_sha256) == (JobState.SUCCEEDED, expected.sha256)
