"""One job's bad luck is its own: the scheduler and the other jobs go on. Found by review, each with its story."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from scheduler.api.announcer import BusAnnouncer
from scheduler.jobs.job import JobProgress
from scheduler.storage.checkpoints.catalog import CheckpointCatalog
from scheduler.storage.job_record import JobRecord
from swarm.checkpoint.reader import Checkpoint
from swarm.errors import DatabaseUnavailable, InvalidConfig, JobFailed, NotFound
from swarm.job.spec import JobSpec, parse_job
from swarm.model.stage import Stage
from swarm.mqtt.bus import Bus
from swarm.reference.trainer import train_local
from swarm.types import JobState, PeerId, PeerState
from swarm.wire.messages import Accumulated, Saved
from tests.support.acts import Played
from tests.support.devices import InlineDevice
from tests.support.scenes import Desk, of_desk


def of_two(**changes: object) -> Played:
    """A test of a desk with two idle peers."""
    return of_desk(2, training__steps=3, **changes)


async def works(desk: Desk) -> None:
    """A plain job succeeds."""
    job = await desk.submit()
    await desk.rig.finished(job)
    assert job.record.state is JobState.SUCCEEDED, job.record.reason


@of_two()
async def test_a_database_that_is_locked_for_a_while_costs_time_only(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One "database is locked" on a job's last state once ended the scheduler."""
    store, loop = desk.rig.store, asyncio.get_running_loop()
    until_s = loop.time() + 6.0
    refused = 0
    for name in ("put_job", "put_commit"):
        real = getattr(store, name)

        async def flaky(*arguments: object, real: Callable[..., Awaitable[None]] = real) -> None:
            nonlocal refused
            if loop.time() < until_s:
                refused += 1
                raise DatabaseUnavailable("database is locked")
            await real(*arguments)

        monkeypatch.setattr(store, name, flaky)
    with pytest.raises(DatabaseUnavailable):  # a job that cannot be stored is not accepted
        await desk.submit()
    await asyncio.sleep(4.0)
    until_s = 0.0
    job = await desk.submit()
    async for view in desk.rig.jobs.watch(job):
        if view.record.state is JobState.RUNNING and not until_s:
            until_s = loop.time() + 6.0
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    assert refused > 3
    told = [line for line in desk.said(job).splitlines() if "waits for its row" in line]
    assert 0 < len(told) < refused
    assert "database is locked; tries again" in told[0]


@pytest.mark.parametrize("is_alone", [False, True])  # at its stage of the next job, until another one is idle
@of_two()
async def test_a_cancelled_job_that_keeps_a_device_busy_holds_no_other_job_up(desk: Desk, is_alone: bool) -> None:
    """A computation cannot be stopped: one of four minutes kept its stage server, which the next jobs waited for."""
    devices: list[InlineDevice] = []

    class Device(InlineDevice):
        def __init__(self, seconds: Callable[[], float]) -> None:
            super().__init__(seconds)
            devices.append(self)

    rig, busy = desk.rig, PeerId("a-busy")
    rig.kill(PeerId("peer-0"))
    rig.add_peer(busy, rig.tasks, Random(0), device_type=Device)
    while [known.hello.peer for known in rig.membership.idle_peers()] != [busy, "peer-1"]:
        await asyncio.sleep(0.1)
    first = await desk.submit()
    while first.record.state is not JobState.RUNNING:
        await asyncio.sleep(0.001)
    computing = asyncio.ensure_future(devices[0]._after(None, 240.0))
    await rig.jobs.cancel(first, "too slow", checkpoint=False)
    if not is_alone:
        rig.add_peer(PeerId("spare"), rig.tasks, Random(1))
    while len(rig.membership.idle_peers()) < 3 - is_alone:
        await asyncio.sleep(0.01)

    given = asyncio.ensure_future(works(desk))
    while rig.membership.find(busy).state is not PeerState.LOADING:
        await asyncio.sleep(0.01)
    if is_alone:
        rig.add_peer(PeerId("spare"), rig.tasks, Random(1))
    await given
    await works(desk)
    assert not computing.done()
    assert rig.membership.find(busy).state is PeerState.GONE
    await computing
    await asyncio.sleep(5.0)
    assert rig.membership.find(busy).state is PeerState.IDLE


@of_two()
async def test_a_job_that_a_swarm_cannot_train_with_islands_is_refused_before_anything_is_kept(desk: Desk) -> None:
    """One process can: a swarm would train the job as if it had said nothing of spot checks."""
    values = desk.spec.model_dump(mode="json") | {"averaging": {"mode": "streaming"}}
    spec = parse_job(values | {"trust": {"spot_check": 0.5}})
    with pytest.raises(InvalidConfig, match=r"trust\.spot_check does not work in a swarm"):
        await desk.submit(spec)
    assert not desk.rig.jobs.registry.all()


@of_two()
async def test_a_lie_about_saved_weights_fails_the_job_and_not_the_scheduler(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = desk.rig.parts.listener.on_event

    def lie(peer: PeerId, event: object) -> None:
        if isinstance(event, Saved):
            event = replace(event, parameters=(replace(event.parameters[0], dtype="strange"),))
        real(peer, event)  # type: ignore[arg-type]

    monkeypatch.setattr(desk.rig.parts.listener, "on_event", lie)
    job = await desk.submit()
    await desk.rig.finished(job)
    assert job.record.state is JobState.FAILED
    assert not list(desk.tokens.root.glob("jobs/*/checkpoints/*")), "half a checkpoint was left behind"
    monkeypatch.setattr(desk.rig.parts.listener, "on_event", real)
    await works(desk)


@of_two()
async def test_tokens_outside_the_vocabulary_fail_the_job_with_the_reason(desk: Desk) -> None:
    """They once ended the stage server with an IndexError."""
    (shard,) = desk.tokens.of_job().shards
    path = desk.rig.jobs.stores.files.shard("", shard)
    good = path.read_bytes()
    path.write_bytes(np.full(len(good) // 2, 60_000, dtype="<u2").tobytes())
    job = await desk.submit()
    await desk.rig.finished(job)
    assert job.record.state is JobState.FAILED
    assert "60000" in job.record.reason
    path.write_bytes(good)
    await works(desk)


@of_two()
async def test_a_cancel_or_a_loss_while_the_loading_state_is_written_is_not_lost(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver did not exist yet: a cancelled job once ran on to succeeded, another stayed loading for ever."""
    real = desk.rig.store.put_job

    async def slow(record: JobRecord) -> None:
        await asyncio.sleep(1.0 if record.state is JobState.LOADING else 0.0)
        await real(record)

    monkeypatch.setattr(desk.rig.store, "put_job", slow)
    job = await desk.submit(desk.spec.having("training", steps=1000))
    while job.record.state is not JobState.LOADING:
        await asyncio.sleep(0.01)
    await desk.rig.jobs.cancel(job, "x" * 70_000)
    await desk.rig.finished(job)
    assert job.record.state is JobState.CANCELLED

    job = await desk.submit(desk.spec.having("training", steps=1000))
    while job.record.state is not JobState.LOADING:
        await asyncio.sleep(0.01)
    desk.rig.kill(PeerId("peer-1"))
    while job.record.state is JobState.LOADING:
        await asyncio.sleep(0.01)
    assert job.record.state is JobState.STALLED
    assert "peer-1" in job.record.reason


@of_two()
async def test_a_step_whose_loss_is_nan_is_skipped_and_committed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """No database takes a NaN: the row was once refused for 300 s, then the job failed."""
    real = desk.rig.parts.listener.on_event

    def poison(peer: PeerId, event: object) -> None:
        if isinstance(event, Accumulated) and event.stage == 1 and event.microbatch.step == 1:
            event = replace(event, finite=False, loss=math.nan)
        real(peer, event)  # type: ignore[arg-type]

    monkeypatch.setattr(desk.rig.parts.listener, "on_event", poison)
    job = await desk.submit()
    await desk.rig.finished(job)
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    rows = await desk.rig.store.commits(job.record.id)
    assert [(row["skip"], row["loss"] is None) for row in rows] == [(False, False), (True, True), (False, False)]


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("y", "stage 0's output has values beyond 65504"),
        ("dx", "stage 1's gradient for the stage before has values beyond 65504"),
    ],
)
def test_what_float16_cannot_carry_is_said_by_its_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, told: str
) -> None:
    """A model with large activations gave no finite step, and people were told to look for NaN in its weights."""
    real_forward, real_backward = Stage.forward, Stage.backward

    def forward(stage: Stage, *arguments: Any, **named: Any) -> tuple[torch.Tensor | None, float]:
        y, loss = real_forward(stage, *arguments, **named)
        return (y * 1e6 if y is not None and output == "y" else y), loss

    def backward(stage: Stage, *arguments: Any, encode: Any = None, **named: Any) -> tuple[torch.Tensor | None, bool]:
        times = 1e12 if output == "dx" else 1.0
        return real_backward(stage, *arguments, encode=encode and (lambda dx: encode(dx * times)), **named)

    monkeypatch.setattr(Stage, "forward", forward)
    monkeypatch.setattr(Stage, "backward", backward)
    said = f'{told}, which pipeline.compression = "float16" cannot carry: use bfloat16'

    async def act(desk: Desk) -> None:
        job = await desk.submit()
        await desk.rig.finished(job)
        assert job.record.state is JobState.FAILED
        assert "the gradients of all 3 steps were not finite" in job.record.reason
        assert job.record.hint.startswith(said)
        assert f"the gradient of step 0 is not finite: the step changes no weight; {said}" in desk.said(job)
        if output == "y":  # the reference gives each stage's output to the same codec
            with pytest.raises(JobFailed) as failed:
                train_local(desk.spec, desk.tokens.batches(desk.spec))
            assert failed.value.hint == said

    of_two(pipeline__compression="float16")(act)(tmp_path=tmp_path)


@of_two()
async def test_a_peer_that_was_silent_too_long_dials_again_when_it_wakes(desk: Desk) -> None:
    """Its connection had never broken, so it once believed that it was attached, for ever."""
    membership = desk.rig.membership
    known = membership.get(PeerId("peer-0"))
    assert known is not None
    known.heard_s -= 1000.0
    for expected in (PeerState.SUSPECT, PeerState.GONE):
        known.heard_s, known.since_s = -1000.0, -1000.0
        assert [transition.after for transition in membership.tick(asyncio.get_running_loop().time())] == [expected]
        if expected is PeerState.GONE:
            desk.rig.sessions.drop(PeerId("peer-0"))
    while len(membership.idle_peers()) < 2:
        await asyncio.sleep(0.1)
    await works(desk)


async def test_what_followers_are_told_never_raises() -> None:
    """A reason of 70 kB or an infinite loss once ended the scheduler through its hints to the broker."""
    announcer = BusAnnouncer(Bus("mqtt://127.0.0.1:1", "test"), "default")
    record = JobRecord(
        id="demo-1",  # type: ignore[arg-type]
        name="demo",
        state=JobState.FAILED,
        reason="x" * 100_000,
        since_unix_s=1.0,
        created_unix_s=1.0,
        spec_json="{}",
        tokens=None,  # type: ignore[arg-type]
    )
    for loss in (math.nan, math.inf, 1.0):
        announcer.job_changed(record, JobProgress(loss=loss))


@of_two()
async def test_a_job_that_is_removed_while_it_is_about_to_go_on_does_not_come_back(desk: Desk) -> None:
    """Its row came back without its data, and at the next start of the scheduler it was a job again."""
    job = await desk.submit()
    await desk.rig.jobs.cancel(job, "no more")
    await desk.until_state(job, JobState.CANCELLED)
    await desk.rig.jobs.removal.remove(job)
    with pytest.raises(NotFound, match="was removed meanwhile"):
        await desk.rig.jobs.resume(job, "0", None)
    assert await desk.rig.jobs.stores.database.jobs() == []


@of_two()
async def test_a_state_that_the_database_refused_is_written_once_it_is_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was cancelled meanwhile was queued again at the next start of the scheduler, and trained."""
    jobs, real = desk.rig.jobs, desk.rig.store.put_job

    async def away(record: JobRecord) -> None:
        raise DatabaseUnavailable("the disk is full")

    job = await desk.submit()
    monkeypatch.setattr(desk.rig.store, "put_job", away)
    await jobs.cancel(job, "no more", checkpoint=False)
    await desk.until_state(job, JobState.CANCELLED)
    await asyncio.sleep(30.0)
    assert (await desk.rig.store.jobs())[0].state is not JobState.CANCELLED
    monkeypatch.setattr(desk.rig.store, "put_job", real)
    await jobs.removal.tidy_once()
    assert (await desk.rig.store.jobs())[0].state is JobState.CANCELLED


@of_two()
async def test_a_slow_storage_of_another_job_costs_a_running_job_no_grace(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a restarted scheduler read the other job, the stage servers of the running job were given up."""
    other = await desk.submit()
    await desk.rig.finished(other)
    job = await desk.submit(desk.spec.having("training", steps=40))
    await desk.until_step(job, 2)
    await desk.rig.kill_scheduler()
    real = CheckpointCatalog.newest

    async def slow(catalog: CheckpointCatalog, record: JobRecord, spec: JobSpec) -> Checkpoint | None:
        await asyncio.sleep(20.0 if record.id == other.record.id else 0.0)
        return await real(catalog, record, spec)

    monkeypatch.setattr(CheckpointCatalog, "newest", slow)
    await desk.rig.start_scheduler()
    again = desk.rig.jobs.registry.find(job.record.id)
    await desk.rig.finished(again)
    assert (again.record.state, again.record.timeline) == (JobState.SUCCEEDED, 0)
