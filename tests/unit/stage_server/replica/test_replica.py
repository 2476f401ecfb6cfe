"""What a replica makes of repeated, early and late commands, of a new session, and of a neighbour that says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch

from stage_server.ports import Assignment, ReplicaId
from stage_server.replica.replica import REPAIR_S, Replica
from stage_server.state.loading import build_stage
from swarm.errors import StaleMessage
from swarm.job.partition import resolve
from swarm.job.spec import parse_job
from swarm.messages import (
    Accumulated,
    Average,
    Averaged,
    Commit,
    Committed,
    Event,
    Failed,
    LoadStage,
    Member,
    Route,
    UnitRound,
)
from swarm.peer_messages import Need, StateRequest, TensorHeader
from swarm.types import Direction, Hop, JobId, Microbatch, PeerId, Round, UnitName, set_digest
from tests.support.devices import InlineDevice
from tests.support.ports import ports_of
from tests.support.sim import loop as sim
from tests.support.sim.network import SimNetwork

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


def play(stages: int, act: Callable[[Scene], Awaitable[None]]) -> None:
    config = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    values = {
        "name": "t",
        "model": {"config": config, "dtype": "float32"},
        "data": {"source": "x", "sequence_length": 16},
        "training": {"global_batch_sequences": 4, "microbatch_sequences": 2},
        "pipeline": {"stages": stages, "staleness": 0, "compression": "none"},
    }
    spec = resolve(parse_job(values), vocabulary_size=257, stages_if_auto=1)
    split = spec.pipeline.split
    assert split != "auto"

    async def main() -> None:
        network, events, neighbour = SimNetwork(Random(0)), list[Event](), Neighbour()
        network.add_receiver("at before", neighbour)
        async with asyncio.TaskGroup() as tasks:
            command = LoadStage(JOB, 0, stages - 1, split, 0, spec.model_dump_json())
            assignment = Assignment(command, spec, ReplicaId(JOB, ME, 1, stages - 1))
            ports = ports_of(InlineDevice(lambda: 0.01), network.peer_links("at me"), events.append, tasks)
            stage, loaded = await build_stage(assignment, ports)
            units = tuple((one.unit, one.elements) for one in loaded.units)
            scene = Scene(Replica(assignment, stage, loaded, ports), events, neighbour, units)
            await act(scene)
            await ports.work.close()
            await network.close()

    sim.run(main(), seed=1, limit_s=60.0)


def route(index: int = 0, attempt: int = 1) -> Route:
    ids = torch.arange(32, dtype=torch.int32).numpy().tobytes()
    return Route(Microbatch(0, 0, index), 0, (Hop(ME, 1, attempt, "at me"),), ids, ids)


def average(scene: Scene, number: int = 1, *, indexes: tuple[int, ...] = (0, 1), step: int = 0) -> Average:
    ((unit, elements),) = scene.units
    member = Member(ME, 1, "at me", 0, elements, set_digest(indexes))
    return Average(0, step, unit, Round(1, number), (member,), 64, 3.0)


def commit(scene: Scene, number: int = 1, *, step: int = 0) -> Commit:
    ((unit, _),) = scene.units
    return Commit(0, step, step + 1, (UnitRound(unit, Round(1, number)),), 1e-3, 1.0, False)


async def averaged(scene: Scene) -> None:
    for index in (0, 1):
        await scene.replica.handle(route(index))
    await asyncio.sleep(1.0)
    assert len(scene.heard(Accumulated)) == 2
    await scene.replica.handle(average(scene))
    await asyncio.sleep(1.0)
    assert len(scene.heard(Averaged)) == 1


def test_commits_are_applied_once_and_in_order() -> None:
    async def act(scene: Scene) -> None:
        await averaged(scene)
        await scene.replica.handle(commit(scene, step=1))
        assert scene.replica.cells.version == 0, "the one before it was lost, and both come again"
        for _ in range(3):
            await scene.replica.handle(commit(scene))
        assert scene.replica.cells.version == 1
        assert [event.version for event in scene.heard(Committed)] == [1]  # type: ignore[union-attr]
        assert scene.heard(Failed) == []

    play(1, act)


def test_a_replica_that_does_not_hold_the_round_of_a_commit_says_that_it_cannot_follow() -> None:
    async def act(scene: Scene) -> None:
        await averaged(scene)
        await scene.replica.handle(commit(scene, number=2))
        assert scene.replica.cells.version == 0
        assert len(scene.heard(Failed)) == 1

    play(1, act)


def test_state_is_given_to_those_who_ask_for_what_is_served_here() -> None:
    async def act(scene: Scene) -> None:
        request = StateRequest(JOB, 0, 0, "state", 0, 0, 0, PeerId("joiner"), 1)
        reply, payload = await scene.replica.donor.give(request)
        assert (reply.version, reply.total_bytes) == (0, len(payload))
        for change in ({"job": JobId("other")}, {"timeline": 1}, {"stage": 1}):
            with pytest.raises(StaleMessage, match="this replica serves stage 0 of job job, timeline 0"):
                await scene.replica.donor.give(replace(request, **change))

    play(1, act)


def test_with_a_new_session_a_sealed_step_accumulates_again() -> None:
    async def act(scene: Scene) -> None:
        await scene.replica.handle(route(0))
        await asyncio.sleep(1.0)
        await scene.replica.handle(average(scene, indexes=(0,)))
        await scene.replica.handle(route(1))
        await asyncio.sleep(1.0)
        assert len(scene.heard(Accumulated)) == 1
        scene.replica.attach()
        await asyncio.sleep(1.0)
        assert len(scene.heard(Accumulated)) == 2
        assert scene.replica.cells.accumulated(0) == {0, 1}

    play(1, act)


def test_a_neighbour_that_says_nothing_is_asked() -> None:
    async def act(scene: Scene) -> None:
        before = Hop(PeerId("before"), 1, 1, "at before")
        one = route()
        await scene.replica.handle(replace(one, hops=(before, *one.hops)))
        await asyncio.sleep(REPAIR_S - 0.1)
        assert scene.neighbour.headers == []
        await asyncio.sleep(REPAIR_S + 1.0)
        (asked,) = scene.neighbour.headers
        assert isinstance(asked, Need)
        assert (asked.direction, asked.stage) == (Direction.FORWARD, 0)

    play(2, act)
