"""scheduler.brain.islands.forks: who goes over to an island that begins anew."""

from __future__ import annotations

from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.islands.forks import Division, Divisions, plan
from scheduler.brain.outputs import Fork
from swarm.job.course import TIMELINES_MAX
from swarm.types import PeerId
from tests.simulation.engine.islands import Shape, World

A, B, C = (PeerId(name) for name in "abc")


def division(*peers: PeerId) -> Division:
    awaited = {peer: ReplicaRecord(peer, 1, "", stage) for stage, peer in enumerate(peers)}
    return Division(1, 0, Fork(9, 0, 3), awaited)


def loaded(**shape: int) -> World:
    world = World(Shape(**shape), 0)
    while not all(world.database[island] for island in range(world.shape.islands)):
        world.turn()
    return world


def test_half_of_each_stage_goes_over_from_the_island_with_the_most() -> None:
    roster = loaded(islands=3, replicas=3).brain._roster
    assert plan(roster, 3) == [], "nobody is lost"
    roster.lose(1, "gone")
    (one,) = plan(roster, 3)
    assert (one.island, one.origin, sorted(one.awaited)) == (1, 0, ["i0-s0-1", "i0-s1-1"])
    assert one.fork == Fork(1 + 3 * TIMELINES_MAX, 0, 3)
    (again,) = plan(roster, 6)
    assert again.fork.timeline == 1 + 6 * TIMELINES_MAX, "no timeline is used twice, whatever became of it"


def test_each_island_gives_to_one_and_keeps_what_it_needs() -> None:
    roster = loaded(islands=3, replicas=2).brain._roster
    roster.lose(1, "gone")
    roster.lose(2, "gone")
    assert [(one.island, one.origin) for one in plan(roster, 3)] == [(1, 0)]
    lonely = loaded(islands=2, replicas=1).brain._roster
    lonely.lose(1, "gone")
    assert plan(lonely, 3) == []


def test_who_left_with_another_version_does_not_go_over() -> None:
    divisions = Divisions()
    divisions.add(division(A, B))
    assert not divisions.left(A, 4)
    assert not divisions.left(C, 3)
    assert divisions.left(A, 3)
    (one,) = divisions
    assert (list(one.arrived), list(one.awaited), one.is_whole(2)) == ([A], [B], False)
    assert divisions.left(B, 3)
    assert one.is_whole(2)


def test_who_is_lost_on_the_way_does_not_go_over() -> None:
    divisions = Divisions()
    divisions.add(division(A, B))
    assert not divisions.lost(B), "it is still a replica of the other island"
    assert divisions.left(A, 3)
    assert divisions.lost(A), "it is nobody's now"
    (one,) = divisions
    assert (one.awaited, one.arrived) == ({}, {})
