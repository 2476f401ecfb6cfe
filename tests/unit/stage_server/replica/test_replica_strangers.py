"""What strangers at a stage server's port can do to training: nothing that a true neighbour's tensor does not mend.

The attacks know the job, the timeline, the step, the stage, the shape and the names of all peers. They do not know the
incarnation of the neighbour, which is a number of 64 bits that only the scheduler tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch

from stage_server.brain.neighbours import EARLY_BYTES_MAX, EARLY_MAX
from swarm.errors import RetryElsewhere, StaleMessage
from swarm.types import Direction, Hop, Microbatch, PeerId
from swarm.wire.messages import Accumulated, Boundary, Route
from tests.support.last_stage import JOB, ME, Scene, play, route

TRUE = Hop(PeerId("before"), 12345, 1, "at before")
SHAPE = (2, 16, 24)


def boundary(sender: Hop, index: int = 0, step: int = 0) -> Boundary:
    at = Microbatch(0, step, index)
    return Boundary(
        JOB, at, Direction.FORWARD, 1, sender.attempt, sender.peer, sender.incarnation, "float32", SHAPE, "none", 3072
    )


def tensor(value: float) -> memoryview:
    return memoryview(torch.full(SHAPE, value).numpy()).cast("B")


def routed(index: int = 0) -> Route:
    one = route(index)
    return replace(one, hops=(TRUE, *one.hops))


async def deliver(scene: Scene, header: Boundary, value: float) -> None:
    """As a stage server takes a tensor from the wire."""
    scene.replica.admission.check(header)
    await scene.replica.receive(header, tensor(value))


LIARS = [
    replace(TRUE, peer=PeerId("x"), attempt=1 << 31),
    replace(TRUE, incarnation=1, attempt=1 << 31),
    replace(TRUE, incarnation=1),
    replace(TRUE, peer=ME, incarnation=1),
]


def loss_after(attack: Callable[[Scene], Awaitable[None]]) -> float:
    """The loss of a microbatch whose true input is delivered after the attack."""
    losses = []

    async def act(scene: Scene) -> None:
        await attack(scene)
        await deliver(scene, boundary(TRUE), 0.5)
        await asyncio.sleep(1.0)
        (told,) = scene.heard(Accumulated)
        assert isinstance(told, Accumulated)
        losses.append(told.loss)

    play(2, act)
    return losses[0]


async def nothing(scene: Scene) -> None:
    await scene.replica.handle(routed())


@pytest.mark.parametrize("liar", LIARS, ids=["another peer", "any attempt", "another incarnation", "we ourselves"])
@pytest.mark.parametrize("late", [False, True], ids=["before the route", "after the route"])
def test_a_false_input_neither_enters_the_computation_nor_hides_the_true_one(liar: Hop, late: bool) -> None:
    async def attack(scene: Scene) -> None:
        if late:
            await scene.replica.handle(routed())
        if late and liar.attempt == TRUE.attempt:
            with pytest.raises(StaleMessage):
                await deliver(scene, boundary(liar), 1e9)
        else:
            await deliver(scene, boundary(liar), 1e9)
        if not late:
            await scene.replica.handle(routed())
        await asyncio.sleep(1.0)
        assert scene.heard(Accumulated) == [], "nothing was computed from it"

    assert loss_after(attack) == loss_after(nothing)


def test_an_input_that_was_admitted_before_its_route_is_judged_again_when_it_is_whole() -> None:
    async def attack(scene: Scene) -> None:
        header = boundary(replace(TRUE, incarnation=1))
        scene.replica.admission.check(header)
        await scene.replica.handle(routed())
        with pytest.raises(StaleMessage):
            await scene.replica.receive(header, tensor(1e9))

    assert loss_after(attack) == loss_after(nothing)


def test_the_true_input_may_come_before_its_route() -> None:
    async def act(scene: Scene) -> None:
        await deliver(scene, boundary(TRUE), 0.5)
        assert scene.heard(Accumulated) == []
        await scene.replica.handle(routed())
        await asyncio.sleep(1.0)
        assert len(scene.heard(Accumulated)) == 1

    play(2, act)


@pytest.mark.parametrize("bytes_max", [EARLY_BYTES_MAX, 64 << 10])
def test_after_a_flood_of_early_inputs_the_true_ones_are_taken_and_little_is_held(
    bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4096 early cells times three steps times a boundary tensor were kept: more than a machine has."""

    monkeypatch.setattr("stage_server.brain.neighbours.EARLY_BYTES_MAX", bytes_max)

    async def attack(scene: Scene) -> None:
        refused = 0
        for number in range(EARLY_MAX + EARLY_MAX // 4):
            flood = Hop(PeerId(f"x{number % 7}"), number, 1 + number, "")
            try:
                await deliver(scene, boundary(flood, number % 4096, number % 2), 1e9)
            except RetryElsewhere:
                refused += 1
        with pytest.raises(StaleMessage, match="not open here"):
            await deliver(scene, boundary(TRUE, step=1 << 60), 1e9)
        held = scene.replica.early
        assert refused
        assert len(held) <= EARLY_MAX
        assert held.size_bytes <= bytes_max
        await scene.replica.handle(routed())

    assert loss_after(attack) == loss_after(nothing)
