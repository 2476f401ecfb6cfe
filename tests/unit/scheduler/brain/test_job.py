"""One job's decisions: an event in, outputs out. The situations stand in the text beside this file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.brain.inputs import Join, PeerBack, PeerGone, PeerSuspect, ReplicaRecord
from scheduler.brain.routing.policies import POLICIES
from swarm.types import PeerId, Routing
from swarm.wire.messages import AbortRound, Accumulated, Admit, Average, Commit, Loaded, LoadStage, Route
from tests.support.brain import A, B, C, D, Player, Swarm, sends
from tests.support.situations import Situation, beside


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_the_brain_decides_what_the_text_says(situation: Situation) -> None:
    situation.check(Player().play)


def test_a_decided_step_is_done_again_if_all_of_a_stage_are_lost_who_hold_its_average() -> None:
    swarm = Swarm.loaded(overlap=4, steps=3, max_in_flight=100, recover=True)
    swarm.answer(Route)
    for peer, command in [pair for pair in swarm.pop(Average) if pair[1].step == 1]:
        swarm.obey(peer, command)
    assert swarm.rows == [], "step 0 has not been averaged"
    new = PeerId("new")
    swarm.stage_of[new] = 0
    swarm.tell(Join(ReplicaRecord(new, 1, "at new", 0)), 2.0)
    ((_, load),) = swarm.pop(LoadStage)
    loaded = swarm.reply(new, load)
    assert isinstance(loaded, Loaded)
    swarm.hear(new, replace(loaded, join=load.join))
    assert [send.peer for send in sends(swarm.outputs, Admit)] == [new]
    swarm.tell(PeerGone(A, "killed"), 2.0)
    assert swarm.brain.counts().reroutes == {(0, "gone"): 2}, "B holds the average of step 1"
    outputs = swarm.tell(PeerGone(B, "killed"), 2.0)
    aborted = {
        (send.peer, send.command.step) for send in sends(outputs, AbortRound) if isinstance(send.command, AbortRound)
    }
    assert {(C, 1), (D, 1)} <= aborted
    while swarm.brain.mode.value != "saving":
        swarm.answer(Route)
        swarm.answer(Average)
        if len(swarm.rows) > swarm.brain.counts().committed_steps:
            swarm.write()
        swarm.answer(Commit)
    assert [row.step for row in swarm.rows] == [0, 1, 2]


@pytest.mark.parametrize("routing", POLICIES)
def test_no_wiring_gives_work_to_a_suspect_until_it_is_heard_again(routing: Routing) -> None:
    swarm = Swarm.loaded(recover=True, steps=1, microbatches=24, max_in_flight=4, routing=routing)
    swarm.tell(PeerSuspect(A, "silent"), 2.0)
    swarm.tell(PeerBack(C), 2.0)  # was no suspect
    swarm.pop(Route, peer=A)
    for _ in range(3):
        swarm.answer(Route)
        assert swarm.brain.outstanding(A) == 0
    swarm.tell(PeerBack(A), 3.0)
    given = 0
    while swarm.brain.counts().in_flight:
        given += len([route for peer, route in swarm.inbox if peer == A and isinstance(route, Route)])
        swarm.answer(Route)
    assert given > 0
    swarm.answer(Average)
    assert len(swarm.rows) == 1


def test_replicas_not_yet_measured_are_not_flooded_once_their_stage_is() -> None:
    swarm = Swarm.loaded({A: 0, B: 0, C: 0}, microbatches=60, max_in_flight=6)
    given = {A: 0, B: 0, C: 0}
    for _ in range(60):  # c never answers, and must not be believed to be a hundred times as fast as the others
        for peer, route in swarm.pop(Route):
            given[peer] += 1
            if peer != C:
                attempt = route.hops[0].attempt
                swarm.hear(peer, Accumulated(route.microbatch, 0, attempt, True, 0.0, 10.0, 0.0, 0.0))
    assert given[C] <= 3
    assert given[A] + given[B] == 60 - given[C]
