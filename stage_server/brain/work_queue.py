"""Orders ready computations for the device: by turn, then the older step, then the lower index.

    turn 0  backward, as it frees a graph and feeds the stages before this one
    turn 1  forward; behind all forwards of a step the weights that its backwards left, for which only its commit waits

Weights that `patience` later orders went before come next: a stage that never idles would leave them to the end of the
step, and the scheduler, which hears of a microbatch with its weights, would give it to another replica.

Where only some microbatches of a step are late (`pipeline.overlap`), the late ones come behind the others, in turns 2
and 3: they were fed before the commit that the others waited for, and the next commit waits for the way of those others
through all stages and back. The last stage does not tell them apart. A backward there is ready when its forward is
done, so taken first it leaves one graph at a time. The late forwards of the next step come behind the weights anyway.
"""

from __future__ import annotations

import heapq

from stage_server.brain.cell import Compute, Gradients
from swarm.types import Direction, Microbatch

ORDERS_MAX = 8192


class WorkQueue:
    """Orders that the device has not begun, at most one per microbatch: a newer one replaces the older."""

    def __init__(self, limit: int = ORDERS_MAX, *, late_behind: bool = False, patience: int = ORDERS_MAX) -> None:
        """`late_behind`: late microbatches come behind the others."""
        self._limit, self._late_behind, self._patience = limit, late_behind, patience
        self._taken = 0
        self._weights: dict[int, int] = {}  # by ticket, the oldest first: `_taken` when they were put
        self._orders: dict[Microbatch, Compute] = {}
        # (turn, step, whether it is the weights, index, ticket); may hold discarded ones
        self._heap: list[tuple[int, int, bool, int, int]] = []
        self._tickets: dict[int, Microbatch] = {}

    def put(self, work: Compute) -> bool:
        """Add an order; False (and nothing changes) if the queue is full."""
        if len(self._orders) >= self._limit and work.microbatch not in self._orders:
            return False
        self.discard(work.microbatch)
        self._orders[work.microbatch] = work
        self._tickets[work.ticket] = work.microbatch
        step, index, is_weights = work.microbatch.step, work.microbatch.index, work.part is Gradients.WEIGHTS
        heapq.heappush(self._heap, (self._turn(work), step, is_weights, index, work.ticket))
        if is_weights:
            self._weights[work.ticket] = self._taken
        return True

    def take(self) -> Compute | None:
        for ticket, taken in self._weights.items():
            if self._taken - taken >= self._patience:
                return self._next(ticket)
            break
        while self._heap:
            ticket = heapq.heappop(self._heap)[-1]
            if ticket in self._tickets:
                return self._next(ticket)
        return None

    def _next(self, ticket: int) -> Compute:
        self._taken += 1
        self._weights.pop(ticket, None)
        return self._orders.pop(self._tickets.pop(ticket))

    def discard(self, microbatch: Microbatch) -> bool:
        """Remove the order of a microbatch; gives whether there was one."""
        work = self._orders.pop(microbatch, None)
        if work is None:
            return False
        del self._tickets[work.ticket]
        self._weights.pop(work.ticket, None)
        if len(self._heap) > 2 * len(self._orders) + 64:  # discarded orders must not pile up
            self._heap = [entry for entry in self._heap if entry[-1] in self._tickets]
            heapq.heapify(self._heap)
        return True

    def _turn(self, work: Compute) -> int:
        is_late = self._late_behind and work.version < work.microbatch.step
        return (work.direction is Direction.FORWARD or work.part is Gradients.WEIGHTS) + 2 * is_late

    def __len__(self) -> int:
        return len(self._orders)

    def waiting(self, direction: Direction) -> int:
        return sum(1 for work in self._orders.values() if work.direction is direction)
