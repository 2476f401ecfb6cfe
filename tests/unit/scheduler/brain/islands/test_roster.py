"""scheduler.brain.islands.roster: which island a peer joins, by its site."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.brain.inputs import Join, ReplicaRecord
from scheduler.brain.islands.roster import WAITS, Roster, Waits, states
from scheduler.brain.state.brain_state import Mode
from swarm.job.course import IslandCourse, OuterCourse
from swarm.job.placement import Candidate
from swarm.types import IslandState, PeerId
from tests.simulation.engine.islands import Shape, begun_world

NEW = PeerId("new")


def roster(islands: int = 2, **sites: str) -> Roster:
    """Islands of two stages x two replicas; `sites` says where those of an island (i0), or one (i0_s0_1), are."""
    named = {name.replace("_", "-"): site for name, site in sites.items()}
    peers = [f"i{i}-s{stage}-{number}" for i in range(islands) for stage in range(2) for number in range(2)]
    sites = {peer: named.get(peer, named.get(peer[:2], "")) for peer in peers}
    return begun_world(Shape(islands=islands), sites).brain._roster


def test_the_home_of_an_island_is_the_site_of_most_of_its_replicas() -> None:
    mixed = roster(i0="lyon", i0_s0_1="berlin", i0_s1_0="")
    assert [mixed.home(island) for island in (0, 1)] == ["lyon", ""]


def test_a_peer_joins_the_island_at_its_site_though_another_has_fewer_replicas() -> None:
    two = roster(i0="lyon", i1="berlin")
    assert [two.open_to(site) for site in ("lyon", "berlin", "rome", "")] == [[0], [1], [], [0, 1]]
    refused = two.where_to_join(Candidate(NEW, site="rome"), [0, 1], 1.0, {})
    assert (refused.plan, refused.reason) == (None, "no island is at rome, where it is")
    for number in range(3):
        peer = PeerId(f"new-{number}")
        assert two.where_to_join(Candidate(peer, site="berlin"), [0, 1], 1.0, {}).plan is not None
        two.admit(ReplicaRecord(peer, 1, "", 0, site="berlin"))
        assert two.island_of[peer] == 1


def test_without_sites_all_islands_are_open() -> None:
    two = roster()
    assert two.open_to("rome") == [0, 1]
    assert two.where_to_join(Candidate(NEW, site="rome"), [0, 1], 1.0, {}).plan is not None


def test_a_site_without_an_island_gets_one_of_two_at_one_site_or_any_while_one_is_lost() -> None:
    three = roster(islands=3, i0="lyon", i1="berlin", i2="lyon")
    assert three.open_to("rome") == [0, 2]
    two = roster(i0="lyon", i1="berlin")
    two.lose(1, "gone")
    assert two.open_to("berlin") == [0]


def test_those_of_another_site_spread_over_the_stages() -> None:
    """Two that came at once went to one stage, so the other one never had any, and the island no second home."""
    two = roster(i0="lyon", i1="berlin")
    two.lose(1, "gone")
    first = two.where_to_join(Candidate(PeerId("x"), site="berlin"), [0, 1], 1.0, {}).plan
    assert first is not None
    coming, sites = {PeerId("x"): first}, {PeerId("x"): "berlin"}
    second = two.where_to_join(Candidate(PeerId("y"), site="berlin"), [0, 1], 1.0, coming, sites).plan
    assert second == 1 - first


def test_two_of_a_new_site_that_come_together_join_one_island() -> None:
    """Each went to the first stage, of another island each, so neither island became theirs."""
    two = roster(i0="lyon", i1="lyon")
    coming: dict[PeerId, int] = {}
    for name in ("x", "y", "z"):
        sites = dict.fromkeys(coming, "berlin")
        plan = two.where_to_join(Candidate(PeerId(name), site="berlin"), [0, 1], 1.0, coming, sites).plan
        assert plan is not None
        coming[PeerId(name)] = plan
    assert {coming[PeerId("x")], coming[PeerId("y")]} == {0, 1}
    for peer, stage in coming.items():
        two.admit(ReplicaRecord(peer, 1, "", stage, site="berlin"))
        two.islands[two.island_of[peer]].step(Join(ReplicaRecord(peer, 1, "", stage, site="berlin")), 1.0)
    assert len({two.island_of[peer] for peer in coming}) == 1


COURSES = tuple(OuterCourse(IslandCourse(4, 2, 2, island)) for island in range(2))  # steps 2 and 5 are outer ones


def test_a_late_replica_is_sent_to_those_who_have_what_it_lacks() -> None:
    """Replicas of another late island stood before them, and were as many as it is sent to."""
    world = begun_world(Shape(islands=3, replicas=4))
    late = world.brain._roster
    late.late = {0: 0.0, 1: 0.0}
    world.kill(PeerId("i2-s0-0"))
    allies = [hop.peer for hop in late.allies(0, PeerId("i0-s0-0"), 2, {PeerId("i2-s0-0")})]
    assert allies == ["i2-s0-1", "i2-s0-2", "i2-s0-3", "i1-s0-0"]


def island(
    agreed: int, *, begun: int | None = None, mode: Mode = Mode.RUNNING, is_held: bool = False, is_late: bool = False
) -> Any:
    """One that has this version; `is_held`: an evaluation needs its weights."""
    begun = agreed if begun is None else begun
    has_come = COURSES[0].is_outer(agreed) and begun == agreed and mode is Mode.RUNNING and not is_held
    step = agreed if has_come else None
    return SimpleNamespace(mode=mode, agreed=agreed, begun=begun, outer_step=step, is_late=is_late)


def waits_roster(*islands: Any) -> Any:
    """None in the place of an island: it is lost."""
    at_work = {number: one for number, one in enumerate(islands) if one is not None}
    steps = {island.outer_step for island in at_work.values()}
    return SimpleNamespace(
        islands=islands,
        courses=COURSES,
        late={number: 0.0 for number, one in enumerate(islands) if one is not None and one.is_late},
        lost={number: "" for number, one in enumerate(islands) if one is None},
        at_work=lambda: at_work,
        outer_step=steps.pop() if len(steps) == 1 else None,
    )


@pytest.mark.parametrize(
    ("one", "other", "state"),
    [
        (island(1, begun=2), island(1), "training"),
        (island(2), island(1), "waiting"),
        (island(2), island(2), "exchanging"),
        (island(2, begun=3), island(2, begun=3), "exchanging"),
        (island(2, is_held=True), island(2), "evaluating"),
        (island(3), island(2, begun=3), "training"),
        (island(0, mode=Mode.LOADING), island(2), "loading"),
        (island(2, mode=Mode.GATHERING), island(2), "loading"),
        (island(6, mode=Mode.SAVING), island(6), "saving"),
        (island(1, is_late=True), island(3), "late"),
        (island(2), None, "exchanging"),
        (None, island(2), "lost"),
    ],
)
def test_an_island_is_in_the_state_that_its_steps_and_those_of_the_others_say(one: Any, other: Any, state: str) -> None:
    assert states(waits_roster(one, other))[0].value == state


def test_an_island_that_is_lost_while_it_is_late_is_shown_as_lost() -> None:
    late = roster()
    late.late = {1: 0.0}
    assert states(late)[1] is IslandState.LATE
    late.lose(1, "gone")
    assert states(late)[1] is IslandState.LOST


def test_what_an_island_waits_for_is_counted_apart_also_while_it_lasts() -> None:
    at: Any = SimpleNamespace(now=waits_roster(island(1), island(1)))
    waits = Waits(at)

    def note(now_s: float, *islands: Any) -> None:
        at.__dict__.update(vars(waits_roster(*islands)))
        waits.note(now_s)

    note(100.0, island(1), island(1))
    note(110.0, island(2), island(1))  # the first waits for the second
    note(113.0, island(2), island(1))
    note(115.0, island(2), island(2))  # they exchange
    note(119.0, island(3), island(2, begun=3))  # the second has yet to merge
    assert [[waits.of(n, 120.0)[reason] for reason in WAITS] for n in (0, 1)] == [[5.0, 4.0], [0.0, 5.0]]
    note(121.0, island(3), None)
    note(200.0, island(3), None)
    assert [[waits.of(n, 300.0)[reason] for reason in WAITS] for n in (0, 1)] == [[5.0, 4.0], [0.0, 6.0]]
