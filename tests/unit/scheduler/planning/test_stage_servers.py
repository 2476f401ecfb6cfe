"""A modelled stage server takes computations in the order in which a stage server does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from scheduler.planning.stage_servers import HopPart, ModelledServer, Turn
from stage_server.brain.cell import Compute, Gradients
from stage_server.brain.work_queue import WorkQueue
from swarm.types import Direction, Microbatch, PeerId

PARTS = {
    HopPart.FORWARD: (Direction.FORWARD, Gradients.ALL),
    HopPart.BACKWARD: (Direction.BACKWARD, Gradients.ALL),
    HopPart.WEIGHTS: (Direction.BACKWARD, Gradients.WEIGHTS),
}


class Still:
    """A world in which nothing ever ends: the device never takes a second order."""

    now_s = 0.0

    def later(self, seconds: float, act: Callable[..., None], *values: object) -> None: ...

    def draw_s(self, server: ModelledServer, part: HopPart) -> float:
        return 1.0

    def computed(self, turn: Turn, part: HopPart, seconds: float, wait_s: float) -> None: ...


@pytest.mark.parametrize("seed", range(20))
def test_orders_leave_in_the_order_of_a_stage_servers_queue(seed: int) -> None:
    rng, owed_max, late_behind = Random(seed), 1 + seed % 3, bool(seed % 2)
    queue = WorkQueue(late_behind=late_behind, patience=4 * owed_max)
    server = ModelledServer(PeerId("a"), Still(), 0.001)
    server.serve(1, late_behind=late_behind, owed_max=owed_max)
    busy = Turn(Microbatch(0, 0, 999), server, [], 1, False)
    server.put(busy, HopPart.FORWARD)  # it is on the device for good
    queue.put(Compute(busy.microbatch, Direction.FORWARD, 0, False, 0))
    queue.take()
    waiting: list[Microbatch] = []
    for ticket in range(1, 200):
        if waiting and rng.random() < 0.5:
            order, work = server.take(), queue.take()
            assert order is not None
            assert work is not None
            assert (order.turn.microbatch, *PARTS[order.part]) == (work.microbatch, work.direction, work.part)
            waiting.remove(work.microbatch)
            continue
        where = Microbatch(0, rng.randrange(3), ticket)
        is_late, part = rng.random() < 0.5, rng.choice(list(PARTS))
        server.put(Turn(where, server, [], 1, is_late), part)
        direction, gradients = PARTS[part]
        queue.put(Compute(where, direction, where.step - is_late, False, ticket, gradients))
        waiting.append(where)


def test_backwards_are_split_once_the_device_idles_for_a_fifth_of_a_step_and_up_to_the_bound_of_what_owes() -> None:
    world, begun = Still(), list[HopPart]()

    def draw_s(server: ModelledServer, part: HopPart) -> float:
        begun.append(part)
        return 1.0

    world.draw_s = draw_s  # type: ignore[method-assign]
    for busy_s, expected in ((8.1, [HopPart.BACKWARD] * 2), (7.9, [HopPart.INPUTS, HopPart.BACKWARD])):
        server = ModelledServer(PeerId("a"), world, 0.0)
        server.serve(1, ahead=True, owed_max=1)
        server.busy_s, world.now_s = busy_s, world.now_s + 10.0
        server.committed()
        begun.clear()
        for index in range(2):
            server.put(Turn(Microbatch(0, 0, index), server, [], 1, False), HopPart.BACKWARD)
        assert begun == expected
