"""Outer steps of counting islands, one story each: how they begin, stop, save, take in others and disagree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.brain import inputs, outputs
from scheduler.brain.inputs import ReplicaRecord
from swarm.job.placement import Candidate
from swarm.types import JobState, OnStall, PeerId
from swarm.wire.messages import Exchange, LoadStage, Release, Saved, SaveStage
from tests.simulation.engine.islands import (
    MICROBATCHES,
    Ended,
    Harmed,
    Kept,
    Replica,
    Shape,
    Trained,
    World,
    checkpoints_level,
    faults,
)
from tests.simulation.engine.shapes import PLAYS

CALM = PLAYS["calm"].shape


# Single stories ------------------------------------------------------------------------------------------------------


def exchanging(world: World) -> bool:
    return "exchange between islands" in world.brain.waiting_for()


def end_of(world: World) -> Ended:
    assert world.over
    (ended,) = [record for record in world.history if isinstance(record, Ended)]
    return ended


def spoil(world: World) -> None:
    """A stage of island 1 holds other outer weights than the others, once there is an exchange; play to the end."""
    world.play_until(lambda one: any(replica.log for replica in one.replicas.values()))
    for replica in world.replicas.values():
        if (replica.island, replica.record.stage) == (1, 0):
            replica.theta[99] = 1
            replica.said.clear()
    world.finish()


@pytest.fixture
def world() -> World:
    return World(CALM, 0)


def test_an_island_whose_outer_weights_differ_ends_the_job_which_says_how(world: World) -> None:
    spoil(world)
    assert end_of(world).state == "failed"
    assert "islands differ in the outer weights of stage 0 after step 2" in end_of(world).reason


@pytest.mark.parametrize("is_late", [False, True])
def test_an_island_whose_outer_weights_differ_from_those_of_most_is_left_out(is_late: bool) -> None:
    """It failed the job of all: one stage server that said something else was enough."""
    shape = replace(CALM, islands=3, steps=12, patience=0.5)
    world = World(shape, 0)
    if is_late:
        island = world.brain._roster.islands[1]
        world.play_until(lambda one: len(one.made) > 1 and island.begun == island.agreed)
        world.harm(Harmed(frozenset(peer for peer in world.replicas if peer.startswith("i1")), world.now_s + 60.0))
        world.play_until(lambda one: bool(one.made[-1].late))
    spoil(world)
    assert end_of(world).state == "succeeded"
    (lost,) = [one for one in world.told if "island 1 is lost" in one]
    assert f"islands differ in the outer weights of stage 0 after step {6 if is_late else 2}" in lost
    assert {fault[:2] for fault in faults(world.history, shape)} == {"E4"}, "island 1 did differ; nothing else is wrong"


def test_islands_that_do_not_begin_alike_end_the_job(world: World) -> None:
    for replica in world.replicas.values():
        replica.start = f"start of {replica.island}"
    world.finish()
    assert "islands differ in the outer weights of stage 0 after step 0" in end_of(world).reason


def test_proposals_weigh_by_the_tokens_of_their_span(world: World) -> None:
    world.play_until(exchanging)
    found = {
        (envoy.timeline, envoy.tokens)
        for replica in world.replicas.values()
        for command in replica.commands
        if isinstance(command, Exchange) and command.unit == "stage-0"
        for envoy in command.envoys
    }
    assert found == {(0, 8 + 0 + 8 + 1), (1, 8 + 2 + 8 + 3)}, "a portion q has 8 + q tokens"


@pytest.mark.parametrize("moment", [exchanging, lambda world: bool(world.database[1])])
def test_a_job_with_too_few_islands_stalls(moment: Callable[[World], bool]) -> None:
    world = World(replace(CALM, replicas=1, least=2), 0)
    world.play_until(moment)
    lost = PeerId("i1-s0-0")
    del world.replicas[lost]
    world.tell(inputs.PeerGone(lost, "no heartbeat"))
    assert end_of(world).state == "stalled"
    assert end_of(world).reason.startswith("island 1: stage server i1-s0-0 (stage 0) is gone: no heartbeat")
    assert all(isinstance(replica.commands[-1], Release) for replica in world.replicas.values()), "everybody is free"


def test_a_job_in_which_nothing_moves_says_what_the_exchange_waits_for(world: World) -> None:
    world.play_until(exchanging)
    world.tell(inputs.Stuck(300.0))
    assert (end_of(world).state, "waits for the exchange between islands: i0-s0-" in end_of(world).reason) == (
        "stalled",
        True,
    )


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.PAUSED])
@pytest.mark.parametrize("turns", [30, 60, 90, 120, 150])
def test_a_job_that_is_told_to_stop_saves_where_no_island_has_been_yet(state: JobState, turns: int) -> None:
    """Nothing that was trained is lost, and nobody trains more than up to the next outer step."""
    world = World(Shape(steps=9, lease=3, deaths=5, failures=50), turns)
    for _ in range(turns):
        world.turn()
    begun = max(row.step for rows in world.database.values() for row in rows)
    world.tell(inputs.Stop(state, "enough"))
    assert world.brain.is_stopping
    world.finish()
    assert end_of(world) == Ended(state.value, "enough")
    steps = max(record.steps for record in world.history if isinstance(record, Kept))
    trained = {record.portion for record in world.history if isinstance(record, Trained)}
    assert trained == set(range(2 * steps)), "all that was trained is in the checkpoint"
    assert steps - 3 <= world.courses[0].inner_steps(begun + 1) <= steps
    assert list(checkpoints_level(world.history, world.shape)) == []
    assert world.brain.step(inputs.Tick(), 1e9) == []


def test_a_job_that_is_told_to_stop_before_it_trains_stops_at_once(world: World) -> None:
    world.tell(inputs.Stop(JobState.PAUSED, "enough"))
    assert end_of(world) == Ended("paused", "enough")


def test_a_pause_that_cannot_be_saved_is_given_up_by_all_islands() -> None:
    world = World(replace(CALM, refusals=1000), 0)
    world.play_until(lambda one: bool(one.database[0]))
    world.tell(inputs.Stop(JobState.PAUSED, "enough"))
    world.play_until(lambda one: not one.brain.is_stopping)
    world.shape = CALM
    world.finish()
    assert end_of(world).state == "succeeded"


def test_a_restarted_scheduler_that_is_to_stop_waits_until_it_knows_how_far_islands_are(world: World) -> None:
    world.play_until(lambda one: len(one.database[0]) == 2)
    told = len(world.history)
    world.restart(told=[inputs.Stop(JobState.PAUSED, "enough")])
    assert world.brain.is_stopping
    world.finish()
    assert end_of(world) == Ended("paused", "enough")
    assert [record.steps for record in world.history[told:] if isinstance(record, Kept)] == [2]


@pytest.mark.parametrize("on_stall", ["wait", "pause", "fail"])
@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.PAUSED])
def test_a_job_that_is_to_stop_does_although_a_stage_is_lost_before_islands_can_be_told(
    state: JobState, on_stall: OnStall
) -> None:
    """A cancelled job stalled and trained on, if the scheduler was restarted and a stage did not return."""
    world = World(replace(CALM, least=2), 0)
    world.play_until(lambda one: len(one.database[0]) == 2)
    for peer, one in list(world.replicas.items()):
        if (one.island, one.record.stage) == (1, 0):
            del world.replicas[peer]
    world.on_stall = on_stall
    world.restart(told=[inputs.Stop(state, "enough")])
    world.finish()
    assert end_of(world).state == state.value
    assert end_of(world).reason.startswith("enough; island 1: ")


def test_a_checkpoint_with_different_weights_is_not_kept() -> None:
    world = World(replace(CALM, every=2), 0)
    save = world._save

    def odd(replica: Replica, command: SaveStage) -> Saved:
        replica.pending = (99,) if replica.island else ()
        return save(replica, command)

    world._save = odd  # type: ignore[method-assign]
    world.play_until(lambda one: one.over or len(one.database[0]) == 5)
    assert any("islands 0 and 1 handed over different weights" in one for one in world.told)
    assert not any(isinstance(record, Kept) for record in world.history)


def test_a_job_that_waits_for_parts_of_a_checkpoint_only_gives_it_up() -> None:
    world = World(replace(CALM, steps=2), 0)
    world.play_until(lambda one: one.collecting is not None and one.brain._roster.islands[1].saves_only)
    for _ in range(3):
        world.tell(inputs.Tick())
    assert not world.over
    while not all(island.saves_only for island in world.brain._roster.islands):
        world.turn()
    checkpoint = world.brain.situation(1.0).checkpoint
    assert checkpoint is not None
    assert checkpoint.version == 2, "steps of the job"
    world.tell(inputs.Stuck(300.0))
    assert world.collecting is None
    world.finish()
    assert end_of(world).state == "succeeded"


def test_whoever_joins_does_so_in_the_island_with_the_fewest_replicas(world: World) -> None:
    world.play_until(lambda one: len(one.database[0]) > 1 and len(one.database[1]) > 1)
    del world.replicas[PeerId("i1-s1-0")]
    world.tell(inputs.PeerGone(PeerId("i1-s1-0"), "killed"))
    brain = world.brain
    decision = brain.where_to_join(Candidate(PeerId("idle")), [0, 1], 1.0)
    assert (decision.plan, "stage 1" in decision.reason) == (1, True)
    for number, island in ((0, 1), (1, 0), (2, 1)):
        peer = PeerId(f"new-{number}")
        told = brain.step(inputs.Join(ReplicaRecord(peer, 1, "", 1)), world.now_s)
        (load,) = [one.command for one in told if isinstance(one, outputs.Send) and isinstance(one.command, LoadStage)]
        assert (load.timeline, load.stage, brain.island_of(peer)) == (island, 1, island)
        assert brain.is_joining(peer)
    assert (brain.team().joining, len(brain.situation(1.0).joiners)) == (3, 3)
    assert brain.is_joining(PeerId("i0-s0-0")) is False
    world.tell(inputs.Stop(JobState.PAUSED, "enough"))
    assert brain.where_to_join(Candidate(PeerId("late")), [0, 1], 1.0).plan is None


def test_several_that_come_at_once_are_sent_where_each_will_be_needed(world: World) -> None:
    world.play_until(lambda one: len(one.database[0]) > 1 and len(one.database[1]) > 1)
    brain = world.brain
    coming: dict[PeerId, int] = {}
    for number in range(4):
        decision = brain.where_to_join(Candidate(PeerId(f"new-{number}")), [0, 1], world.now_s, coming)
        assert decision.plan is not None
        coming[PeerId(f"new-{number}")] = decision.plan
    for heard, (peer, stage) in enumerate(coming.items()):
        brain.step(inputs.Join(ReplicaRecord(peer, 1, "", stage)), world.now_s)
        counts = [[len(island.present(stage)) for stage in range(2)] for island in brain._roster.islands]
        assert sum(map(sum, counts)) == 8 + heard + 1
        decision = brain.where_to_join(Candidate(PeerId("late")), [0, 1], world.now_s, coming)
        assert decision.plan == 0, "those that have come since count once"
    assert counts == [[3, 3], [3, 3]]


def test_questions_are_answered_for_all_islands(world: World) -> None:
    world.play_until(lambda one: len(one.database[0]) > 1 and len(one.database[1]) > 1)
    brain = world.brain
    situation = brain.situation(1.0)
    assert {replica.peer for replica in situation.replicas} == set(world.replicas)
    assert [(island.number, island.steps, island.exchanges) for island in situation.islands] == [
        (number, brain.courses[number].inner_steps(one.agreed), 0) for number, one in enumerate(brain._roster.islands)
    ]
    for one, course in zip(situation.islands, brain.courses, strict=True):
        assert one.own is not None
        assert {replica.peer for replica in one.own.replicas} == {peer for pool in one.peers for peer in pool}
        steps = [times.step for times in one.own.steps]
        assert one.numbers == tuple(0 if course.is_outer(step) else course.inner_steps(step) + 1 for step in steps)
        assert one.numbers[:2] == (1, 2)
    assert situation.island_of(PeerId("i1-s0-0")) == 1
    assert situation.island_of(PeerId("idle")) is None
    assert brain.team().replicas == 8
    assert brain.counts().committed_steps == 2
    assert brain.counts().microbatches == 2 * 2 * MICROBATCHES, "of both islands"
    assert [brain.portion_of(timeline, 0) for timeline in range(2)] == [0, 2]
    assert any(line.startswith("island 1: ") for line in brain.story(1, 0))
