"""Which ready computation runs next on the device."""

from __future__ import annotations

from stage_server.cell import Compute
from swarm.types import Microbatch


class Intake:
    """Ready computations in the order in which the device should take them.

    Backward before forward (it frees memory and feeds the stage before us), older step first, lower index first.
    """

    def __init__(self, limit: int = 4096) -> None: ...

    def put(self, work: Compute) -> bool:
        """Add an order; False if the intake is full."""
        raise NotImplementedError

    def take(self) -> Compute | None:
        """The next order; None if there is none."""
        raise NotImplementedError

    def discard(self, microbatch: Microbatch) -> int:
        """Remove the orders of a microbatch; gives how many."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError
