"""The claim: a job that lost a whole stage waits, goes on by itself when it has peers, and ends with the same bits.

Real flows, brain and torch on virtual time: whatever of the abandoned timeline counted would change the hash.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler.api.members.passes import Issuer
from scheduler.api.views import job_view
from scheduler.assembly import assemble
from scheduler.brain import inputs
from scheduler.brain.explain.facts import Fact, explain_job
from scheduler.brain.state.brain_state import Mode
from scheduler.jobs.driver import JobDriver
from swarm.checkpoint.storage import LocalStorage
from swarm.errors import PeerUnavailable, StorageError
from swarm.pki.passes import PassKey
from swarm.types import JobState
from swarm.wire.messages import StoreHeader
from tests.support.scenes import Run, SavingTask, Scene, saving, stall
from tests.support.simulated import SCHEDULER, stale

CPU = torch.device("cpu")
STEPS = 8


def explained(scene: Scene) -> list[Fact]:
    job = scene.job
    return explain_job(scene.rig.jobs.standing(job), job.situation(), [], job.clock_s())


@pytest.mark.parametrize(
    ("stages", "lost", "staleness", "tied", "seed"),
    [(2, 0, 1, True, 1), (2, 1, 0, False, 2), (3, 1, 1, False, 3), (3, 2, 0, True, 4)],
)
def test_a_job_whose_stage_is_lost_waits_and_goes_on_with_a_new_peer_bitwise(
    tmp_path: Path, stages: int, lost: int, staleness: int, tied: bool, seed: int
) -> None:
    task = SavingTask.make(tmp_path, pipeline__stages=stages, **stale(staleness), config__tie_word_embeddings=tied)

    async def act(scene: Scene) -> None:
        job = scene.job
        await scene.until_kept(2)
        await scene.until_step(3)
        await asyncio.sleep(scene.rng.uniform(0.0, 0.2))
        (victim,) = scene.kill_stage(lost)
        await scene.until(JobState.STALLED)
        seen = job.progress.steps_done
        assert f"stage server {victim} (stage {lost}) is gone: " in job.record.reason
        assert "--grace 5" in job.record.reason
        assert scene.sample("swarm_job_state", state="stalled") == 1.0
        await scene.until_reason("needs 1 replica more")
        assert f"goes on at step {job.start.step if job.start else None} from checkpoint step-" in job.record.reason
        assert "start stage servers" in job.record.hint
        assert f"swarm cancel {job.record.id}" in job.record.hint
        assert (job.record.timeline, job.stages, job.record.peers) == (1, {}, {})
        assert 2 <= job.progress.steps_done <= seen, "what is not in the checkpoint does not count"
        assert scene.sample("swarm_job_step") == job.progress.steps_done
        assert scene.sample("swarm_train_loss") == job.progress.loss
        left = sorted(peer.hello.peer for peer in scene.rig.membership.idle_peers())
        assert left == sorted(scene.rig.servers), "all that are left were released"

        await asyncio.sleep(2 * task.spec.limits.no_progress_s)
        assert job.record.state is JobState.STALLED, "it waits for as long as it takes"
        scene.add_peer("new")
        await scene.until(JobState.LOADING)
        assert job.record.hint == ""
        await scene.succeeds()
        assert job.record.timeline == 1
        assert {checkpoint.timeline for checkpoint in scene.checkpoints()} == {0, 1}

    stall(task, stages, act, seed=seed)


@saving(4)
async def test_the_remaining_peers_are_enough_if_they_can_serve_all_stages(scene: Scene) -> None:
    await scene.until_kept(2)
    await scene.until_step(3)
    assert len(scene.kill_stage(1)) == 2
    await scene.until(JobState.STALLED)
    await scene.succeeds()


@saving()
async def test_a_damaged_newest_checkpoint_is_skipped_and_named(scene: Scene) -> None:
    await scene.until_kept(4)
    scene.kill_stage(1)
    await asyncio.sleep(1.0)  # what was on its way is kept or given up
    older, newest = scene.checkpoints()[-2:]
    scene.damage(newest)
    await scene.until_reason("needs 1 replica more")
    assert f"goes on at step {older.step} from checkpoint {older.name} ({newest.name} was skipped" in (
        scene.job.record.reason
    )
    assert f"{newest.name} was skipped" in scene.said()
    scene.add_peer("new")
    await scene.succeeds()


@saving(checkpoint__every_steps=0, checkpoint__every_s=0.0)
async def test_without_a_checkpoint_it_begins_again_at_its_start(scene: Scene) -> None:
    await scene.until_step(3)
    risks = [fact.text for fact in explained(scene) if fact.topic == "risk"]
    reached = scene.job.progress.steps_done
    assert risks == [f"stage {stage} has one replica; its loss costs {reached} steps" for stage in (0, 1)]
    scene.kill_stage(0)
    await scene.until_reason("needs 1 replica more")
    lost = scene.job.record.repeats.steps
    assert lost >= reached
    cost = f"{lost} steps are lost: no checkpoint"
    assert f"; {cost}; goes on at step 0 from the beginning" in scene.job.record.reason
    name = scene.job.record.id
    here = f"or go on with what is here: swarm pause {name}, swarm resume {name} --set pipeline.stages=1; or stop"
    assert here in scene.job.record.hint
    assert f"{cost}; goes on at step 0" in scene.said()
    await scene.rig.kill_scheduler()
    await scene.rig.start_scheduler()
    scene.job = scene.rig.jobs.registry.find(scene.job.record.id)
    await scene.until_reason("needs 1 replica more")
    assert f"; {cost}; goes on at step 0 from the beginning" in scene.job.record.reason, "the loss is still said"
    assert (scene.job.progress.steps_done, scene.job.progress.tokens) == (0, 0)
    assert scene.sample("swarm_job_step") == 0.0
    assert scene.sample("swarm_train_loss") is None
    scene.add_peer("new")
    await scene.until_step(1)
    assert scene.job.reason.endswith(f"; {cost}"), "until it has come as far again"
    await scene.until_step(lost)
    assert cost not in scene.job.reason
    await scene.succeeds()
    assert job_view(scene.job, 0.0).lost_steps == lost


@saving()
async def test_a_job_that_started_from_another_goes_back_to_where_it_started(scene: Scene) -> None:
    await scene.succeeds()
    first = scene.job.record.id
    start = scene.checkpoints()[0].step
    section = {"every_steps": 0, "every_s": 0.0, "resume_from": f"{first}:{start}"}
    spec = scene.task.spec.having("checkpoint", **section)
    scene.job = await scene.rig.jobs.submit(spec, scene.task.tokens.of_job(), {})
    await scene.until_step(start + 1)
    scene.kill_stage(1)
    await scene.until_reason("needs 1 replica more")
    assert f"goes on at step {start} from checkpoint step-" in scene.job.record.reason
    scene.add_peer("new")
    await scene.rig.finished(scene.job)
    assert scene.job.record.weights_sha256 == scene.task.sha256


@saving()
async def test_checkpoints_of_which_none_verifies_are_left_to_a_person(scene: Scene) -> None:
    """Going back to the start would abandon them, and a disk that comes back has them still."""
    await scene.until_kept(2)
    scene.kill_stage(1)
    await asyncio.sleep(1.0)
    for checkpoint in scene.checkpoints():
        scene.damage(checkpoint)
    await scene.until(JobState.PAUSED)
    assert "no checkpoint of the job verifies: step-" in scene.job.record.reason
    assert f"swarm resume {scene.job.record.id} --from 0" in scene.job.record.hint
    scene.add_peer("new")
    await scene.rig.jobs.resume(scene.job, "0", None)
    await scene.succeeds()


@saving()
async def test_a_storage_that_is_away_is_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = scene.rig.jobs.stores.checkpoints
    real, asked = keeping.choose, 0

    async def away(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise StorageError("the bucket does not answer")
        return await real(*arguments)

    monkeypatch.setattr(keeping, "choose", away)
    await scene.until_kept(2)
    scene.kill_stage(1)
    scene.add_peer("new")
    await scene.until_reason("looks for the newest checkpoint that verifies: the bucket does not answer")
    await scene.succeeds()
    assert asked == 4


@saving(3, pipeline__stages=3)
async def test_a_job_stalls_twice_and_once_more_while_it_loads(scene: Scene) -> None:
    await scene.until_kept(2)
    scene.kill_stage(2)
    await scene.until(JobState.STALLED)
    scene.add_peer("new-1")
    await scene.until(JobState.LOADING)
    scene.kill_stage(0)
    await scene.until(JobState.STALLED)
    assert "(stage 0) is gone" in scene.job.record.reason
    scene.add_peer("new-2")
    await scene.until_step(5)
    scene.kill_stage(1)
    await scene.until(JobState.STALLED)
    scene.add_peer("new-3")
    await scene.succeeds()
    assert scene.job.record.timeline == 3


@saving()
async def test_a_job_that_fails_whenever_it_loads_rests_longer_each_time(scene: Scene) -> None:
    """A stage that does not fit ended one stage server after the other, as fast as they were started again."""
    tried_s: list[float] = []
    loop = asyncio.get_running_loop()

    async def fail(failure: int) -> None:
        await scene.until(JobState.LOADING)
        tried_s.append(loop.time())
        scene.kill_stage(1)
        scene.add_peer(f"new-{failure}-{len(tried_s)}")
        await scene.until_reason(f"tries again in {2 ** (failure - 1)} s, failure {failure}")
        tried_s[-1] = loop.time() - tried_s[-1]
        assert "goes on at step 0 from the beginning" in scene.job.record.reason
        assert ("too little memory" in scene.job.record.hint) == (failure > 1)
        rests_s = loop.time()
        await scene.until(JobState.LOADING)
        assert loop.time() - rests_s == pytest.approx(max(2.0, 2.0 ** (failure - 1)), abs=0.6), "2 s: it settles"

    for failure in range(1, 6):
        await fail(failure)
    await scene.until_step(1)
    scene.kill_stage(0)
    scene.add_peer("another")
    await scene.until(JobState.STALLED)
    await scene.until(JobState.LOADING)
    assert scene.job.stalls.count == 0, "it had trained"
    scene.kill_stage(1)
    scene.add_peer("one-more")
    await scene.until_reason("failure 1")
    await scene.succeeds()


@pytest.mark.parametrize("version", [4, STEPS])
@saving(pipeline__overlap=0)
async def test_a_stage_that_is_lost_while_it_hands_over_a_checkpoint_costs_that_checkpoint(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    real, killed = scene.rig.parts.transfer.store, asyncio.Event()

    async def store(header: StoreHeader, chunks: Any) -> str:
        if (header.version, header.stage) == (version, 1) and not killed.is_set():
            killed.set()
            scene.kill_stage(1)
            await asyncio.sleep(3600.0)
        return await real(header, chunks)

    monkeypatch.setattr(scene.rig.parts.transfer, "store", store)
    await killed.wait()
    await scene.until_reason("needs 1 replica more")
    assert version not in [checkpoint.step for checkpoint in scene.checkpoints()]
    assert not list(scene.task.tokens.root.glob("jobs/*/checkpoints/*.tmp-*")), "half a checkpoint was left behind"
    scene.add_peer("new")
    await scene.succeeds()


@saving()
async def test_a_job_whose_last_checkpoint_is_there_has_succeeded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage is lost between the last checkpoint and the word that it is kept: nothing is left to train."""
    real = JobDriver.checkpoint_written

    def unheard(driver: JobDriver, version: int, reason: str = "", fault: str = "") -> None:
        if version == STEPS:
            scene.kill_stage(0)
        else:
            real(driver, version, reason, fault)

    monkeypatch.setattr(JobDriver, "checkpoint_written", unheard)
    await scene.succeeds()
    assert scene.job.record.timeline == 0
    assert "job is stalled: " in scene.said()


@pytest.mark.parametrize("after_s", [0.0, 30.0])
@saving()
async def test_a_scheduler_that_is_killed_while_a_job_is_stalled_takes_it_up_again(
    scene: Scene, after_s: float
) -> None:
    await scene.until_kept(2)
    (victim,) = scene.kill_stage(1)
    await scene.until(JobState.STALLED)
    await asyncio.sleep(after_s)
    await scene.rig.kill_scheduler()
    await asyncio.sleep(3.0)
    await scene.rig.start_scheduler()
    scene.job = scene.rig.jobs.registry.find(scene.job.record.id)
    assert scene.job.record.state is JobState.STALLED
    await scene.until_reason("needs 1 replica more")
    assert scene.job.record.reason.count("goes on at step") == 1
    assert f"stage server {victim} (stage 1) is gone" in scene.job.record.reason, "what was lost is still said"
    scene.add_peer("new")
    await scene.succeeds()


@saving()
async def test_a_stage_of_which_nobody_comes_back_after_a_restart_is_lost(scene: Scene) -> None:
    await scene.until_kept(2)
    await scene.until_step(3)
    await scene.rig.kill_scheduler()
    (victim,) = scene.kill_stage(1)
    await scene.rig.start_scheduler()
    scene.job = scene.rig.jobs.registry.find(scene.job.record.id)
    assert scene.job.record.state is JobState.RUNNING
    restarted_s = asyncio.get_running_loop().time()
    await scene.until(JobState.STALLED)
    assert asyncio.get_running_loop().time() - restarted_s == pytest.approx(5.0, abs=0.5)
    assert f"stage 1 has no replica: {victim} did not come back" in scene.job.record.reason
    scene.add_peer("new")
    await scene.succeeds()


@pytest.mark.parametrize("on_stall", ["pause", "fail"])
def test_on_stall_pauses_or_fails_the_job(tmp_path: Path, on_stall: str) -> None:
    task = SavingTask.make(tmp_path, limits__on_stall=on_stall)

    async def act(scene: Scene) -> None:
        await scene.until_kept(2)
        (victim,) = scene.kill_stage(1)
        await scene.until(JobState.PAUSED if on_stall == "pause" else JobState.FAILED)
        record = scene.job.record
        assert f"stage server {victim} (stage 1) is gone" in record.reason
        assert f"go on from step {scene.checkpoints()[-1].step} with: swarm resume {record.id}" in record.hint
        assert record.error_code == ("" if on_stall == "pause" else PeerUnavailable.code)
        scene.add_peer("new")
        await asyncio.sleep(60.0)
        assert scene.job.record is record, "it does not go on by itself"
        await scene.rig.jobs.resume(scene.job, "latest", None)
        await scene.succeeds()

    stall(task, 2, act)


@saving()
async def test_a_stalled_job_is_paused_or_cancelled_at_once_and_resumed(scene: Scene) -> None:
    jobs = scene.rig.jobs
    await scene.until_kept(2)
    scene.kill_stage(1)
    await scene.until_reason("needs 1 replica more")
    await jobs.pause(scene.job, "paused by its user")
    assert (scene.job.record.state, scene.job.record.reason) == (JobState.PAUSED, "paused by its user")
    assert f"swarm resume {scene.job.record.id}" in scene.job.record.hint
    await jobs.resume(scene.job, "latest", None)
    scene.add_peer("new-1")
    await scene.until_step(scene.job.progress.steps_done + 1)
    scene.kill_stage(0)
    await scene.until(JobState.STALLED)  # at once: it may not have gone back yet
    await jobs.cancel(scene.job, "cancelled by its user")
    await asyncio.sleep(60.0)
    assert scene.job.record.state is JobState.CANCELLED
    scene.add_peer("new-2")
    await jobs.resume(scene.job, "latest", None)
    await scene.succeeds()


@pytest.mark.parametrize("word", ["cancel", "pause"])
@saving()
async def test_a_job_that_is_being_stopped_stops_when_a_stage_is_lost(scene: Scene, word: str) -> None:
    """A cancel waited out the grace period of the only replica of a stage, then the job had failed."""
    await scene.until_kept(2)
    (victim,) = scene.kill_stage(1)
    if word == "cancel":
        await scene.rig.jobs.cancel(scene.job, "cancelled by its user")
    else:
        await scene.rig.jobs.pause(scene.job, "paused by its user")
    await scene.until(JobState.CANCELLED, JobState.PAUSED, JobState.FAILED)
    record = scene.job.record
    assert record.state is (JobState.CANCELLED if word == "cancel" else JobState.PAUSED)
    assert record.reason.startswith(f"{'cancelled' if word == 'cancel' else 'paused'} by its user; stage server")
    assert f"{victim} (stage 1) is gone" in record.reason
    lost = scene.job.progress.steps_done - scene.checkpoints()[-1].step
    assert scene.job.record.repeats.steps == lost
    assert (f"{lost} step{'s are' if lost > 1 else ' is'} lost" in record.reason) == (lost > 0)
    assert f"swarm resume {record.id}" in record.hint
    scene.add_peer("new")
    await scene.rig.jobs.resume(scene.job, "latest", None)
    await scene.succeeds()


@saving(4, training__steps=12)
async def test_work_that_was_done_again_is_counted_on_all_timelines(scene: Scene) -> None:
    """A job showed 5 microbatches that were done again, was paused and resumed, and showed none."""

    def again() -> int:
        return job_view(scene.job, 0.0).microbatches_replayed

    await scene.until_step(1)
    victim = scene.job.stages[0][-1]
    await Run(scene.rig, scene.job, scene.rng).until_it_holds_something(victim)
    scene.rig.kill(victim)
    while not again():
        await asyncio.sleep(0.1)
    await scene.rig.jobs.pause(scene.job, "paused by its user")
    await scene.until(JobState.PAUSED)
    done = again()
    assert done > 0
    await scene.rig.jobs.resume(scene.job, "latest", None)
    assert again() == done
    await scene.until(JobState.LOADING)
    await scene.rig.kill_scheduler()
    await scene.rig.start_scheduler()
    scene.job = scene.rig.jobs.registry.find(scene.job.record.id)
    assert again() == done
    await scene.succeeds()
    assert again() >= done


@saving()
async def test_a_job_that_begins_while_no_relay_is_here_hears_of_it(scene: Scene) -> None:
    rig = scene.rig
    with_relays = assemble(rig.ports, rig.tasks, issuer=Issuer(PassKey.new(), "ours"))
    assert not with_relays.jobs.registry.relays_here, "none has attached since the scheduler began"
    await scene.until_kept(2)
    assert scene.job.brain is not None
    assert scene.job.brain.relays_here
    rig.parts.jobs.registry.relays_here = False
    scene.kill_stage(0)
    await scene.until(JobState.STALLED)
    scene.add_peer("new")
    await scene.until(JobState.RUNNING)
    assert scene.job.brain is not None
    assert not scene.job.brain.relays_here
    await scene.succeeds()


@saving()
async def test_a_first_load_that_loses_a_stage_begins_again(scene: Scene) -> None:
    await scene.until(JobState.LOADING)
    assert scene.job.brain is not None
    assert scene.job.brain.mode is Mode.WAITING or scene.job.brain.mode is Mode.LOADING
    scene.kill_stage(0)
    await scene.until_reason("needs 1 replica more")
    assert scene.job.record.state is JobState.STALLED
    scene.add_peer("new")
    await scene.succeeds()


@saving()
async def test_a_peer_of_the_abandoned_timeline_that_comes_back_is_one_like_any_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off, not dead: it comes back with a stage, with weights and with work that count no more."""
    network = scene.rig.network
    await scene.until_kept(2)
    await scene.until_step(3)
    (victim,) = scene.job.stages[1]
    with monkeypatch.context() as nobody_dials:
        nobody_dials.setattr(network, "handler_at", lambda _address: None)
        network.cut(f"address-of-{victim}", SCHEDULER)
        await scene.until(JobState.STALLED)
    await scene.succeeds()
    assert victim in {peer for pool in scene.job.stages.values() for peer in pool}
    assert scene.job.record.timeline == 1


@saving()
async def test_a_job_that_is_cancelled_as_a_stage_is_lost_does_not_train_on_by_itself(scene: Scene) -> None:
    """It stalled, took stage servers and went on, since its brain had not heard yet that it is to end."""
    await scene.until_kept(2)
    job = scene.job
    assert job.run is not None
    for peer in job.stages[1]:
        job.run.driver.tell(inputs.PeerGone(peer, "killed"))
    await scene.rig.jobs.cancel(job, "cancelled by its user")
    await scene.until(JobState.CANCELLED)
    assert job.record.reason.startswith("cancelled by its user")


@pytest.mark.parametrize("what", ["all", "the newest"])
@saving()
async def test_a_job_whose_checkpoints_are_away_waits_for_them(scene: Scene, what: str) -> None:
    """An empty mount point was taken for a job without checkpoints: it began anew, and later pruned the real ones."""
    await scene.until_kept(2)
    place = scene.rig.jobs.stores.checkpoints.storage(scene.job.spec, scene.job.record.id)
    assert isinstance(place, LocalStorage)
    scene.kill_stage(1)
    root, away = place.root, place.root.with_name("away")
    root.rename(away)
    if what == "the newest":
        root.mkdir()
    await scene.until_reason("is not there" if what == "all" else "is not at")
    assert (scene.job.record.state, scene.job.record.timeline) == (JobState.STALLED, 0)
    shutil.rmtree(root, ignore_errors=True)
    away.rename(root)
    scene.add_peer("new")
    await scene.succeeds()
    assert scene.job.start is not None
