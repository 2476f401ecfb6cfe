"""scheduler.brain.islands.forks: who goes over to an island that begins anew."""

from __future__ import annotations

from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.islands.forks import Division, Divisions, handed_over, plan
from scheduler.brain.islands.roster import Roster
from scheduler.brain.outputs import Fork
from swarm.job.course import TIMELINES_MAX
from swarm.types import PeerId
from tests.simulation.engine.islands import Shape, begun_world

A, B, C = (PeerId(name) for name in "abc")


def division(*peers: PeerId) -> Division:
    awaited = {peer: ReplicaRecord(peer, 1, "", stage) for stage, peer in enumerate(peers)}
    return Division(1, 0, Fork(9, 0, 3), awaited)


def loaded(sites: dict[str, str] | None = None, **shape: int) -> Roster:
    return begun_world(Shape(**shape), sites).brain._roster


def test_half_of_each_stage_goes_over_from_the_island_with_the_most() -> None:
    roster = loaded(islands=3, replicas=3)
    assert plan(roster, 3) == [], "nobody is lost"
    roster.lose(1, "gone")
    (one,) = plan(roster, 3)
    assert (one.island, one.origin, sorted(one.awaited)) == (1, 0, ["i0-s0-1", "i0-s1-1"])
    assert one.fork == Fork(1 + 3 * TIMELINES_MAX, 0, 3)
    (again,) = plan(roster, 6)
    assert again.fork.timeline == 1 + 6 * TIMELINES_MAX, "no timeline is used twice, whatever became of it"


def test_each_island_gives_to_one_and_keeps_what_it_needs() -> None:
    roster = loaded(islands=3, replicas=2)
    roster.lose(1, "gone")
    roster.lose(2, "gone")
    assert [(fork.island, fork.origin) for fork in plan(roster, 3)] == [(1, 0)]
    lonely = loaded(islands=2, replicas=1)
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


# Three replicas of each stage of island 0 are at lyon, one is at berlin, where the lost island was.
MIXED = {f"i0-s{stage}-{number}": "berlin" if number == 0 else "lyon" for stage in range(2) for number in range(4)}


def test_those_of_another_site_go_over_together_and_nobody_else() -> None:
    roster = loaded(MIXED, islands=2, replicas=4)
    roster.lose(1, "gone")
    (one,) = plan(roster, 3)
    assert sorted(one.awaited) == ["i0-s0-0", "i0-s1-0"]


def test_nobody_goes_over_who_rests_by_site_or_by_name() -> None:
    """A site whose island was left out came back through the island that had taken its stage servers in."""
    roster = loaded(MIXED, islands=2, replicas=4)
    roster.lose(1, "it could not exchange")
    (one,) = plan(roster, 3, {"berlin"})
    assert sorted(one.awaited) == ["i0-s0-2", "i0-s1-2"], "half of the others"
    assert plan(roster, 3, {"berlin", "lyon"}) == []
    unnamed = loaded(islands=2, replicas=2)
    unnamed.lose(1, "it could not exchange")
    assert len(plan(unnamed, 3)) == 1
    assert plan(unnamed, 3, {"i0-s0-1"}) == [], "too few are left"


def test_half_of_a_site_goes_over_if_nobody_is_of_another_at_some_stage() -> None:
    roster = loaded(MIXED | {"i0-s1-0": "lyon"}, islands=2, replicas=4)
    roster.lose(1, "gone")
    (one,) = plan(roster, 3)
    assert sorted(one.awaited) == ["i0-s0-1", "i0-s0-3", "i0-s1-1", "i0-s1-3"]


def test_those_whose_site_is_at_another_island_leave_one_that_is_whole_without_them() -> None:
    guests = {"i1-s0-0": "berlin", "i1-s1-1": "berlin"}
    lyon = {f"i{i}-s{stage}-{number}": "lyon" for i in range(2) for stage in range(2) for number in range(2)}
    roster = loaded(lyon | guests, islands=2)
    assert handed_over(roster, 3) == [(1, "i1-s0-1"), (1, "i1-s1-0")]
    leaves = Divisions().begin(roster, 3)
    assert [(island, leave.peer) for island, leave in leaves] == handed_over(roster, 3)
    roster = loaded(lyon | {"i1-s0-0": "berlin"}, islands=2)
    assert handed_over(roster, 3) == [], "it has nobody at the other stage"
    apart = lyon | {peer: "berlin" for peer in lyon if peer.startswith("i1")} | {"i0-s0-0": "berlin"}
    strayed = loaded(apart | {"i0-s1-0": "berlin"}, islands=2)
    assert handed_over(strayed, 3) == [(0, "i0-s0-0"), (0, "i0-s1-0")], "they have an island"


def test_the_founders_keep_an_island_where_two_other_sites_have_joined() -> None:
    lyon = {f"i{i}-s{stage}-{number}": "lyon" for i in range(2) for stage in range(2) for number in range(2)}
    joined = {"i0-s0-0": "berlin", "i0-s1-0": "berlin", "i1-s0-0": "paris", "i1-s1-0": "paris"}
    roster = loaded(lyon | joined, islands=2)
    assert handed_over(roster, 3) == [(0, "i0-s0-1"), (0, "i0-s1-1")], "lyon is at island 1 alone then"
