"""Islands that are lost, and begin anew as copies of others: what was exchanged counts once, and nothing else does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.brain import inputs, outputs
from scheduler.brain.outputs import Fork
from swarm.errors import OutOfMemory
from swarm.job.course import TIMELINES_MAX
from swarm.types import PROTOCOL_VERSION, JobState, PeerId
from swarm.wire.messages import Exchange, Failed, Hello, LoadStage, Release
from tests.simulation.engine.islands import (
    JOB,
    Ended,
    GoesOn,
    Harmed,
    History,
    Kept,
    Rows,
    Shape,
    World,
    begun_world,
    checkpoints_level,
    exchanges,
    faults,
)

# Single stories ------------------------------------------------------------------------------------------------------


def forks(history: History) -> list[Fork]:
    return [fork for record in history if isinstance(record, Rows) for fork in record.forks]


def with_a_loss(shape: Shape, stage: int = 0) -> World:
    """Island 1 lost a stage after its first step."""
    world = World(shape, 0)
    world.play_until(lambda one: bool(one.database[1]))
    world.lose(1, stage)
    return world


def counts_once(world: World) -> None:
    """Play to the end."""
    world.finish()
    assert faults(world.history, replace(world.shape, losses=1)) == []


def in_exchange(world: World) -> bool:
    return "exchange between islands" in world.brain.waiting_for()


def half_way(world: World) -> bool:
    """An exchange is under way, and a unit of it is complete."""
    exchanging = world.brain._outer._exchanging
    return exchanging is not None and any(round_.is_complete for round_ in exchanging._rounds.values())


@pytest.mark.parametrize("moment", [lambda world: bool(world.database[1]), in_exchange, half_way])
def test_an_island_that_loses_a_stage_is_lost_and_the_others_go_on(moment: Callable[[World], bool]) -> None:
    """Also in an exchange: a unit that was complete is exchanged again, as all units have the same contributors."""
    shape = Shape(replicas=1, losses=1)
    world = World(replace(shape, losses=0), 0)
    world.play_until(moment)
    world.lose(1, 0)
    assert any("island 1 is lost: stage server i1-s0-0 (stage 0) is gone: killed" in one for one in world.told)
    assert world.brain.present == (0,)
    assert isinstance(world.replicas[PeerId("i1-s1-0")].commands[-1], Release), "who is left is free"
    assert "island 1 is lost" in world.brain.waiting_for() or in_exchange(world)
    (standing,) = [island for island in world.brain.situation(1.0).islands if island.number == 1]
    assert standing.waiting_for.startswith("lost: stage server i1-s0-0")
    counts_once(world)
    assert {len(made.islands) for made in exchanges(world.history).values()} == {1}


def test_an_island_whose_only_machine_for_a_stage_is_too_small_is_lost_and_the_others_go_on() -> None:
    """It ended the job, though a death of the same process would have ended the island only."""
    shape = Shape(replicas=1, losses=1)
    world = World(replace(shape, losses=0), 0)
    world.play_until(lambda one: bool(one.database[1]))
    failed = Failed(JOB, OutOfMemory.code, "needs 9 GiB, has 8", "use more stages")
    world.tell(inputs.Happened(PeerId("i1-s0-0"), failed))
    assert world.brain.present == (0,)
    (standing,) = [island for island in world.brain.situation(1.0).islands if island.number == 1]
    assert "i1-s0-0 (stage 0) cannot go on: needs 9 GiB, has 8" in standing.waiting_for
    counts_once(world)


def test_a_job_stalls_at_once_if_those_who_made_an_exchange_are_lost_and_a_late_island_has_not_got_it() -> None:
    """It waited for limits.no_progress_s, for what nobody could give."""
    world = begun_world(Shape(replicas=1, steps=12, patience=0.1))
    world.play_until(lambda one: all(island.agreed > 3 for island in one.brain._roster.islands))
    slow = frozenset(peer for peer in world.replicas if peer.startswith("i1"))
    world.harm(Harmed(slow, math.inf))
    world.play_until(lambda one: bool(one.made[-1].late))
    world.lose(0, 0)
    (end,) = [event for event in world.history if isinstance(event, Ended)]
    assert end.state == "stalled"
    assert end.reason.startswith("the islands that made the exchange after step ")
    assert end.reason.endswith(" are lost, and no other has it yet")


def test_a_job_stalls_at_once_if_those_who_made_an_exchange_are_lost_before_it_is_known_who_has_got_it() -> None:
    """Behind a restart of the scheduler it waited for limits.no_progress_s, too."""
    world = begun_world(Shape(islands=3, steps=12, patience=0.1))
    world.play_until(lambda one: all(island.agreed > 3 for island in one.brain._roster.islands))
    world.harm(Harmed(frozenset(peer for peer in world.replicas if not peer.startswith("i1")), math.inf))
    world.play_until(lambda one: len(one.made[-1].late) == 2)
    for peer, replica in world.replicas.items():
        replica.is_free = peer.startswith(("i1", "i2-s1-1"))  # these do not come back, so island 2 settles last
    world.restart()
    world.finish()
    (end,) = [event for event in world.history if isinstance(event, Ended)]
    assert end.reason.endswith(" are lost, and no other has it yet")


def test_a_job_of_which_all_islands_are_silent_waits_for_stage_servers() -> None:
    """It stood still as if it were at fault, and failed the third time that the scheduler was cut off from all."""
    world = begun_world(Shape(steps=40, patience=0.1, silence_s=60.0))
    world.play_until(lambda one: len(one.made) > 1)
    for peer in sorted(world.replicas):
        assert world.brain.fellows_of(peer).silence_s == 60.0
        world.tell(inputs.PeerSuspect(peer, "silent for 2.5 s"))
    world.tell(inputs.Stuck(60.0))
    end = world.decided[-1]
    assert isinstance(end, outputs.Stopped)
    assert (end.state, end.error_code) == (JobState.STALLED, ""), "no standstill, which counts"
    assert end.reason == "no stage server is heard; no step was committed for 60 s"


def test_what_a_lost_island_still_says_is_refused() -> None:
    """A replica that was cut off comes back with steps of its own: they have no place any more."""
    world = with_a_loss(Shape(replicas=1))
    late = PeerId("i1-s1-0")
    hello = Hello(late, 1, PROTOCOL_VERSION, "", "", "", "cpu", 1, 0, -1, JOB, 1, 1, (), 1)
    assert not world.brain.admits(hello)
    decided = world.brain.step(inputs.Happened(late, hello), world.now_s)
    assert [type(one.command) for one in decided if isinstance(one, outputs.Send)] == [Release]
    assert any(isinstance(one, outputs.Released) for one in decided)


def test_an_island_begins_anew_with_half_of_the_replicas_of_another() -> None:
    world = with_a_loss(Shape(replicas=3, steps=9), stage=1)
    world.play_until(lambda one: bool(forks(one.history)))
    (fork,) = forks(world.history)
    assert fork == Fork(1 + 2 * TIMELINES_MAX, 0, 3)
    world.play_until(lambda one: one.brain.present == (0, 1) and not any_loads(one))
    held = Counter(replica.island for replica in world.replicas.values() if not replica.is_free)
    assert held == {0: 4, 1: 2}
    assert world.brain.timelines == (0, fork.timeline)
    counts_once(world)
    took_part = [len(made.islands) for _, made in sorted(exchanges(world.history).items())]
    assert took_part == [1, 2, 2, 2, 2], "the exchange behind the loss was without it"


def test_an_island_that_another_site_has_joined_is_left_to_it_behind_an_exchange() -> None:
    """Both islands were at lyon; a replica for each stage of the second is at berlin."""
    sites = {f"i{i}-s{stage}-{number}": "lyon" for i in range(2) for stage in range(2) for number in range(2)}
    world = World(Shape(steps=12), 0, sites | {"i1-s0-0": "berlin", "i1-s1-1": "berlin"})
    world.finish()
    assert faults(world.history, world.shape) == []
    assert {peer for peer, one in world.replicas.items() if one.is_free} == {"i1-s0-1", "i1-s1-0"}


def any_loads(world: World) -> bool:
    return any(isinstance(command, LoadStage) for replica in world.replicas.values() for command in replica.commands)


def test_an_island_gives_no_replica_that_it_cannot_spare() -> None:
    world = with_a_loss(Shape(replicas=1, steps=9))
    world.finish()
    assert forks(world.history) == []


def test_a_replica_that_dies_while_it_goes_over_may_cost_the_new_island_but_nothing_else() -> None:
    world = with_a_loss(Shape(replicas=2, steps=12))
    world.play_until(lambda one: bool(forks(one.history)))
    going = sorted(peer for division in world.brain._divisions for peer in (*division.awaited, *division.arrived))
    assert going == ["i0-s0-1", "i0-s1-1"]
    del world.replicas[PeerId("i0-s0-1")]
    world.tell(inputs.PeerGone(PeerId("i0-s0-1"), "killed"))
    world.play_until(lambda one: not one.brain._divisions)
    assert world.brain.present == (0,)
    assert world.replicas[PeerId("i0-s1-1")].is_free or any(
        isinstance(command, Release) for command in world.replicas[PeerId("i0-s1-1")].commands
    )
    counts_once(world)


@pytest.mark.parametrize("has_left", [False, True])
def test_a_stage_server_that_is_drained_while_it_goes_over_serves_no_island(has_left: bool) -> None:
    """Nobody heard of it: it served the new island, and who had asked waited for ever."""
    world = with_a_loss(Shape(steps=12))
    world.play_until(lambda one: bool(one.brain._divisions))
    (division,), stays = world.brain._divisions, PeerId("i0-s1-0")
    if has_left:
        world.tell(inputs.PeerSuspect(stays, "silent"))  # so the other one of its stage cannot leave yet
        world.play_until(lambda one: bool(division.arrived))
    drained = PeerId("i0-s0-1")
    assert drained in (division.arrived if has_left else division.awaited)
    world.tell(inputs.AskToLeave(drained, "drained"))
    world.tell(inputs.PeerBack(stays))
    world.play_until(lambda one: one.replicas[drained].is_free)
    assert not any(drained in pool for island in world.brain._roster.islands for pool in island.peers)
    counts_once(world)


def test_a_new_island_that_is_lost_before_it_trains_is_lost_once_more() -> None:
    world = with_a_loss(Shape(replicas=2, steps=12))
    world.play_until(lambda one: one.brain.present == (0, 1))
    assert any(
        isinstance(command, LoadStage) and command.held == 3
        for replica in world.replicas.values()
        for command in replica.commands
    )
    world.lose(1, 0)
    assert world.brain.present == (0,)
    counts_once(world)
    assert world.history[-1] == Ended("succeeded", "")


def test_a_pause_waits_for_an_island_that_is_about_to_begin() -> None:
    world = with_a_loss(Shape(replicas=2, steps=12))
    world.play_until(lambda one: bool(one.brain._divisions))
    world.tell(inputs.Stop(JobState.PAUSED, "enough"))
    world.finish()
    assert world.history[-1] == Ended("paused", "enough")
    found = faults(world.history, replace(world.shape, losses=1))
    assert [one[:2] for one in found] == ["E1", "it"], "but that it did not come to its end"


@pytest.mark.parametrize("has_gone_over", [False, True])
def test_a_pause_does_not_wait_for_ever_for_an_island_that_does_not_begin(has_gone_over: bool) -> None:
    """One of its stage servers hangs before it leaves the island that it is of, or as it is to load."""
    world = with_a_loss(Shape(replicas=2, steps=12, still_s=30.0))
    world.play_until(lambda one: bool(one.brain._divisions))
    (division,) = world.brain._divisions
    if has_gone_over:
        world.play_until(lambda one: one.brain.present == (0, 1))
    hangs = min([*division.awaited, *division.arrived])
    world.harm(Harmed(frozenset({hangs}), math.inf))
    world.tell(inputs.Stop(JobState.PAUSED, "enough"))
    assert world.brain._roster.is_unsettled or world.brain._divisions, "how far all are is not known yet"
    world.finish()
    end = world.history[-1]
    assert isinstance(end, Ended)
    assert (end.state, end.reason[:6], world.now_s < 100.0) == ("paused", "enough", True)


def test_an_island_behind_which_the_others_wait_in_vain_is_given_up() -> None:
    world = World(Shape(replicas=1), 0)
    world.play_until(lambda one: bool(one.database[0]) and bool(one.database[1]))
    play_until_waits(world, 0)
    world.tell(inputs.Stuck(300.0))
    assert world.brain.present == (0,)
    counts_once(world)


def play_until_waits(world: World, island: int) -> None:
    """Let the replicas of one island alone answer, until it has come to its outer step."""
    while world.brain._roster.islands[island].outer_step is None:
        for peer, one in sorted(world.replicas.items()):
            if one.island == island and one.commands:
                event = world._answer(one, one.commands.popleft())
                if event is not None:
                    world.tell(inputs.Happened(peer, event))


def test_proposals_of_a_lost_island_are_in_no_later_round() -> None:
    world = World(Shape(replicas=1), 0)
    world.play_until(half_way)
    before = max(one.round for one in asked(world))
    world.lose(1, 0)
    units = {one.unit: {envoy.timeline for envoy in one.envoys} for one in asked(world) if one.round > before}
    assert units == {"stage-0": {0}, "stage-1": {0}, "tied": {0}}, "also of units whose round was complete"


def asked(world: World) -> list[Exchange]:
    return [
        command for replica in world.replicas.values() for command in replica.commands if isinstance(command, Exchange)
    ]


# Islands for which nobody was there when the timeline began ----------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_restarted_scheduler_waits_for_no_island_that_was_not_there_at_first(replicas: int) -> None:
    """Before the first exchange no row says which islands take part."""
    shape = Shape(replicas=replicas, steps=9, lease=4, absent=1)
    world = World(shape, 0)
    (standing,) = [island for island in world.brain.situation(1.0).islands if island.number == 1]
    assert standing.waiting_for.startswith("lost: ")
    world.play_until(lambda one: len(one.database[0]) == 2)
    world.restart()
    assert world.brain.present == (0,)
    counts_once(world)
    assert len(forks(world.history)) == replicas - 1


# Checkpoints ---------------------------------------------------------------------------------------------------------

SAVING = Shape(replicas=2, steps=20, every=2)


def begins_writing(world: World) -> bool:
    """A checkpoint is about to be written, which takes until it is told."""
    world.written = 0
    return world.writing is not None


def begun_anew(world: World) -> bool:
    world.written = 0
    return bool(forks(world.history)) and world.brain.present == (0, 1) and not any_loads(world)


def written_at_once(world: World) -> bool:
    world.written = 1000
    return world.over


def test_an_island_that_begins_anew_while_its_old_part_is_written_waits_for_that() -> None:
    """It replaced the checkpoint under way by its own, and each island waited for another one for ever."""
    world = World(SAVING, 1)
    world.play_until(begins_writing)
    version = world.writing
    world.lose(1, 0)
    world.play_until(begun_anew)
    turns = len(world.database[0])
    world.play_until(lambda one: len(one.database[0]) >= turns + 6 and begins_writing(one))
    assert (world.writing, world.collecting) == (version, version), "the steps go on, and no other is begun"
    world.play_until(written_at_once)
    assert faults(world.history, replace(SAVING, losses=1)) == []
    assert len([record for record in world.history if isinstance(record, Kept)]) > 2


def test_an_island_without_part_in_a_slow_checkpoint_saves_the_end_with_the_others() -> None:
    """It was refused six times, and the job failed."""
    shape = replace(SAVING, steps=8)
    world = World(shape, 1)
    world.play_until(lambda one: len(one.database[1]) > 0)
    world.lose(1, 0)
    world.play_until(begins_writing)
    world.play_until(begun_anew)
    world.play_until(lambda one: begins_writing(one) and all(each.saves_only for each in one.brain._roster.islands))
    for _ in range(300):
        world.turn()
    world.tell(inputs.Stuck(300.0))
    assert not world.over, "it waits for the storage"
    world.play_until(written_at_once)
    assert faults(world.history, replace(shape, losses=1)) == []


def test_that_a_checkpoint_is_not_kept_is_heard_although_the_first_island_is_lost() -> None:
    """It was told to the lost one, and the others waited for ever."""
    world = World(SAVING, 1)
    world.play_until(begins_writing)
    version = world.writing
    assert version is not None
    world.lose(0, 0)
    world.writing = None
    world.tell(inputs.CheckpointNotKept(version, "disk_full", "full"))
    assert world.collecting is None
    world.play_until(written_at_once)
    assert faults(world.history, replace(SAVING, losses=1)) == []
    assert [record for record in world.history if isinstance(record, Kept)], "later ones are kept"


@pytest.mark.parametrize("state", [JobState.PAUSED, JobState.CANCELLED])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("island", [0, 1])
def test_a_pause_is_kept_although_an_island_is_lost_while_it_is_saved(
    island: int, replicas: int, state: JobState
) -> None:
    """It was forgotten, and nobody told."""
    shape = replace(SAVING, replicas=replicas, every=0)
    world = World(shape, 3)
    world.play_until(lambda one: len(one.database[0]) > 1 and len(one.database[1]) > 1)
    world.tell(inputs.Stop(state, "enough"))
    world.play_until(lambda one: one.collecting is not None and one.writing is None)
    version = world.collecting
    before = len(world.told)
    world.lose(island, 0)
    assert sum("DropCheckpoint" in one for one in world.told[before:]) == 1
    assert world.brain.is_stopping
    world.play_until(lambda one: one.collecting == version)  # saved anew, without the lost island
    world.play_until(written_at_once)
    assert world.history[-1] == Ended(state.value, "enough")
    assert not any(isinstance(record, GoesOn) for record in world.history)
    assert [record.steps for record in world.history if isinstance(record, Kept)] == [version]
    assert list(checkpoints_level(world.history, replace(shape, losses=1))) == []
