"""Members hear of their round before the step is full, and of its end at the first surprise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.types import PeerId, set_digest
from swarm.wire.messages import AbortRound, Average, Route
from tests.support.brain import A, B, C, D, Player, Swarm, sends
from tests.support.situations import Situation, beside


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_the_brain_decides_what_the_text_says(situation: Situation) -> None:
    situation.check(Player().play)


def test_members_are_told_what_they_will_hold_and_once_more_when_the_step_is_full() -> None:
    swarm = Swarm.loaded()
    told = {peer: command for peer, command in sent(swarm) if command.ahead}
    assert set(told) == {A, B, C, D} == {peer for peer, _ in sent(swarm)}
    given: dict[PeerId, set[int]] = {peer: set() for peer in told}
    for peer, route in swarm.pop(Route):
        given[peer].add(route.microbatch.index)
        swarm.obey(peer, route)
    for command in told.values():
        assert all(member.digest == set_digest(given[member.peer]) for member in command.members)
    again = {peer: command for peer, command in sent(swarm) if not command.ahead}
    assert again == {peer: replace(command, ahead=False) for peer, command in told.items()}
    assert sends(swarm.outputs, AbortRound) == []


def sent(swarm: Swarm) -> list[tuple[PeerId, Average]]:
    """All averages that were asked for."""
    return [(send.peer, send.command) for send in sends(swarm.outputs, Average) if isinstance(send.command, Average)]
