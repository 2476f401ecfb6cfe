"""The claim: whatever one replica of an island names that does not exist, the job of all islands ends well."""

from __future__ import annotations

import pytest

from scheduler.brain.events import NONSENSE_MAX
from scheduler.brain.inputs import Happened
from swarm.wire.messages import Exchange, Route
from tests.simulation.engine.islands import Shape, World, faults
from tests.support.effort import others
from tests.support.nonsense import NONSENSE

SHAPE = Shape(islands=2, replicas=3, steps=2)

MOMENTS = ("loading", "training", "exchanging")


def at(moment: str, world: World) -> None:
    """Bring a job to a moment of its life."""
    kind = {"training": Route, "exchanging": Exchange}.get(moment)
    while kind is not None and not any(
        isinstance(command, kind) for own in world.replicas.values() for command in own.commands
    ):
        world.turn()
    assert not world.over


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_with_islands_outlives_whatever_one_replica_names(moment: str) -> None:
    """In `make test` each piece of nonsense is named at one of the moments, in `make test-all` at each."""
    size = NONSENSE_MAX - 1
    for number, begin in enumerate(range(0, len(NONSENSE), size)):
        if MOMENTS[number % len(MOMENTS)] not in (moment, *others(*MOMENTS)):
            continue
        world = World(SHAPE, number)
        at(moment, world)
        # An envoy, where there is one: it has most to say.
        busy = [peer for peer, one in world.replicas.items() if any(isinstance(c, Exchange) for c in one.commands)]
        peer = sorted(busy or world.replicas)[number % len(busy or world.replicas)]
        for event in NONSENSE[begin : begin + size]:
            world.tell(Happened(peer, event))
        while not world.over:
            world.turn()
        assert faults(world.history, SHAPE) == [], f"{moment}, {number}"
