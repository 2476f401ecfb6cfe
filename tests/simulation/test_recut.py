"""The claim: a job whose fleet shrinks for good goes on by itself with fewer stages, and ends with the same bits.

So does a job that was submitted before its stage servers, with as many stages as if they had been there.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from scheduler.jobs.job import Job, now_s
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.spec import JobSpec
from swarm.types import JobState, PeerId
from tests.support.reference import reference
from tests.support.scenes import SavingTask, Scene, play, resolved, stall
from tests.support.simulated import Rig, Tokens, small_spec, stale, write_text

WAIT_S = 60.0
MEMORY_BYTES = 1500 << 10  # of one stage server: a layer, but no microbatch of four sequences
FOUR: dict[str, Any] = {
    "pipeline__stages": 4,
    "pipeline__recut": "stall",
    "config__num_hidden_layers": 12,
    "limits__no_progress_s": WAIT_S,
}


async def halved(scene: Scene) -> None:
    """Kill six of eight stage servers in the middle of training, and wait until the job says what it does."""
    await scene.until_kept(2)
    await scene.until_step(3)
    await asyncio.sleep(scene.rng.uniform(0.0, 0.2))
    stay = [scene.job.stages[0][0], scene.job.stages[2][0]]
    for peer in [peer for pool in scene.job.stages.values() for peer in pool if peer not in stay]:
        scene.rig.kill(peer)
    while "goes on with 2 stages in" not in scene.job.reason:
        await asyncio.sleep(0.1)
    assert scene.job.record.state is JobState.STALLED


def of_eight(tmp_path: Path, staleness: int) -> SavingTask:
    return SavingTask.make(tmp_path, **FOUR, **stale(staleness))


@pytest.mark.parametrize(("staleness", "seed"), [(0, 1), (1, 2), (0, 3)])
def test_a_job_that_loses_half_of_its_fleet_for_good_goes_on_with_half_of_its_stages_bitwise(
    tmp_path: Path, staleness: int, seed: int
) -> None:
    async def act(scene: Scene) -> None:
        await halved(scene)
        began_s, before = now_s(), scene.job.spec
        await scene.until(JobState.LOADING)
        assert now_s() - began_s >= 0.9 * WAIT_S, "machines that fail together come back one after the other"
        assert scene.job.spec == before.having("pipeline", split=(6, 6), stages=2)
        assert "cut anew for the stage servers that are here: 2 stages of 6 + 6 layers" in scene.said()
        assert scene.sample("swarm_recuts_total") == 1.0
        await scene.succeeds()
        assert scene.job.record.timeline == 1
        assert re.search(r"goes on at step \d+ from checkpoint step-", scene.said()), "not from the beginning"

    stall(of_eight(tmp_path, staleness), 8, act, seed=seed)


def test_a_fleet_that_comes_back_in_time_gets_the_cut_that_it_had(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await halved(scene)
        await asyncio.sleep(0.8 * WAIT_S)
        for number in range(2):
            scene.add_peer(f"new-{number}")
        await scene.until(JobState.LOADING)
        assert len(scene.job.spec.split) == 4
        assert scene.sample("swarm_recuts_total") == 0.0
        await scene.succeeds()

    stall(of_eight(tmp_path, 0), 8, act)


@pytest.mark.parametrize("state", [JobState.STALLED, JobState.LOADING, JobState.RUNNING])
def test_a_scheduler_that_dies_before_or_behind_the_cut_goes_on_with_it(tmp_path: Path, state: JobState) -> None:
    async def act(scene: Scene) -> None:
        await halved(scene)
        await scene.until(state)
        await scene.rig.kill_scheduler()
        await scene.rig.start_scheduler()
        scene.job = scene.rig.jobs.registry.find(scene.job.record.id)
        await scene.succeeds()
        assert scene.job.spec.split == (6, 6)

    stall(of_eight(tmp_path, 0), 8, act)


def test_a_fleet_that_is_halved_twice_leaves_one_stage_and_one_that_grows_replicas(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await halved(scene)
        await scene.until(JobState.LOADING)
        await scene.until(JobState.RUNNING)
        scene.kill_stage(1)
        await scene.until(JobState.STALLED)
        await scene.until(JobState.LOADING)
        assert scene.job.spec.split == (12,)
        scene.add_peer("new")
        await scene.succeeds()
        assert scene.job.spec.split == (12,)
        assert scene.sample("swarm_recuts_total") == 2.0

    stall(SavingTask.make(tmp_path, **FOUR, **stale(0), training__steps=12), 8, act)


async def ends_cut_anew(rig: Rig, asked: JobSpec, tokens: Tokens, count: int, memory_bytes: int = 1 << 30) -> Job:
    """The job, ended, that was submitted when no stage server was there; each that came has so much memory."""
    job = await rig.jobs.submit(asked, tokens.of_job(), ByteTokenizer().tokenizer_files())
    await asyncio.sleep(5.0)
    assert len(job.spec.split) == 1
    for number in range(count):
        rig.add_peer(PeerId(f"peer-{number}"), rig.tasks, Random(number), memory_bytes=memory_bytes)
    await rig.finished(job)
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    return job


def test_a_job_that_is_submitted_before_its_stage_servers_is_cut_for_them_bitwise(tmp_path: Path) -> None:
    asked = small_spec(write_text(tmp_path), config__num_hidden_layers=4, pipeline__overlap=0)
    tokens = Tokens.make(tmp_path, resolved(asked))

    async def act(rig: Rig) -> None:
        job = await ends_cut_anew(rig, asked, tokens, 4)
        assert job.spec.split == (2, 2)
        assert job.record.weights_sha256 == reference(resolved(asked), tokens).sha256

    play(tokens, 0, act)


def test_a_job_that_only_smaller_microbatches_fit_when_it_is_placed_trains_on_these_bitwise(tmp_path: Path) -> None:
    asked = small_spec(
        write_text(tmp_path),
        config__num_hidden_layers=4,
        pipeline__overlap=0,
        training__microbatch_sequences="auto",
        training__global_batch_sequences=64,
        training__steps=2,
    )
    tokens = Tokens.make(tmp_path, resolved(asked))

    async def act(rig: Rig) -> None:
        job = await ends_cut_anew(rig, asked, tokens, 4, MEMORY_BYTES)
        assert job.spec.training.microbatch_sequences < resolved(asked).training.microbatch_sequences
        assert job.record.weights_sha256 == reference(job.spec, tokens).sha256

    play(tokens, 0, act)


def test_a_job_that_begins_from_another_has_its_narrow_places_however_many_stage_servers_come(tmp_path: Path) -> None:
    narrow = {"config__num_hidden_layers": 12, "model__narrow": {"kind": "maxout", "factor": 4}, "pipeline__overlap": 0}
    first = small_spec(write_text(tmp_path), training__steps=2, **narrow)
    tokens = Tokens.make(tmp_path, resolved(first))

    async def act(rig: Rig) -> None:
        rig.add_peer(PeerId("old"), rig.tasks, Random(9))
        before = await rig.jobs.submit(first, tokens.of_job(), ByteTokenizer().tokenizer_files())
        await rig.finished(before)
        rig.kill(PeerId("old"))
        while rig.membership.lasting_peers():
            await asyncio.sleep(1.0)
        resumes = {"training__steps": 4, "checkpoint__resume_from": f"{before.record.id}:2"}
        job = await ends_cut_anew(rig, small_spec(write_text(tmp_path), **narrow, **resumes), tokens, 8)
        assert job.spec.split == (6, 6)
        assert job.spec.model.narrow == before.spec.model.narrow

    play(tokens, 0, act)
