"""The claim: who drains a stage server is told what it waits for, and `explain` says what is so while a job runs."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.brain.explain.facts import explain_job
from swarm.errors import NotAllowed, NotFound
from swarm.types import JobState, PeerId, PeerState
from tests.support.scenes import Run, about_peer, add_peer, drained, replayed, serves, training


def about_job(run: Run) -> dict[str, str]:
    assert run.job.brain is not None
    now_s = asyncio.get_running_loop().time()
    situation = run.job.brain.situation(now_s)
    facts = explain_job(run.rig.jobs.standing(run.job), situation, run.rig.jobs.idle(), now_s)
    return {fact.topic: fact.text for fact in facts}


@training(2, 2, training__steps=14)
async def test_the_last_of_a_stage_is_drained_once_another_has_joined_and_both_are_explained(run: Run) -> None:
    await run.until_step(2)
    says = about_job(run)
    assert says["state"].startswith("running for")
    assert "1 replica does" in says["stage 0"]
    (old,) = run.job.stages[0]
    assert "100%, it is the only replica" in about_peer(run, old)["work"]
    assert "s per microbatch" in about_peer(run, old)["pace"]
    waits = [asyncio.create_task(drained(run, old)) for _ in range(2)]  # asking twice is the same as once
    await asyncio.sleep(1.0)
    assert run.job.stages[0] == [old]
    assert "it is the last of stage 0 and stays until" in about_job(run)["leaving"]
    assert "no one joins" in about_peer(run, old)["leaving"]
    small = add_peer(run, "small", memory_bytes=1)
    await asyncio.sleep(0.5)
    assert about_job(run)["idle"].startswith("small is not used: no stage fits")
    assert "no stage fits" in about_peer(run, small)["not used"]
    assert await drained(run, small) == [""]
    assert about_peer(run, small)["not used"].startswith("it is drained")
    new = add_peer(run, "new", stage=0)
    while new not in {joiner.replica.peer for joiner in run.job.brain._state.joiners}:  # type: ignore[union-attr]
        await asyncio.sleep(0.001)
    assert about_job(run)["joining"].startswith("new has been joining stage 0 for")
    assert "new joins" in about_job(run)["leaving"]
    await serves(run, new)
    for said in await asyncio.gather(*waits):
        assert "no one joins" in said[0]
        assert said[-1] == ""
    assert run.job.stages[0] == [new]
    assert about_peer(run, old)["not used"].startswith("it is drained")
    known = run.rig.membership.find(old)
    assert (known.state, known.reason) == (PeerState.DRAINING, "test")
    run.rig.kill(old)
    while run.rig.membership.find(old).state is not PeerState.GONE:
        await asyncio.sleep(0.1)
    with pytest.raises(NotAllowed, match="is gone: it ended in order: test"):
        await drained(run, old)
    with pytest.raises(NotFound, match="nobody"):
        await drained(run, "nobody")
    await run.succeeds()
    assert replayed(run) == 0


@training(4, 3, training__steps=6)
async def test_a_peer_that_is_drained_while_it_loads_serves_until_the_job_runs(run: Run) -> None:
    """A job with a peer that is to leave stayed `loading` for ever: it waited to see all of them serving."""
    while not run.job.stages:
        await asyncio.sleep(0.001)
    assert run.job.record.state in (JobState.QUEUED, JobState.PLACING, JobState.LOADING)
    peer = run.job.stages[1][0]
    said = await drained(run, peer)
    assert said[-1] == ""
    assert run.job.progress.steps_done < 6, "it went while the job ran"
    await run.until_step(3)
    assert run.job.record.state is JobState.RUNNING
    assert peer not in run.job.stages[1]
    await run.succeeds()
    assert replayed(run) == 0


@training(2, 5, training__steps=10)
async def test_a_restarted_scheduler_gives_a_drained_peer_no_work_until_its_stage_server_starts_anew(run: Run) -> None:
    rig = run.rig
    await run.until_step(1)
    rig.slowness = dict.fromkeys((*rig.servers, PeerId("spare")), 10.0)
    spare = add_peer(run, "spare", memory_bytes=1)  # too small for any stage
    while rig.membership.get(spare) is None:
        await asyncio.sleep(0.001)
    assert await drained(run, spare) == [""]
    await run.restart_scheduler()
    while (known := rig.membership.get(spare)) is None:
        await asyncio.sleep(0.001)
    assert (known.state, known.reason) == (PeerState.DRAINING, "test")
    assert about_peer(run, spare)["not used"].startswith("it is drained")
    rig.network.cut(f"address-of-{spare}", "scheduler")
    await run.until_step(run.job.progress.steps_done + 1)
    known = rig.membership.find(spare)
    assert (known.state, known.reason) == (PeerState.DRAINING, "test"), "a new session changes nothing"

    rig.kill(spare)
    add_peer(run, "spare", incarnation=2, stage=0)
    await serves(run, spare)
    assert spare in run.job.stages[0]
    assert await rig.store.drains() == {}
    await run.restart_scheduler()
    await run.until_step(run.job.progress.steps_done + 1)
    assert spare in run.job.stages[0]


@training(2, 6, training__steps=10)
async def test_a_hand_over_goes_on_after_a_restart_of_the_scheduler(run: Run) -> None:
    await run.until_step(1)
    run.rig.slowness = dict.fromkeys((*run.rig.servers, PeerId("new")), 10.0)
    (old,) = run.job.stages[1]
    waits = asyncio.create_task(drained(run, old))
    await asyncio.sleep(1.0)
    waits.cancel()
    await run.restart_scheduler()
    await run.until_step(run.job.progress.steps_done + 1)
    assert run.job.stages[1] == [old], "it is the last of its stage"
    assert run.rig.membership.find(old).state is PeerState.DRAINING
    new = add_peer(run, "new")
    await serves(run, new)
    assert (await drained(run, old))[-1] == ""
    assert run.job.stages[1] == [new]
    await run.succeeds()
    assert replayed(run) == 0


@training(2, 4, training__steps=8)
async def test_a_peer_that_has_just_come_is_drained_at_once_and_joins_nothing(run: Run) -> None:
    await run.until_step(1)
    spare = add_peer(run, "spare")
    while run.rig.membership.get(spare) is None:
        await asyncio.sleep(0.001)
    assert (await drained(run, "spa"))[-1] == ""
    await run.until_step(7)
    assert all(spare not in pool for pool in run.job.stages.values())


@training(4, 9, training__steps=16)
async def test_a_drain_is_taken_back_by_another_start_of_the_scheduler_and_for_good(run: Run) -> None:
    rig = run.rig
    await run.until_step(1)
    rig.slowness = dict.fromkeys(rig.servers, 10.0)
    peer = run.job.stages[0][0]
    assert (await drained(run, peer))[-1] == ""
    await run.restart_scheduler()
    while rig.membership.get(peer) is None:
        await asyncio.sleep(0.001)
    assert rig.membership.find(peer).state is PeerState.DRAINING
    await rig.jobs.undrain(peer)
    assert await rig.store.drains() == {}
    await serves(run, peer)
    assert peer in run.job.stages[0]
    with pytest.raises(NotAllowed, match="is not drained"):
        await rig.jobs.undrain(peer)
    await run.until_step(run.job.progress.steps_done + 2)  # from then on it needs no donors
    await run.restart_scheduler()
    await run.until_step(run.job.progress.steps_done + 1)
    assert rig.membership.find(peer).state is PeerState.SERVING
    await run.succeeds()
    assert replayed(run) == 0


@training(4, 9, training__steps=8)
async def test_a_stage_server_that_ends_by_itself_is_not_kept_by_an_undrain(run: Run) -> None:
    """Only a person's drain is taken back: a process that was told to end hands its work over and ends."""
    await run.until_step(1)
    peer = run.job.stages[0][0]
    run.rig.jobs._peers.leave(peer, "its process was told to end")
    with pytest.raises(NotAllowed, match="is not drained"):
        await run.rig.jobs.undrain(peer)
    assert run.rig.membership.find(peer).leaving
