"""Members hear of their round before the step is full, and of its end at the first surprise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.brain.inputs import PeerGone
from scheduler.brain.outputs import Output, Send
from swarm.types import PeerId, set_digest
from swarm.wire.messages import AbortRound, Average, Averaged, RoundFailed, Route, Void
from tests.support.brain import S0, S1, A, B, C, D, Swarm, sends
from tests.support.stories import J, a_peer_joins


def averages(outputs: list[Output], *, ahead: bool) -> dict[PeerId, Average]:
    sent = [(one.peer, one.command) for one in sends(outputs, Average)]
    return {peer: command for peer, command in sent if isinstance(command, Average) and command.ahead is ahead}


def fed(**changes: Any) -> Swarm:
    """All microbatches of the first step are given away, and none is computed."""
    return Swarm.loaded(**changes)


def almost_full(swarm: Swarm) -> tuple[PeerId, Route]:
    """All but one of the microbatches are computed: which one, and by whom."""
    *done, last = [(peer, route) for peer, route in swarm.pop(Route) if swarm.reply(peer, route) is not None]
    for peer, route in done:
        swarm.obey(peer, route)
    return last


def test_members_are_told_what_they_will_hold_and_once_more_when_the_step_is_full() -> None:
    swarm = fed()
    told = averages(swarm.outputs, ahead=True)
    assert set(told) == {A, B, C, D}
    assert averages(swarm.outputs, ahead=False) == {}
    given: dict[PeerId, set[int]] = {peer: set() for peer in told}
    for peer, route in swarm.pop(Route):
        given[peer].add(route.microbatch.index)
        swarm.obey(peer, route)
    for command in told.values():
        assert {m.peer: m.digest for m in command.members} == {
            m.peer: set_digest(given[m.peer]) for m in command.members
        }
    again = averages(swarm.outputs, ahead=False)
    assert again == {peer: replace(command, ahead=False) for peer, command in told.items()}
    swarm.answer(Average)
    assert len(swarm.rows) == 1
    assert sends(swarm.outputs, AbortRound) == []


def test_an_average_that_came_before_the_step_was_full_counts() -> None:
    swarm = fed()
    told = averages(swarm.outputs, ahead=True)
    peer, route = almost_full(swarm)
    early = [one for one in told if one != peer]
    for one in early:
        swarm.obey(one, told[one])
    assert swarm.rows == []
    outputs = swarm.obey(peer, route)
    assert set(averages(outputs, ahead=False)) == {peer}, "the others have reported"
    assert swarm.rows == []
    swarm.answer(Average)
    assert len(swarm.rows) == 1


def test_early_averages_that_differ_are_found_when_the_step_is_full() -> None:
    swarm = fed(recover=True)
    told = averages(swarm.outputs, ahead=True)
    peer, route = almost_full(swarm)
    pair = {C, D} if peer in (A, B) else {A, B}
    for number, one in enumerate(sorted(pair)):
        swarm.obey(one, told[one], digest=f"mean {number}")
    outputs = swarm.obey(peer, route)
    assert {one.peer for one in sends(outputs, AbortRound)} == pair, "their unit is averaged again"
    assert swarm.rows == []


@pytest.mark.parametrize("surprise", ["gone", "not finite", "a failed round"])
def test_rounds_that_were_told_ahead_are_given_up_at_the_first_surprise(surprise: str) -> None:
    swarm = fed(recover=True)
    told = averages(swarm.outputs, ahead=True)
    peer, route = next((peer, route) for peer, route in swarm.inbox if peer == A and isinstance(route, Route))
    if surprise == "gone":
        outputs = swarm.tell(PeerGone(A, "killed"), 2.0)
    elif surprise == "not finite":
        outputs = swarm.obey(peer, route, finite=False)
    else:
        outputs = swarm.hear(A, RoundFailed(0, 0, told[A].unit, told[A].round, "no way to b", B))
    aborted = {
        (one.peer, one.command.round) for one in sends(outputs, AbortRound) if isinstance(one.command, AbortRound)
    }
    assert aborted == {(one, command.round) for one, command in told.items() if one != A or surprise != "gone"}
    swarm.obey(C, told[C])  # it comes too late, and counts for nothing
    if surprise == "not finite":
        swarm.pop(Route, peer=A)
        return
    swarm.answer(Route)
    full = averages(swarm.outputs, ahead=False)
    assert {command.round for command in full.values()}.isdisjoint({command.round for command in told.values()})
    swarm.answer(Average)
    assert len(swarm.rows) == 1


def test_the_full_step_is_averaged_by_those_who_are_there_then() -> None:
    swarm = a_peer_joins()
    told = averages(swarm.outputs, ahead=True)
    swarm.answer(Route)
    full = averages(swarm.outputs, ahead=False)
    assert {command.unit: [member.peer for member in command.members] for command in full.values()} == {
        S0: [A, J],
        S1: [C],
    }
    assert {command.round for command in full.values()}.isdisjoint({command.round for command in told.values()})


def test_the_next_step_is_told_ahead_too() -> None:
    swarm = fed()
    swarm.until_written()
    swarm.commit()
    steps = [
        one.command.step
        for one in sends(swarm.outputs, Average)
        if isinstance(one.command, Average) and one.command.ahead
    ]
    assert sorted(steps) == [0] * 4 + [1] * 4


def test_a_report_of_a_round_that_nobody_was_told_of_counts_for_nothing() -> None:
    swarm = fed()
    told = averages(swarm.outputs, ahead=True)
    event = swarm.reply(A, told[A])
    assert isinstance(event, Averaged)
    swarm.hear(A, replace(event, round=replace(event.round, number=99)))
    swarm.answer(Route)
    assert A in averages(swarm.outputs, ahead=False)


def test_a_round_that_was_told_ahead_is_given_up_before_a_member_is_told_to_drop_its_sums() -> None:
    swarm = fed(recover=True)
    parts = swarm.brain._parts
    parts.rounds.void(parts.state.progress.runs[0], A, "it is wrong", 2.0)
    sent = [one for one in parts.state.outbox.take() if isinstance(one, Send)]
    assert [type(one.command) for one in sent if one.peer == A] == [AbortRound, Void]
    assert {one.peer for one in sent} == {A, B, C, D}
