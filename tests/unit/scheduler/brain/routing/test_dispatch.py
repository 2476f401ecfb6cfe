"""What a delivery that failed makes of the hops at its ends: moved, void, or left alone. What there is to feed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.brain.inputs import PeerSuspect, ReplicaRecord
from scheduler.brain.routing.dispatch import NEWEST, FlightWindow
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.pool import Trust
from swarm.job.course import PLAIN
from swarm.types import Microbatch, PeerId
from swarm.wire.messages import Accumulated
from tests.support.brain import A, B, C, Player, Swarm
from tests.support.situations import Calls, Situation, beside


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
    state = BrainState(made.brain.settings, PLAIN)
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


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_microbatches_are_given_as_the_text_says(situation: Situation) -> None:
    of_window = Calls(None, window=window_of, flies=flies)
    situation.check(Player().play if "> job" in situation.text else of_window.play)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    window = window_of(ROOM)
    for index in range(1 + NEWEST):
        flies(window, index, travel_s=0.0 if index == 0 else 0.39)
    assert window.most == 7


def test_the_memory_of_those_who_get_no_work_holds_nothing() -> None:
    """Once it counted for as long as no other replica joined, so a survivor was given what two could hold."""
    made = Swarm({A: 0, B: 0, C: 1}, microbatches=32, overlap=0)
    state = BrainState(made.brain.settings, PLAIN)
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
    state = BrainState(Swarm({A: 0, C: 1}, microbatches=32, overlap=0).brain.settings, PLAIN)
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
