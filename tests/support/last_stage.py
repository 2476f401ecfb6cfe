"""A replica of the last stage of a small job, in virtual time, with somebody before it who says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from stage_server.replica.replica import Replica
from stage_server.state.loading import build_stage
from swarm.types import Hop, JobId, Microbatch, PeerId, UnitName
from swarm.wire.messages import Event, Route, TensorHeader
from tests.support.acts import Played, played
from tests.support.devices import InlineDevice
from tests.support.ports import assignment_of, ports_of
from tests.support.sim import loop as sim
from tests.support.sim.network import SimNetwork
from tests.support.specs import tiny_spec

JOB = JobId("job")
ME = PeerId("me")


@dataclass
class Neighbour:
    """Takes whatever comes and says nothing."""

    headers: list[TensorHeader] = field(default_factory=list)

    def admit(self, header: TensorHeader) -> None:
        self.headers.append(header)

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        pass


@dataclass
class Scene:
    """A replica of the last stage, what it told, and the replica before it."""

    replica: Replica
    events: list[Event]
    neighbour: Neighbour
    units: tuple[tuple[UnitName, int], ...]

    def heard(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def play(
    stages: int, act: Callable[[Scene], Awaitable[None]], *, overlap: int = 0, trust: dict[str, float] | None = None
) -> None:
    """`overlap` of the two microbatches of a step are late; `trust` is that section of the job file."""
    spec = tiny_spec(
        stages,
        training={"reproducible": bool(trust)},
        pipeline={"overlap": overlap, "compression": "none"},
        trust=trust or {},
    )

    async def main() -> None:
        network, events, neighbour = SimNetwork(Random(0)), list[Event](), Neighbour()
        network.add_receiver("at before", neighbour)
        async with asyncio.TaskGroup() as tasks:
            assignment = assignment_of(spec, stages - 1)
            ports = ports_of(InlineDevice(lambda: 0.01), network.peer_links("at me"), events.append, tasks)
            stage, loaded = await build_stage(assignment, ports)
            units = tuple((unit.unit, unit.elements) for unit in loaded.units)
            scene = Scene(Replica(assignment, stage, loaded, ports), events, neighbour, units)
            await act(scene)
            await ports.work.close()
            await network.close()

    sim.run(main(), seed=1, limit_s=60.0)


def route(index: int = 0, attempt: int = 1) -> Route:
    ids = torch.arange(32, dtype=torch.int32).numpy().tobytes()
    return Route(Microbatch(0, 0, index), 0, (Hop(ME, 1, attempt, "at me"),), ids, ids)


def served(stages: int = 1, **sections: Any) -> Played:
    """A test of a Scene."""
    return played(lambda act: play(stages, act, **sections))
