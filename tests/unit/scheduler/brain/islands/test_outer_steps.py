"""scheduler.brain.islands.outer_steps: the exchange under way."""

from __future__ import annotations

from dataclasses import replace

from scheduler.brain.inputs import Tick
from swarm.wire.messages import Exchange
from tests.simulation.engine.islands import Shape, World


def test_while_rounds_run_nobody_looks_who_could_go_and_for_how_many_tokens() -> None:
    """Each input did, of each step since the last exchange: that took ten times as long as all else with 500 steps."""
    world = World(Shape(steps=6, lease=3), 0)
    looked, tokens_of = list[int](), world.brain.settings.tokens_of
    for one in world.brain._roster.islands:
        one.settings = replace(one.settings, tokens_of=lambda portion: looked.append(portion) or tokens_of(portion))
    while not any(isinstance(one, Exchange) for replica in world.replicas.values() for one in replica.commands):
        world.turn()
    assert sorted(set(looked)) == [0, 1, 2, 3, 4, 5]
    looked.clear()
    world.tell(Tick())
    assert looked == []
