"""What a delivery that failed makes of the hops at its ends: moved, void, or left alone. What there is to feed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.brain.inputs import PeerSuspect, ReplicaRecord
from scheduler.brain.outputs import Output
from scheduler.brain.routing.dispatch import NEWEST, FlightWindow
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.links import LINK_AVOIDED_S, LINK_DEAD_S
from scheduler.brain.state.pool import Trust
from swarm.job.course import PLAIN
from swarm.types import Hop, Microbatch, PeerId
from swarm.wire.messages import Accumulated, Route, Undelivered, Void
from tests.support.brain import A, B, C, D, Swarm, routes_in, sends

NOBODY_ELSE = {A: 0, C: 1, D: 1}  # one replica of stage 0


def begun(stage_of: dict[PeerId, int] | None = None) -> Swarm:
    """A job that was fed and in which nobody has answered yet."""
    return Swarm.loaded(stage_of, recover=True)


def through(swarm: Swarm, *peers: PeerId, number: int = 0) -> Route:
    """A route on which these peers are, in order of feeding."""
    routes = dict.fromkeys(command for _, command in swarm.inbox if isinstance(command, Route))
    return [route for route in routes if set(peers) <= {hop.peer for hop in route.hops}][number]


def accumulated(swarm: Swarm, route: Route, peer: PeerId) -> None:
    swarm.obey(peer, route)


def unreached(swarm: Swarm, by: PeerId, route: Route, to: PeerId) -> list[Output]:
    """`by` says that it cannot reach the next or the previous hop of the route."""
    stage = swarm.stage_of[to]
    return swarm.hear(by, Undelivered(route.microbatch, stage, to, route.hops[stage].attempt, "no answer"))


def hops_of(outputs: list[Output], microbatch: Microbatch) -> tuple[Hop, ...]:
    """The microbatch's new route."""
    return next(route.hops for _, route in routes_in(outputs) if route.microbatch == microbatch)


def test_the_end_that_has_not_done_its_hop_is_moved_the_far_one_first() -> None:
    swarm = begun()
    route = through(swarm, A, C)
    assert [hop.peer for hop in hops_of(unreached(swarm, A, route, C), route.microbatch)] == [A, D]

    swarm = begun()
    route = through(swarm, A, C)
    accumulated(swarm, route, C)
    outputs = unreached(swarm, A, route, C)
    assert [hop.peer for hop in hops_of(outputs, route.microbatch)] == [B, C], "what c has done is kept"
    assert not sends(outputs, Void)


def test_a_lost_receipt_changes_nothing() -> None:
    swarm = begun()
    route = through(swarm, A, C)
    accumulated(swarm, route, C)
    accumulated(swarm, route, A)
    for now_s in (swarm.now_s, swarm.now_s + LINK_DEAD_S):
        swarm.now_s = now_s
        assert unreached(swarm, C, route, A) == [], "a could not have done it without what c sent"


def test_a_holder_that_nobody_of_the_next_stage_can_reach_is_void() -> None:
    swarm = begun()
    done, undone = through(swarm, A, C), through(swarm, A, C, number=1)
    accumulated(swarm, done, A)
    accumulated(swarm, undone, A)
    moved = hops_of(unreached(swarm, C, undone, A), undone.microbatch)
    assert [hop.peer for hop in moved] == [A, D]
    again = Undelivered(undone.microbatch, 0, A, moved[0].attempt, "no answer")
    assert swarm.hear(D, again) == [], "the link may come back"
    swarm.now_s += LINK_DEAD_S
    outputs = swarm.hear(D, again)
    assert [one.peer for one in sends(outputs, Void)] == [A]
    assert hops_of(outputs, undone.microbatch)[0].peer == B
    assert hops_of(outputs, done.microbatch)[0].peer == B, "void is all that it did for the step"


def test_a_sender_whose_only_possible_receiver_is_out_of_reach_is_void() -> None:
    swarm = begun(NOBODY_ELSE)
    route = through(swarm, A, C)
    accumulated(swarm, route, C)
    assert unreached(swarm, C, route, A) == [], "the link may come back"
    swarm.now_s += LINK_DEAD_S
    outputs = unreached(swarm, C, route, A)
    assert [one.peer for one in sends(outputs, Void)] == [C]
    assert [hop.peer for hop in hops_of(outputs, route.microbatch)] == [A, D]


def test_where_no_end_has_another_replica_the_hop_stays() -> None:
    swarm = begun({A: 0, C: 1})
    route = through(swarm, A, C)
    assert unreached(swarm, A, route, C) == []


def test_a_link_that_failed_long_ago_is_tried_again() -> None:
    swarm = begun()
    route = through(swarm, A, C)
    accumulated(swarm, route, A)
    moved = hops_of(unreached(swarm, C, route, A), route.microbatch)
    swarm.now_s += LINK_AVOIDED_S + 1.0
    outputs = swarm.hear(D, Undelivered(route.microbatch, 0, A, moved[0].attempt, "no answer"))
    assert not sends(outputs, Void)
    assert [hop.peer for hop in hops_of(outputs, route.microbatch)] == [A, C]


def test_what_is_said_of_a_hop_that_has_moved_since_changes_nothing() -> None:
    swarm = begun()
    route = through(swarm, A, C)
    unreached(swarm, A, route, C)
    assert unreached(swarm, A, route, C) == [], "c is not on the route any more"
    assert unreached(swarm, C, route, A) == [], "nor does it matter what c cannot reach"


@pytest.mark.parametrize(
    ("overlap", "steps", "to_feed"),
    [(0, 2, 3), (1, 2, 4), (4, 2, 7), (4, 1, 3)],
    ids=["none", "part", "all", "last step"],
)
def test_what_can_be_fed_before_the_next_commit_is_counted(overlap: int, steps: int, to_feed: int) -> None:
    """Of four microbatches of a step one is in flight; those that overlap belong to the next step."""
    swarm = Swarm.loaded(max_in_flight=1, overlap=overlap, steps=steps)
    assert swarm.brain._parts.dispatch._to_feed() == to_feed


ROOM = 100


def window_of(*rooms: int, overlap: int = 4, max_in_flight: int | None = None) -> FlightWindow:
    """Two stages of one replica for each of `rooms`; a microbatch takes 0.1 s at each."""
    made = Swarm({A: 0, C: 1}, microbatches=32, overlap=overlap, max_in_flight=max_in_flight)
    state = BrainState.of(made.brain.settings, PLAIN)
    for stage in range(2):
        for number, room in enumerate(rooms):
            name = PeerId(f"{stage}-{number}")
            state.pool.add(ReplicaRecord(name, 1, "", stage, room=room))
    window = FlightWindow(state)
    window.open()
    return window


def flies(window: FlightWindow, index: int, travel_s: float, *, wait_s: float = 0.0, step: int = 0) -> None:
    window.fed(step, index, 10.0)
    for stage in (1, 0):
        done = Accumulated(Microbatch(0, step, index), stage, 1, True, 0.0, 0.04, 0.06, wait_s)
        window.accumulated(done, 10.0 + travel_s + 0.2 + 2 * wait_s)


def test_at_first_there_are_two_for_each_stage_and_replica() -> None:
    assert window_of(ROOM).most == 4
    assert window_of(ROOM, ROOM).most == 8


def test_between_near_machines_it_stays_so() -> None:
    window = window_of(ROOM)
    flies(window, 0, travel_s=0.09)
    assert window.most == 4


@pytest.mark.parametrize(("replicas", "expected"), [(1, 7), (2, 14)])
def test_far_links_are_filled(replicas: int, expected: int) -> None:
    window = window_of(*[ROOM] * replicas)
    flies(window, 0, travel_s=0.35)
    assert window.most == expected, "0.55 s for a microbatch, 0.1 s at the busiest stage, one more for each stage"


def test_waiting_and_busy_links_widen_nothing() -> None:
    window = window_of(ROOM)
    flies(window, 0, travel_s=0.35, wait_s=3.0)
    flies(window, 1, travel_s=5.0)
    assert window.most == 7, "waiting for a device is not travel, and the least travel counts"


def test_what_was_measured_long_ago_is_forgotten() -> None:
    window = window_of(ROOM)
    for index in range(1 + NEWEST):
        flies(window, index, travel_s=0.0 if index == 0 else 0.39)
    assert window.most == 7


def test_it_is_no_wider_than_memory_a_step_and_what_was_asked_for() -> None:
    for window, expected in (
        (window_of(6), 6),
        (window_of(0), 4),
        (window_of(ROOM), 36),
        (window_of(ROOM, max_in_flight=3), 3),
    ):
        flies(window, 0, travel_s=60.0)
        assert window.most == expected


def test_the_memory_of_those_who_get_no_work_holds_nothing() -> None:
    """Once it counted for as long as no other replica joined, so a survivor was given what two could hold."""
    made = Swarm({A: 0, B: 0, C: 1}, microbatches=32, overlap=0)
    state = BrainState.of(made.brain.settings, PLAIN)
    for name, stage in ((A, 0), (B, 0), (C, 1)):
        state.pool.add(ReplicaRecord(name, 1, "", stage, room=12 if stage == 0 else ROOM))
    window = FlightWindow(state)
    window.open()
    flies(window, 0, travel_s=60.0)
    assert window.most == 24
    state.pool[B].trust = Trust.SUSPECT
    window.changed()
    assert window.most == 12
    state.pool[B].trust = Trust.TRUSTED
    window.changed()
    assert window.most == 24
    state.pool.remove(B)
    window.changed()
    assert window.most == 12


def test_it_follows_who_gets_work() -> None:
    made = Swarm({A: 0, B: 0, C: 1}, microbatches=32, overlap=0, recover=True)
    dispatch, pool = made.brain._parts.dispatch, made.brain._state.pool
    for peer in pool:
        pool[peer].replica = replace(pool[peer].replica, room=12)
    dispatch.open_window()
    flies(dispatch._window, 0, travel_s=60.0)
    assert dispatch._window.most == 12, "the one replica of stage 1 holds no more"
    made.tell(PeerSuspect(C, "it is silent"))
    assert dispatch._window.most == 8
    made.brain._parts.reattach.trust(C)
    assert dispatch._window.most == 12
    pool.remove(C)
    dispatch.remove(C, 1)
    assert dispatch._window.most == 8


@pytest.mark.parametrize(("room", "expected"), [(4, 4), (7, 7), (ROOM, 12), (0, 12)])
def test_the_stage_with_the_fewest_replicas_bounds_what_there_is_before_anything_is_measured(
    room: int, expected: int
) -> None:
    """Three replicas of the first stage were given twelve at once, of which the one of the last could hold four."""
    state = BrainState.of(Swarm({A: 0, C: 1}, microbatches=32, overlap=0).brain.settings, PLAIN)
    for name, stage in (("0-0", 0), ("0-1", 0), ("0-2", 0), ("1-0", 1)):
        state.pool.add(ReplicaRecord(PeerId(name), 1, "", stage, room=room))
    window = FlightWindow(state)
    window.open()
    assert window.most == expected


@pytest.mark.parametrize("work_s", [5e-324, 1e-310, 0.0])
def test_times_that_no_device_takes_widen_nothing(work_s: float) -> None:
    """A stage server that claimed the least number above 0 once ended the job with an OverflowError."""
    window = window_of(ROOM)
    for index in range(3):
        window.fed(0, index, 10.0)
        for stage in (1, 0):
            done = Accumulated(Microbatch(0, 0, index), stage, 1, True, 0.0, 0.0 if index else work_s, 0.0, 0.0)
            window.accumulated(done, 11.0)
        assert window.most == 4


def test_what_was_done_again_or_closed_counts_for_nothing() -> None:
    window = window_of(ROOM)
    window.fed(0, 0, 10.0)
    window.disturbed(0, 0)
    window.fed(0, 1, 10.0)
    window.close(0)
    for index in range(2):
        for stage in range(2):
            window.accumulated(Accumulated(Microbatch(0, 0, index), stage, 1, True, 0.0, 0.1, 0.1, 0.0), 100.0)
    assert window.most == 4
