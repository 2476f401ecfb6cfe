"""scheduler.brain.routing.stragglers: whose turn it is, and that only turns are watched."""

from __future__ import annotations

from scheduler.brain.routing.deadlines import SAMPLES_MIN
from scheduler.brain.routing.stragglers import Stragglers
from scheduler.brain.settings import DeadlineSettings
from swarm.types import Direction, PeerId

A, B, C, D = (PeerId(name) for name in "abcd")
SETTINGS = DeadlineSettings(k=6.0, min_s=1.0, max_s=10.0)


def watched(lateness: Stragglers) -> list[tuple[int, Direction, PeerId]]:
    return [(hop.stage, hop.direction, hop.peer) for hop in lateness._deadlines.watched()]


def test_one_replica_of_a_route_has_its_turn_at_a_time() -> None:
    lateness = Stragglers(SETTINGS)
    lateness.routed(0, 0, [A, B, C], [False] * 3, 0.0)
    assert watched(lateness) == [(0, Direction.FORWARD, A)]
    lateness.forwarded(0, 0, 0, B, 0.0)  # of an older route
    lateness.forwarded(0, 0, 0, A, 1.0)
    assert watched(lateness) == [(1, Direction.FORWARD, B)]
    lateness.forwarded(0, 1, 0, B, 2.0)
    assert watched(lateness) == [(2, Direction.FORWARD, C)]
    lateness.accumulated(0, 2, 0, C, 3.0)
    assert watched(lateness) == [(1, Direction.BACKWARD, B)]
    lateness.accumulated(0, 1, 0, B, 4.0)
    assert watched(lateness) == [(0, Direction.BACKWARD, A)]
    lateness.accumulated(0, 0, 0, A, 5.0)
    assert watched(lateness) == []
    lateness.forget_step(0)
    lateness.forwarded(0, 0, 0, A, 6.0)  # late news


def test_a_successor_computes_forward_again_if_its_predecessor_has() -> None:
    lateness = Stragglers(SETTINGS)
    lateness.routed(3, 1, [A, B, C], [False] * 3, 0.0)
    for stage, peer in enumerate((A, B)):
        lateness.forwarded(3, stage, 1, peer, 1.0)
    lateness.accumulated(3, 2, 1, C, 2.0)
    lateness.routed(3, 1, [A, D, C], [False, False, True], 3.0)
    assert watched(lateness) == [(1, Direction.FORWARD, D)]
    lateness.forwarded(3, 1, 1, D, 4.0)
    assert watched(lateness) == [(1, Direction.BACKWARD, D)], "the stage behind has done its part before"


def test_a_contribution_that_is_void_is_awaited_again() -> None:
    lateness = Stragglers(SETTINGS)
    lateness.routed(0, 0, [A, B], [False, False], 0.0)
    lateness.forwarded(0, 0, 0, A, 0.0)
    lateness.accumulated(0, 1, 0, B, 0.0)
    lateness.routed(0, 0, [A, B], [False, False], 1.0)
    assert watched(lateness) == [(0, Direction.BACKWARD, A), (1, Direction.FORWARD, B)]


def test_a_turn_that_takes_much_longer_than_others_is_told_once() -> None:
    lateness = Stragglers(SETTINGS)
    for index in range(SAMPLES_MIN):
        lateness.routed(0, index, [A, B], [False, False], float(index))
        lateness.forwarded(0, 0, index, A, index + 0.1)
    assert lateness._deadlines.of(0, Direction.FORWARD) == SETTINGS.min_s
    lateness.forget_step(0)
    lateness.routed(1, 0, [A, B], [False, False], 20.0)
    due_s = lateness.due_s()
    assert due_s == 21.0
    assert lateness.expired(20.9) == []
    (late,) = lateness.expired(due_s)
    assert (late.hop.peer, late.hop.stage) == (A, 0)
    assert lateness.expired(50.0) == []
    lateness.look_again(late, 50.0)
    assert lateness.due_s() == 51.0
    (again,) = lateness.expired(51.0)
    assert (again.hop, again.waited_s) == (late.hop, 2.0)
    lateness.look_again(again, 51.0)
    lateness.forwarded(1, 0, 0, A, 51.5)
    assert A not in {one.hop.peer for one in lateness.expired(100.0)}
    lateness.routed(1, 0, [C, B], [False, False], 101.0)
    lateness.forget_peer(C)
    assert watched(lateness) == []
