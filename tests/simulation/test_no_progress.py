"""A job at which nothing moves: it goes back as if a stage were lost, fails in the end, or waits for what comes back.

Whoever swallows what stage servers say stands for every fault that no other rule sees.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler.api.views import job_view
from scheduler.brain.explain.facts import AWAITS_DATABASE
from scheduler.brain.stall import STUCK_MAX
from scheduler.storage.checkpoints.sink import CheckpointSink
from swarm.errors import DatabaseUnavailable, NoProgress
from swarm.types import JobState, PeerId
from swarm.wire.messages import Accumulated, Event, Saved
from tests.support.scenes import SavingTask, Scene, saving, stall

AWAY_S = 1000.0  # longer than a job may stand still


def swallow(scene: Scene, monkeypatch: pytest.MonkeyPatch, lost: Callable[[Event], bool]) -> None:
    """The scheduler does not hear events of the last stage that are `lost`."""
    heard = scene.rig.parts.listener.on_event

    def on_event(peer: PeerId, event: Event) -> None:
        known = scene.rig.membership.get(peer)
        if known is None or known.stage != 1 or not lost(event):
            heard(peer, event)

    monkeypatch.setattr(scene.rig.parts.listener, "on_event", on_event)


def hang_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints that were handed over are written, but for a long time nothing is heard of it."""
    publish: Callable[..., Awaitable[None]] = CheckpointSink._publish

    async def hangs(self: CheckpointSink, *arguments: Any) -> None:
        await asyncio.sleep(AWAY_S)
        await publish(self, *arguments)

    monkeypatch.setattr(CheckpointSink, "_publish", hangs)


@saving()
async def test_a_stage_that_hangs_is_loaded_again_and_the_job_goes_on_bitwise(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.until_kept(2)
    hangs = True
    swallow(scene, monkeypatch, lambda event: hangs and isinstance(event, Accumulated))
    await scene.until(JobState.STALLED)
    assert "no step was committed for 300 s: step" in scene.job.record.reason
    hangs = False
    await scene.succeeds(may_stand_still=True)
    assert scene.job.record.timeline == 1


@saving()
async def test_a_job_that_never_gets_further_fails_in_the_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.until_kept(2)
    at_hand = scene.job.progress.steps_done
    swallow(scene, monkeypatch, lambda event: isinstance(event, Accumulated) and event.microbatch.step > at_hand)
    await scene.until(JobState.FAILED)
    record = scene.job.record
    assert record.error_code == NoProgress.code
    assert f"; {STUCK_MAX} times in a row" in record.reason
    assert "raise limits.no_progress_s" in record.hint
    assert f"swarm resume {record.id}" in record.hint


@pytest.mark.parametrize(("on_stall", "state"), [("pause", JobState.PAUSED), ("fail", JobState.FAILED)])
def test_on_stall_says_what_becomes_of_a_job_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_stall: str, state: JobState
) -> None:
    task = SavingTask.make(tmp_path, limits__on_stall=on_stall)

    async def act(scene: Scene) -> None:
        await scene.until_step(3)
        swallow(scene, monkeypatch, lambda event: isinstance(event, Accumulated))
        await scene.until(state)
        record = scene.job.record
        assert (record.error_code, record.timeline) == (NoProgress.code, 0)
        assert "no step was committed for 300 s" in record.reason
        assert "raise limits.no_progress_s" in record.hint

    stall(task, 2, act)


@saving(checkpoint__every_steps=0)
async def test_a_replica_that_does_not_hand_over_the_last_checkpoint_is_asked_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Event] = []

    def loses(event: Event) -> bool:
        if isinstance(event, Saved) and not lost:
            lost.append(event)
            return True
        return False

    swallow(scene, monkeypatch, loses)
    await scene.succeeds()
    assert lost
    assert "nothing came for 300 s: waits for" in scene.said()
    assert scene.job.record.timeline == 0


@saving(4, checkpoint__every_steps=0)
async def test_a_silent_replica_is_not_asked_for_the_last_checkpoint_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the least to do, so it was asked again and again, and never the one beside it."""
    await scene.until_step(1)
    hanging = min(scene.job.stages[1])
    heard = scene.rig.parts.listener.on_event

    def on_event(peer: PeerId, event: Event) -> None:
        if peer != hanging or not isinstance(event, Saved):
            heard(peer, event)

    monkeypatch.setattr(scene.rig.parts.listener, "on_event", on_event)
    await scene.succeeds()
    assert f"waits for {hanging} to hand over" in scene.said()
    assert "tries again in 1 s" in scene.said()
    assert "tries again in 2 s" not in scene.said(), "once was enough"
    assert scene.job.record.timeline == 0


@saving()
async def test_a_last_checkpoint_that_is_never_handed_over_fails_the_job_in_the_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.until_kept(6)
    swallow(scene, monkeypatch, lambda event: isinstance(event, Saved))
    await scene.until(JobState.FAILED)
    record = scene.job.record
    assert "the final weights (step 8) could not be saved: nothing came for 300 s" in record.reason
    assert f"swarm resume {record.id}" in record.hint


@saving(checkpoint__every_steps=0)
async def test_storage_that_hangs_at_the_last_checkpoint_is_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang_storage(monkeypatch)
    await scene.succeeds()
    assert scene.said().count("waits on: look at the storage of checkpoints") == 3
    assert scene.job.record.timeline == 0


@saving(checkpoint__every_steps=0)
async def test_a_cancel_does_not_wait_for_storage_that_hangs(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    hang_storage(monkeypatch)
    loop = asyncio.get_running_loop()
    await scene.until_step(3)
    began_s = loop.time()
    await scene.rig.jobs.cancel(scene.job, "by a person", checkpoint=True)
    while len(scene.rig.membership.idle_peers()) < 2:
        await asyncio.sleep(1.0)
    assert loop.time() - began_s < 2 * scene.task.spec.limits.no_progress_s, "its peers are free for others"
    await scene.until(JobState.CANCELLED)
    assert "nothing came for 300 s" in scene.job.record.reason
    assert scene.checkpoints(), "it came to be in the end"


@saving()
async def test_a_second_cancel_ends_a_job_that_waits_for_the_database(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.until_step(3)

    async def away(*_: object) -> None:
        raise DatabaseUnavailable("database is locked")

    monkeypatch.setattr(scene.rig.store, "put_commit", away)
    run = scene.job.run
    assert run is not None
    await asyncio.sleep(AWAY_S)
    assert "waits for its row: database is locked" in scene.said()
    assert len(run.driver._inbox) < 100, "what the brain has no use for does not pile up"
    await scene.rig.jobs.cancel(scene.job, "by a person", checkpoint=True)
    await asyncio.sleep(10.0)
    assert scene.job.record.state is JobState.CANCELLING
    await scene.rig.jobs.cancel(scene.job, "by a person", checkpoint=True)
    async with asyncio.timeout(10.0):
        await scene.until(JobState.CANCELLED)
        while len(scene.rig.membership.idle_peers()) < 2:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("write", ["put_commit", "put_evaluation"])
@saving(data__validation_ratio=0.01, training__eval_every_steps=2)
async def test_a_database_that_stays_away_is_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    await scene.until_step(3)
    loop, real = asyncio.get_running_loop(), getattr(scene.rig.store, write)
    back_s = loop.time() + AWAY_S

    async def away(*arguments: object) -> None:
        if loop.time() < back_s:
            raise DatabaseUnavailable("database is locked")
        await real(*arguments)

    assert scene.job.reason == "trains with 2 stage servers"
    monkeypatch.setattr(scene.rig.store, write, away)
    await asyncio.sleep(AWAY_S / 2)
    shown = job_view(scene.job, 0.0)
    assert (shown.reason, shown.tokens_per_s, math.isnan(shown.eta_s)) == (AWAITS_DATABASE, 0.0, True)
    await scene.succeeds()
    assert loop.time() > back_s
    assert not scene.job.awaits_database
    assert "waits for its row: database is locked" in scene.said()
    assert scene.job.record.timeline == 0
