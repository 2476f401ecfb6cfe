"""Islands in a swarm: the weights are those of one process, whatever becomes of single stage servers.

Real flows, brains and torch; the transport delays and reorders every tensor at random and delivers some twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeAlias

import pytest

from scheduler.brain.islands.brain import IslandsBrain
from scheduler.jobs.job import Job
from swarm.checkpoint.reader import Checkpoint
from swarm.errors import InvalidConfig
from swarm.job.spec import JobSpec
from swarm.types import JobState, PeerId, PeerState
from tests.support.effort import others
from tests.support.islands import (
    check,
    diloco,
    exchanges_of,
    gaia,
    in_the_second_step,
    log_of,
    lose,
    paused,
    peers_of,
    restart,
    run,
    streaming,
    tokens_that_count,
    trained,
    until,
)
from tests.support.reference import reference
from tests.support.simulated import Rig, Tokens, write_text

Mode: TypeAlias = Callable[..., JobSpec]

NARROW = {"pipeline__stages": 1, "outer__compression": "int8", "config__attention_dropout": 0.1}
TIED = {"config__tie_word_embeddings": True}
ALONE = {"pipeline__stages": 1, "outer__compression": "none"}


@pytest.mark.parametrize(
    ("mode", "islands", "peers", "changes"),
    [
        (diloco, 2, 6, {"pipeline__overlap": 1, "outer__every_steps": 3, "training__steps": 8}),
        (streaming, 3, 3, NARROW),
        (gaia, 3, 4, NARROW),
        *others(
            (gaia, 2, 6, TIED | {"pipeline__overlap": 1, "outer__every_steps": 4, "outer__fragments": 2}),
            (gaia, 2, 2, {"pipeline__stages": 1, "outer__every_steps": 1, "outer__threshold": 0.0}),
            (diloco, 3, 3, NARROW),
            (streaming, 2, 4, {"outer__compression": "bfloat16", "outer__every_steps": 5, "outer__overlap_steps": 2}),
            (streaming, 2, 6, {"pipeline__overlap": 1, "training__eval_every_steps": 1}),
            (diloco, 2, 8, TIED),
            (diloco, 1, 3, ALONE),
            (streaming, 2, 8, TIED),
            (streaming, 1, 3, ALONE | {"outer__mixing": 0.0}),
            (streaming, 2, 2, {"pipeline__stages": 1, "outer__overlap_steps": 0, "outer__fragments": 1}),
        ),
    ],
)
def test_a_swarm_with_islands_ends_with_the_weights_of_one_process(
    tmp_path: Path, mode: Mode, islands: int, peers: int, changes: dict[str, object]
) -> None:
    spec = mode(write_text(tmp_path), islands, **changes)
    job = trained(tmp_path, spec, peers)
    assert job.record.timeline == 0, "it was taken back"
    tokens_of = Tokens.make(tmp_path, spec).batches(spec).tokens_of
    assert job.progress.tokens == sum(map(tokens_of, range(spec.training.steps * islands)))


def in_an_exchange(job: Job) -> bool:
    return job.brain is not None and "exchange" in job.brain.waiting_for()


def is_exchanging(job: Job) -> bool:
    """Rounds run; islands that stream train on meanwhile."""
    brain = job.brain
    return isinstance(brain, IslandsBrain) and brain._outer._exchanging is not None


def test_a_replica_of_an_island_may_die(tmp_path: Path) -> None:
    spec = diloco(write_text(tmp_path), pipeline__stages=1)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        rig.kill(sorted(rig.servers)[0])

    job = trained(tmp_path, spec, 4, story)
    assert job.record.timeline == 0


@pytest.mark.parametrize(("mode", "number"), [(streaming, 0), *others((diloco, 0), (streaming, 1), (gaia, 0))])
def test_an_envoy_that_dies_in_an_exchange_is_replaced_by_one_that_holds_the_proposal(
    tmp_path: Path, mode: Mode, number: int
) -> None:
    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, is_exchanging)
        assert isinstance(job.brain, IslandsBrain)
        exchanging = job.brain._outer._exchanging
        assert exchanging is not None
        (envoys,) = (round_.newest[-1].envoys for round_ in exchanging._rounds.values())
        rig.kill(envoys[number].peer)

    job = trained(tmp_path, mode(write_text(tmp_path), pipeline__stages=1), 4, story, number + 1)
    assert job.record.timeline == 0


@pytest.mark.parametrize(("every", "back_to"), [(1, 2), *others((0, 0))])
def test_a_job_with_too_few_islands_goes_back_to_its_newest_checkpoint(
    tmp_path: Path, every: int, back_to: int
) -> None:
    changes = {"pipeline__stages": 1, "checkpoint__every_steps": every, "training__steps": 7, "islands__min": 2}
    spec = diloco(write_text(tmp_path), **changes)
    reasons = []

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done > 2 and (one.newest is not None or not every))
        rig.kill(sorted(rig.servers)[0])
        await until(rig, job, lambda one: one.record.state is JobState.STALLED)
        reasons.append(job.record.reason)
        await until(rig, job, lambda one: one.record.timeline == 1)
        assert job.progress.steps_done == back_to
        rig.add_peer(PeerId("another"), rig.tasks, Random(7))

    job = trained(tmp_path, spec, 2, story)
    assert job.record.timeline == 1
    assert job.record.first_steps[-1] == back_to
    assert "island 0: stage server peer-0" in reasons[0]


@pytest.mark.parametrize(
    ("mode", "peers", "moment", "changes"),
    [
        (diloco, 2, in_an_exchange, {"pipeline__overlap": 0, "training__steps": 5}),
        *others(
            (diloco, 2, in_the_second_step, {"pipeline__overlap": 1, "training__steps": 5}),
            (streaming, 4, is_exchanging, {}),
            (gaia, 4, is_exchanging, {}),
            (diloco, 2, in_the_second_step, {"pipeline__overlap": 0, "training__steps": 5}),
            (diloco, 2, in_an_exchange, {"pipeline__overlap": 1, "training__steps": 5}),
            (streaming, 4, lambda job: job.progress.steps_done >= 4, {}),
            (streaming, 4, lambda job: job.progress.steps_done >= 6 and is_exchanging(job), {}),
        ),
    ],
)
def test_a_scheduler_that_is_killed_goes_on_with_its_islands(
    tmp_path: Path, mode: Mode, peers: int, moment: Callable[[Job], bool], changes: dict[str, object]
) -> None:
    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, moment)
        await restart(rig)

    job = trained(tmp_path, mode(write_text(tmp_path), pipeline__stages=1, **changes), peers, story)
    assert job.record.timeline == 0


@pytest.mark.parametrize("stages", [3, *others(1)])
def test_a_paused_job_goes_on_where_all_islands_were_with_another_number_of_stages(tmp_path: Path, stages: int) -> None:
    spec = diloco(write_text(tmp_path), training__steps=5, config__attention_dropout=0.1)
    tokens = Tokens.make(tmp_path, spec)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        await rig.jobs.pause(job, "a break")
        assert "trains up to the next exchange" in job.record.reason
        await until(rig, job, lambda one: one.record.state is JobState.PAUSED)
        assert job.newest is not None
        assert (job.newest.step, job.record.reason) == (2, "a break")
        await until(rig, job, lambda one: len(rig.membership.idle_peers()) == 6)
        values = spec.model_dump()
        values["averaging"]["timeout_s"] = values["limits"]["no_progress_s"]  # refused now, but it was submitted once
        job.spec = JobSpec.model_validate(values)
        values["pipeline"] |= {"stages": stages, "split": "auto"}
        await rig.jobs.resume(job, "", JobSpec.model_validate(values))

    job, _ = run(spec, tokens, 6, story)
    check(job, reference(spec, tokens))
    assert job.record.first_steps == (0, 2)
    assert job.progress.tokens == sum(tokens.batches(spec).tokens_of(portion) for portion in range(10))


def test_a_cancel_saves_and_a_second_one_does_not_wait(tmp_path: Path) -> None:
    spec = diloco(write_text(tmp_path), pipeline__stages=1, training__steps=5)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        await rig.jobs.cancel(job, "enough")
        await until(rig, job, lambda one: one.record.state is JobState.CANCELLED)
        assert job.newest is not None
        assert (job.newest.step, job.record.reason) == (2, "enough")
        await rig.jobs.resume(job, "", None)
        await until(rig, job, lambda one: one.progress.steps_done == 3)
        await rig.jobs.cancel(job, "enough")
        await rig.jobs.cancel(job, "now")
        await until(rig, job, lambda one: one.record.state is JobState.CANCELLED)
        assert (job.newest.step, job.record.reason) == (2, "now; from step 2: 1 step is lost")
        await until(rig, job, lambda one: len(rig.membership.idle_peers()) == 2)
        await rig.jobs.resume(job, "", None)

    job = trained(tmp_path, spec, 2, story)
    assert job.record.first_steps[2:] == (2,)


def test_a_job_whose_time_is_up_is_saved_behind_an_exchange(tmp_path: Path) -> None:
    spec = diloco(write_text(tmp_path), pipeline__stages=1, limits__max_runtime_s=0.7, training__steps=9)
    pauses = []

    async def story(rig: Rig, job: Job) -> None:
        while True:
            await until(rig, job, lambda one: one.record.state in (JobState.PAUSED, JobState.SUCCEEDED))
            if job.record.state is JobState.SUCCEEDED:
                return
            pauses.append(job.record.first_steps[-1])
            await rig.jobs.resume(job, "", None)

    trained(tmp_path, spec, 2, story)
    assert len(pauses) > 1, "each time it gets a little further"


def test_a_job_that_is_to_pause_if_it_stalls_goes_on_when_it_is_told(tmp_path: Path) -> None:
    changes = {"limits__on_stall": "pause", "checkpoint__every_steps": 2, "training__steps": 5, "islands__min": 2}
    spec = diloco(write_text(tmp_path), pipeline__stages=1, **changes)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.newest is not None)
        rig.kill(sorted(rig.servers)[1])
        await until(rig, job, lambda one: one.record.state is JobState.PAUSED)
        assert job.record.reason.endswith('(limits.on_stall = "pause"); from step 2: 2 steps are lost')
        assert "swarm resume" in job.record.hint
        rig.add_peer(PeerId("another"), rig.tasks, Random(7))
        await rig.jobs.resume(job, "", None)

    job = trained(tmp_path, spec, 2, story)
    assert job.record.first_steps == (0, 2)


@pytest.mark.parametrize(
    ("mode", "changes", "seed"),
    [
        (streaming, {"outer__every_steps": 12, "outer__overlap_steps": 5, "outer__compression": "int8"}, 1),
        (gaia, {}, 1),
        *others((diloco, {"outer__every_steps": 3}, 1), (diloco, {"outer__every_steps": 3}, 2)),
    ],
)
def test_an_idle_stage_server_joins_the_island_that_lost_one(
    tmp_path: Path, mode: Mode, changes: dict[str, object], seed: int
) -> None:
    """It fetches weights, moments, outer state and what its island proposes while that trains and merges; then the
    other one may die."""
    spec = mode(write_text(tmp_path), pipeline__stages=1, training__steps=24, **changes)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        lost, left = peers_of(job, 1)
        rig.kill(lost)
        await until(rig, job, lambda _: rig.membership.find(lost).state is PeerState.SUSPECT)
        rig.add_peer(PeerId("another"), rig.tasks, Random(7))
        await until(rig, job, lambda one: "another" in one.record.peers)
        await until(rig, job, lambda _: rig.membership.find("another").state is PeerState.SERVING)
        rig.kill(left)

    job = trained(tmp_path, spec, 4, story, seed)
    assert (job.record.timeline, job.record.peers[PeerId("another")]) == (0, 1)


# Lost islands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "moment"), [(1, in_an_exchange), *others((0, in_the_second_step))])
def test_the_others_go_on_without_an_island_that_is_lost(
    tmp_path: Path, lost: int, moment: Callable[[Job], bool]
) -> None:
    spec = diloco(write_text(tmp_path), 3, training__steps=7, config__attention_dropout=0.1)
    tokens = Tokens.make(tmp_path, spec)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, moment)
        rig.kill(peers_of(job, lost)[0])

    job, _ = run(spec, tokens, 6, story)
    log = exchanges_of(log_of(job))
    assert [record.islands for record in log] == [tuple({0, 1, 2} - {lost})] * 4, "for want of a second stage server"
    expected = reference(spec, tokens, log)
    assert expected.sha256 != reference(spec, tokens).sha256
    check(job, expected)
    assert job.record.timeline == 0, "it was not taken back"


@pytest.mark.parametrize(
    ("mode", "steps", "lost"),
    [(streaming, 20, 0), (gaia, 20, 1), *others((diloco, 16, 0), (diloco, 16, 1), (streaming, 20, 1))],
)
def test_an_island_begins_anew_with_replicas_of_another(tmp_path: Path, mode: Mode, steps: int, lost: int) -> None:
    spec = mode(write_text(tmp_path), training__steps=steps, config__tie_word_embeddings=True)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done == (1 if mode is diloco else 4 + lost))
        lose(rig, job, lost)

    job = trained(tmp_path, spec, 8, story, with_log=True)
    log, other = exchanges_of(log_of(job)), 1 - lost
    assert log[0].islands == (other,)
    assert [record.begins for record in log if record.begins] == [{lost: other}]
    assert log[-1].after_step < steps - 2, "both islands are there in the end"
    assert job.record.timeline == 0


def test_an_island_that_begins_anew_knows_that_no_relay_is_here(tmp_path: Path) -> None:
    spec = diloco(write_text(tmp_path), training__steps=16)
    tokens, seen = Tokens.make(tmp_path, spec), []

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        rig.parts.listener.on_relays(False)
        lose(rig, job, 0)
        brain = job.brain
        assert isinstance(brain, IslandsBrain)
        await until(rig, job, lambda job: len(brain.present) == 1)
        await until(rig, job, lambda job: len(brain.present) == 2)
        seen.extend(island.relays_here for island in brain._roster.islands)

    run(spec, tokens, 8, story)
    assert seen == [False, False]


@pytest.mark.parametrize("seed", [2, *others(1, 3)])
def test_a_scheduler_that_is_killed_knows_which_island_is_lost_and_which_began_anew(tmp_path: Path, seed: int) -> None:
    spec = diloco(write_text(tmp_path), pipeline__stages=1, training__steps=18)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        lose(rig, job, 1)
        await until(rig, job, lambda one: one.progress.steps_done >= 2 + 2 * seed)
        await restart(rig)

    job = trained(tmp_path, spec, 4, story, seed, with_log=True)
    log = exchanges_of(log_of(job))
    assert [record.begins for record in log if record.begins] == [{1: 0}]
    assert job.record.timeline == 0


def test_a_job_that_has_nobody_left_goes_on_with_stage_servers_that_rest(tmp_path: Path) -> None:
    """They rest for those at work only: there is nobody whom they could hold up."""
    changes = {"averaging__timeout_s": 5.0, "limits__no_progress_s": 10.0, "checkpoint__every_steps": 2}
    spec = diloco(write_text(tmp_path), pipeline__stages=1, training__steps=9, **changes)
    tokens, kept = Tokens.make(tmp_path, spec), list[Checkpoint]()

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        (left,), resting = sorted((peers_of(job, island) for island in (0, 1)), key=len)
        rig.slowness = dict.fromkeys(resting, 2000.0)
        brain = job.brain
        assert isinstance(brain, IslandsBrain)
        await until(rig, job, lambda _: len(brain.present) == 1)
        rig.slowness = {}
        await until(rig, job, lambda one: one.newest is not None and len(rig.membership.idle_peers()) == 2)
        assert brain._guests.resting(brain._now_s) == set(resting)
        rig.kill(left)
        await until(rig, job, lambda one: one.record.timeline == 1)
        assert job.newest is not None
        kept.append(job.newest)

    job, _ = run(spec, tokens, 3, story)
    expected = reference(spec, tokens, start=kept[0])
    assert (job.record.state, job.record.weights_sha256) == (JobState.SUCCEEDED, expected.sha256)
    assert job.record.first_steps == (0, kept[0].step)


def test_a_job_that_was_saved_without_an_island_goes_on_with_all(tmp_path: Path) -> None:
    """The part of the lowest island at work is the first; whoever has none begins with the state of another."""
    spec = diloco(write_text(tmp_path), training__steps=9)
    tokens = Tokens.make(tmp_path, spec)
    kept: list[Checkpoint] = []

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        rig.kill(peers_of(job, 0)[0])
        await until(rig, job, lambda one: one.progress.steps_done == 3)
        kept.append(await paused(rig, job))
        assert not any(file.path.startswith("islands/") for file in kept[0].files)
        rig.add_peer(PeerId("another"), rig.tasks, Random(7))
        await rig.jobs.resume(job, "", None)

    job, _ = run(spec, tokens, 4, story)
    assert job.record.first_steps == (0, 4)
    expected = reference(spec, tokens, start=kept[0])
    assert (job.record.state, job.record.weights_sha256) == (JobState.SUCCEEDED, expected.sha256)
    assert [exchange.islands for exchange in exchanges_of(log_of(job))] == [(1,), (1,)], "of both timelines"


# Fewer islands than the job file asks for ----------------------------------------------------------------------------

WAITS_S = 10.0  # limits.no_progress_s
PATIENT = {"averaging__timeout_s": 5.0, "limits__no_progress_s": WAITS_S, "outer__every_steps": 4}
STREAMING: dict[str, object] = {"averaging__mode": "streaming", "outer__fragments": 2, "outer__overlap_steps": 1}


@pytest.mark.parametrize(
    ("islands", "changes", "restart"),
    [
        (3, {"islands__min": 2}, True),
        *others(
            *(
                (2, changes, restart)
                for changes in ({}, {"islands__shares": "speed"}, STREAMING)
                for restart in (False, True)
            ),
            (3, {"islands__min": 2}, False),
        ),
    ],
)
def test_a_job_that_stalled_goes_on_with_as_many_islands_as_there_are_stage_servers_for(
    tmp_path: Path, islands: int, changes: dict[str, object], restart: bool
) -> None:
    """A site that never came back held the job up for ever, although islands.min says that one island is enough.

    Before the first exchange of that timeline a scheduler that is killed must know which islands are at work.
    """
    every = {"checkpoint__every_steps": 4, "training__steps": 20}
    spec = diloco(write_text(tmp_path), islands, **{"pipeline__stages": 1, **every, **PATIENT, **changes})
    tokens, present, back_to = Tokens.make(tmp_path, spec), tuple(range(islands - 1)), list[int]()

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.newest is not None)
        for peer in sorted(rig.servers):
            rig.kill(peer)
        await until(rig, job, lambda one: one.record.timeline == 1)
        back_to.append(job.progress.steps_done)
        for number in present:
            rig.add_peer(PeerId(f"another-{number}"), rig.tasks, Random(number))
        await until(rig, job, lambda one: one.waiting is not None and one.waiting.fewer is not None)
        began_s = asyncio.get_running_loop().time()
        told = f"goes on with {islands - 1} of {islands} islands in 10 s if no more can begin"
        assert f"stage {islands - 1} needs 1 replica more" in job.record.reason
        assert job.reason == f"{job.record.reason}; {told}"
        await until(rig, job, lambda one: one.record.state is not JobState.STALLED)
        assert WAITS_S - 0.1 < asyncio.get_running_loop().time() - began_s < WAITS_S + 1.0
        assert job.record.reason.endswith(f"in {islands - 1} of {islands} islands")
        await until(rig, job, lambda one: one.progress.steps_done == back_to[0] + 2)
        if restart:
            await rig.kill_scheduler()
            await rig.start_scheduler()
            job = rig.jobs.registry.find(job.record.id)
            assert job.progress.steps_done == back_to[0] + 2, "also steps that only these islands made are known again"
            await until(rig, job, lambda one: one.progress.steps_done > back_to[0] + 2)
        assert isinstance(job.brain, IslandsBrain)
        assert job.brain.present == present
        rig.add_peer(PeerId("yet-another"), rig.tasks, Random(9))

    job, _ = run(spec, tokens, islands, story)
    log = [exchange for exchange in exchanges_of(log_of(job)) if exchange.after_step > back_to[0]]
    assert (job.record.first_steps, log[0].islands) == ((0, back_to[0]), present)
    assert [record.begins for record in log if record.begins] == [{islands - 1: 0}], "it begins anew like any other"
    check(job, reference(spec, tokens, log_of(job)))
    if spec.islands.shares == "equal":
        assert job.progress.tokens == tokens_that_count(spec, tokens, log_of(job))


def test_a_job_whose_islands_all_come_back_in_time_goes_on_with_all(tmp_path: Path) -> None:
    every = {"checkpoint__every_steps": 4, "training__steps": 12}
    spec = diloco(write_text(tmp_path), **{"pipeline__stages": 1, **every, **PATIENT})

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.newest is not None)
        for peer in sorted(rig.servers):
            rig.kill(peer)
        await until(rig, job, lambda one: one.record.timeline == 1)
        await asyncio.sleep(3 * WAITS_S)  # for want of any stage server
        rig.add_peer(PeerId("early"), rig.tasks, Random(1))
        await asyncio.sleep(WAITS_S - 3.0)
        assert job.record.state is JobState.STALLED
        rig.add_peer(PeerId("late"), rig.tasks, Random(2))

    job = trained(tmp_path, spec, 2, story)
    assert job.record.first_steps == (0, 4)


def test_the_first_start_waits_for_all_islands_and_a_resumed_job_does_not(tmp_path: Path) -> None:
    spec = diloco(write_text(tmp_path), **{"pipeline__stages": 1, "training__steps": 5, **PATIENT})
    tokens = Tokens.make(tmp_path, spec)

    async def story(rig: Rig, job: Job) -> None:
        await asyncio.sleep(3 * WAITS_S)
        assert job.record.state is JobState.PLACING
        assert "goes on" not in job.reason
        rig.add_peer(PeerId("another"), rig.tasks, Random(7))
        await until(rig, job, in_the_second_step)
        await paused(rig, job)
        rig.kill(PeerId("another"))
        await until(rig, job, lambda _: len(rig.membership.idle_peers()) == 1)
        await rig.jobs.resume(job, "", None)

    job, _ = run(spec, tokens, 1, story)
    assert [exchange.islands for exchange in exchanges_of(log_of(job))] == [(0,)]
    check(job, reference(spec, tokens, log_of(job)))
    assert job.record.first_steps == (0, 4)


# Islands that merge fragments in turn while they train on ----------------------------------------------------------


@pytest.mark.parametrize("mode", [streaming, gaia])
def test_a_job_that_streams_is_paused_and_goes_on_with_the_bits_that_it_would_have_had(
    tmp_path: Path, mode: Mode
) -> None:
    """Islands differ where it is saved: each has weights of its own, and has trained what it will propose."""
    spec = mode(write_text(tmp_path), training__steps=16, checkpoint__every_steps=3)
    tokens, kept = Tokens.make(tmp_path, spec), list[Checkpoint]()

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 4)
        kept.append(await paused(rig, job))
        assert {"weights", "islands/01/weights"} <= {file.path.rpartition("/")[0] for file in kept[0].files}
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

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, lambda one: one.progress.steps_done >= 8)
        assert (await paused(rig, job)).step == 9
        values = job.spec.model_dump()
        values["training"] |= {"steps": 16}
        with pytest.raises(InvalidConfig, match="would be trained twice"):
            await rig.jobs.resume(job, "", JobSpec.model_validate(values))
        await rig.jobs.resume(job, "", None)

    trained(tmp_path, spec, 4, story)


@pytest.mark.parametrize("seed", [1, *others(2)])
def test_a_killed_scheduler_knows_which_of_the_islands_that_stream_was_lost(tmp_path: Path, seed: int) -> None:
    spec = streaming(write_text(tmp_path), 3, pipeline__stages=1, training__steps=14)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, is_exchanging)
        rig.kill(peers_of(job, seed)[0])
        await until(rig, job, lambda one: one.progress.steps_done >= 5 + seed)
        await restart(rig)

    job = trained(tmp_path, spec, 3, story, seed, with_log=True)
    log = exchanges_of(log_of(job))
    assert {record.islands for record in log} == {tuple({0, 1, 2} - {seed})}, "for want of a second stage server"
    assert job.record.timeline == 0


@pytest.mark.parametrize("late", [1, *others(0)])
def test_a_checkpoint_without_an_island_counts_what_another_has_trained_once(tmp_path: Path, late: int) -> None:
    """Whoever has no weights of its own there begins with the outer ones, and with the optimizer's state of another.

    With late microbatches an exchange once overwrote weights that were still evaluated, and the job waited for ever.
    """
    spec = streaming(write_text(tmp_path), pipeline__stages=1, training__steps=14, pipeline__overlap=late)
    tokens, kept = Tokens.make(tmp_path, spec), list[Checkpoint]()

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        rig.kill(peers_of(job, 0)[0])
        await until(rig, job, lambda one: one.progress.steps_done == 5)
        kept.append(await paused(rig, job))
        rig.add_peer(PeerId("another"), rig.tasks, Random(7))
        await rig.jobs.resume(job, "", None)

    job, _ = run(spec, tokens, 2, story)
    expected = reference(spec, tokens, start=kept[0])
    assert (job.record.state, job.record.weights_sha256) == (JobState.SUCCEEDED, expected.sha256)
