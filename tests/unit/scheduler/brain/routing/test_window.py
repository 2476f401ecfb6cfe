"""How many microbatches are in flight: enough for far links, no more than memory holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.brain.inputs import PeerSuspect, ReplicaRecord
from scheduler.brain.routing.window import NEWEST, Window
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.pool import Trust
from swarm.job.course import PLAIN
from swarm.types import Microbatch, PeerId
from swarm.wire.messages import Accumulated
from tests.support.brain import A, B, C, Swarm

ROOM = 100


def window_of(*rooms: int, overlap: int = 4, max_in_flight: int | None = None) -> Window:
    """Two stages of one replica for each of `rooms`; a microbatch takes 0.1 s at each."""
    made = Swarm({A: 0, C: 1}, microbatches=32, overlap=overlap, max_in_flight=max_in_flight)
    state = BrainState.of(made.brain.settings, PLAIN)
    for stage in range(2):
        for number, room in enumerate(rooms):
            name = PeerId(f"{stage}-{number}")
            state.pool.add(ReplicaRecord(name, 1, "", stage, room=room))
    window = Window(state)
    window.open()
    return window


def flies(window: Window, index: int, travel_s: float, *, wait_s: float = 0.0, step: int = 0) -> None:
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
    window = Window(state)
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
    window = Window(state)
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
