"""scheduler.brain.state.leaves: who leaves when, who stays, and what a step still needs of them."""

from __future__ import annotations

from scheduler.brain.settings import ON_ITS_WAY_S_MAX
from scheduler.brain.state.leaves import Leave, Leaves
from swarm.types import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_a_replica_takes_part_in_what_was_open_and_is_then_released() -> None:
    leaves = Leaves()
    assert leaves.ask(A, Leave("drained"))
    assert not leaves.ask(A, Leave("drained")), "asking twice is the same as once"
    assert A not in leaves, "nothing happens before it begins"
    assert leaves.begin([A, B], [], until=5) == [A]
    assert A in leaves
    assert [leaves.takes_part(A, step) for step in (4, 5)] == [True, False]
    assert leaves.takes_part(B, 5)
    assert leaves.due(4) == []
    assert leaves.due(5) == [A]
    assert leaves.done(A, 0.0) == Leave("drained", None, 5)
    assert A not in leaves
    assert not leaves


def test_a_stage_is_never_emptied() -> None:
    leaves = Leaves()
    for peer in (A, B, C):
        leaves.ask(peer, Leave("drained"))
    assert leaves.begin([A, B, C], [], until=1) == [A, B]
    assert leaves.begin([A, B, C], [], until=2) == []
    leaves.forget(C)
    # The one that stayed is lost: the others stay in its place, and leave again when somebody has come.
    assert leaves.stay([A, B]) == {A: 1, B: 1}
    assert leaves.begin([A, B], [], until=2) == [A]
    assert leaves.begin([B], [], until=3) == []
    assert leaves.begin([B, C], [C], until=3) == [], "a suspect does not count"


def test_a_moving_replica_stays_for_good_if_its_stage_needs_it() -> None:
    leaves = Leaves()
    leaves.ask(A, Leave("it limits", target=1))
    leaves.begin([A, B], [], until=4)
    assert leaves.moving(0.0) == {A: 1}
    assert leaves.stay([A]) == {A: 4}
    assert not leaves
    assert leaves.moving(0.0) == {}


def test_to_be_drained_is_stronger_than_to_be_moved() -> None:
    leaves = Leaves()
    leaves.ask(A, Leave("it limits", target=1))
    leaves.begin([A, B], [], until=4)
    assert leaves.ask(A, Leave("drained"))
    assert leaves.done(A, 0.0) == Leave("drained", None, 4), "what was begun goes on"
    assert leaves.destination(A, 0.0) is None


def test_a_replica_released_for_another_stage_is_on_its_way_for_a_while() -> None:
    leaves = Leaves()
    leaves.ask(A, Leave("it limits", target=1))
    leaves.begin([A, B], [], until=4)
    leaves.done(A, 10.0)
    assert leaves.destination(A, 10.0) == Leave("it limits", 1, 4)
    assert leaves.moving(10.0 + ON_ITS_WAY_S_MAX) == {A: 1}
    assert leaves.moving(10.1 + ON_ITS_WAY_S_MAX) == {}
    assert leaves.destination(A, 10.1 + ON_ITS_WAY_S_MAX) is None


def test_a_replica_that_is_no_member_of_the_open_agreement_cannot_stay() -> None:
    leaves = Leaves()
    for peer in (A, B):
        leaves.ask(peer, Leave("drained"))
    leaves.begin([A, C], [], until=1)
    leaves.begin([B, C], [], until=3)
    assert leaves.stay([A, B], agreed=2) == {B: 3}
    assert A in leaves
    assert leaves.stay([], agreed=2) == {}
