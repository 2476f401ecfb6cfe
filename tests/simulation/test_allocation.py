"""The claim: who waits to start, who is at work and who moves get idle peers in an order that starves nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scheduler.api.views import Overview
from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.jobs import commands
from scheduler.jobs.job import Job
from swarm.errors import NotAllowed, QuotaReached
from swarm.pki.names import Role
from swarm.types import JobState, PeerId
from tests.support.scenes import Desk, Run, about_peer, add_peer, drained, of_desk, replayed, resolved, serves, training
from tests.support.simulated import small_spec, stale


async def submit_another(run: Run, **changes: Any) -> Job:
    """A second job on the same text, which waits; the first one computes slowly, so that it is at work for a while."""
    names = [*run.rig.servers, *map(PeerId, ("first", "second", "new"))]
    run.rig.slowness = dict.fromkeys(names, 20.0)
    root = run.rig.tokens.root
    spec = small_spec(root / "text.txt", training__steps=2, **changes)
    spec = resolved(spec)
    other = await run.rig.jobs.submit(spec, run.rig.tokens.of_job(), {})
    async for _ in run.rig.jobs.watch(other):
        if other.record.state is JobState.PLACING:
            return other
    raise AssertionError(other.record.reason)


@pytest.mark.usefixtures("moves_soon")
@training(6, 7, training__steps=10, **stale(1))
async def test_a_replica_that_moves_arrives_although_another_job_waits(run: Run) -> None:
    """Between its stages it is idle, and whoever waited took it: the move cost the job a replica instead."""
    others: list[Job] = []
    await run.until_step(1)
    others.append(await submit_another(run, pipeline__stages=1))
    for peer in list(run.job.stages[1])[1:]:
        run.rig.kill(peer)
    while sorted(map(len, run.job.stages.values())) != [2, 2]:
        assert not run.job.record.state.is_final, "nobody arrived"
        await asyncio.sleep(0.05)
    assert others[0].record.state is JobState.PLACING
    await run.rig.finished(run.job)
    await run.rig.finished(others[0])
    await run.succeeds()
    assert others[0].record.state is JobState.SUCCEEDED
    assert run.total("swarm_rebalances_total") == 1


@training(2, 2, training__steps=10)
async def test_a_job_that_can_never_start_keeps_nobody_from_one_at_work(run: Run) -> None:
    await run.until_step(1)
    other = await submit_another(run, pipeline__stages=1, limits__min_replicas=50)
    (old,) = run.job.stages[0]
    leaves = asyncio.create_task(drained(run, old))
    await asyncio.sleep(0.5)
    first = add_peer(run, "first")
    await serves(run, first)
    assert await leaves
    assert run.job.stages[0] == [first], "the last of its stage could leave"
    second = add_peer(run, "second")
    await serves(run, second)
    assert sorted(map(len, run.job.stages.values())) == [1, 2]
    assert other.record.state is JobState.PLACING
    assert "50 needed" in other.record.reason
    await run.succeeds()
    assert replayed(run) == 0


@training(2, 3, training__steps=12)
async def test_what_a_job_at_work_does_not_need_is_kept_for_the_one_that_waits(run: Run) -> None:
    await run.until_step(1)
    other = await submit_another(run, pipeline__stages=2)
    first = add_peer(run, "first")
    await asyncio.sleep(8.0)
    assert other.record.reason == "stage 1 needs 1 replica more (1 idle, 2 needed)"
    assert f"kept for {other.record.id}, which waits for peers" in about_peer(run, first)["not used"]
    add_peer(run, "second")
    await run.rig.finished(other)
    assert other.record.state is JobState.SUCCEEDED
    assert not run.job.record.state.is_final, "it had to wait until the other one was over"


@training(4, 4, training__steps=10)
async def test_a_lost_replica_is_replaced_although_another_job_waits(run: Run) -> None:
    await run.until_step(1)
    other = await submit_another(run, pipeline__stages=2)
    lost = run.job.stages[1][0]
    run.rig.kill(lost)
    while lost in run.job.stages[1]:
        await asyncio.sleep(0.1)
    new = add_peer(run, "new")
    await serves(run, new)
    assert new in run.job.stages[1]
    assert other.record.state is JobState.PLACING


@pytest.mark.usefixtures("moves_soon")
@training(6, 7, training__steps=10, **stale(1))
async def test_a_replica_that_is_lost_between_its_stages_is_waited_for_no_longer(run: Run) -> None:
    moved: list[PeerId] = []
    await run.until_step(1)
    other = await submit_another(run, pipeline__stages=1)
    reservations = run.rig.parts.peers.reservations
    for peer in list(run.job.stages[1])[1:]:
        run.rig.kill(peer)
    loop = asyncio.get_running_loop()
    while not (reserved := reservations.now(loop.time())):
        assert not run.job.record.state.is_final, "nobody moved"
        await asyncio.sleep(0.001)
    ((peer, held),) = reserved.items()
    moved.append(peer)
    assert (held.job, held.stage) == (run.job.record.id, 1)
    run.rig.kill(peer)
    while reservations.now(loop.time()):
        await asyncio.sleep(0.1)
    assert loop.time() < held.until_s
    assert other.record.state is JobState.PLACING
    await run.succeeds()
    assert moved


@training(2, 2, training__steps=4)
async def test_the_job_of_higher_priority_starts_first_although_it_came_later(run: Run) -> None:
    others: list[Job] = []
    await run.until_step(1)
    others.append(await submit_another(run, pipeline__stages=1))
    others.append(await submit_another(run, pipeline__stages=1, limits__priority=5))
    low, high = others
    overview = Overview(run.rig.jobs, run.rig.membership, lambda: ANYBODY, asyncio.get_running_loop().time)
    queue = overview.queue()
    assert queue.waiting == (high.record.id, low.record.id)
    assert queue.text(high.record.id).startswith("number 1 of 2 that wait, priority 5; ")
    # `swarm ls` and `status` say who has the stage servers, and `swarm explain` in full.
    assert overview.job(low).reason == f"{low.reason}; {queue.text(low.record.id)}"
    assert f"{run.job.record.id} has 2 stage servers" in overview.job(low).reason
    told = {fact.topic: fact.text for fact in overview.job_facts(low)}
    before = f"number 2 of 2 that wait, priority 0: {high.record.id} (priority 5) before it"
    assert told["queue"] == before
    assert told["in use"].startswith(f"{run.job.record.id} has 2 stage servers, step ")
    assert not run.job.record.state.is_final, "nothing is taken from a job at work"
    await run.rig.finished(run.job)
    await run.rig.finished(high)
    assert low.record.state is JobState.PLACING
    await run.rig.finished(low)
    await run.succeeds()
    assert [job.record.state for job in others] == [JobState.SUCCEEDED] * 2


@training(4, 2, training__steps=10, limits__max_replicas=1)
async def test_two_jobs_that_take_no_more_than_their_share_run_side_by_side(run: Run) -> None:
    others: list[Job] = []
    await run.until_step(1)
    assert sorted(map(len, run.job.stages.values())) == [1, 1], "two of the four are left"
    root = run.rig.tokens.root
    spec = small_spec(root / "text.txt", training__steps=2, pipeline__stages=1, limits__max_replicas=1)
    spec = resolved(spec)
    others.append(await run.rig.jobs.submit(spec, run.rig.tokens.of_job(), {}))
    run.rig.slowness = dict.fromkeys(run.rig.servers, 20.0)
    await run.rig.finished(others[0])
    assert run.job.record.state is JobState.RUNNING
    (old,) = run.job.stages[0]
    run.rig.kill(old)  # one of the idle ones takes its place
    await run.rig.finished(run.job)
    assert sum(map(len, run.job.stages.values())) <= 2
    await run.succeeds()
    assert (others[0].record.state, run.job.record.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)


@of_desk(0)
async def test_one_submitter_leaves_open_jobs_to_others(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "JOBS_OPEN_MAX", 4)
    ann, bob = (Person(Role.SUBMITTER, name) for name in ("ann", "bob"))

    async def open_one(by: Person) -> None:
        await desk.submit(by=by)

    for person in (ann, ann, bob):
        await open_one(person)
    for person in (ann, bob):
        with pytest.raises(QuotaReached, match="others leave free"):
            await open_one(person)
    await open_one(ANYBODY)
    with pytest.raises(NotAllowed, match="4 jobs are open already"):
        await open_one(ANYBODY)


@training(1, 3, training__steps=6, pipeline__stages=1, limits__min_replicas=3, limits__max_replicas=3)
async def test_one_that_comes_back_after_a_restart_is_released_if_another_took_its_place(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second", "third"):
        add_peer(run, name)
    await run.until_step(1)
    placed = run.job.stages[0]
    assert len(placed) == 3
    (spare,) = (candidate.peer for candidate in run.rig.parts.allocator.idle())
    away, *_ = placed
    reaches, is_away = run.rig.network.reaches, True

    async def without(owner: str, address: str) -> bool:
        held_up = is_away and (owner, address) == (f"address-of-{away}", "scheduler")
        return not held_up and await reaches(owner, address)

    monkeypatch.setattr(run.rig.network, "reaches", without)
    await run.restart_scheduler()
    run.rig.slowness |= dict.fromkeys(run.rig.servers, 40.0)
    while not (known := run.rig.membership.get(spare)) or not known.job:
        await asyncio.sleep(0.001)
    is_away = False
    while run.job.brain is not None and not run.job.record.state.is_final:
        (serving,) = run.job.brain.peers
        assert len(serving) <= 3
        await asyncio.sleep(0.1)
    back = run.rig.membership.get(away)
    assert back is not None
    assert not back.job
