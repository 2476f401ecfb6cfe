"""The outputs that a replica holds until their step commits, so that they can be sent again to a neighbour.

They are bounded in bytes: the oldest go first. If a neighbour asks for one later, it is computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeAlias, TypeVar

from swarm.types import Direction, Microbatch

OutputKey: TypeAlias = tuple[Microbatch, Direction]


class HasSize(Protocol):
    @property
    def size_bytes(self) -> int: ...


Held = TypeVar("Held", bound=HasSize)


class HeldOutputs(Generic[Held]):
    """Outputs by microbatch and direction, at most `budget_bytes` of them but always the newest."""

    def __init__(self, budget_bytes: int) -> None:
        assert budget_bytes > 0
        self.budget_bytes = budget_bytes
        self.size_bytes = 0
        self._held: OrderedDict[OutputKey, Held] = OrderedDict()

    def put(self, key: OutputKey, output: Held) -> list[OutputKey]:
        """Hold an output. Returns the outputs that had to make room, oldest first."""
        self.drop(key)
        self._held[key] = output
        self.size_bytes += output.size_bytes
        evicted = []
        while self.size_bytes > self.budget_bytes and len(self._held) > 1:
            oldest = next(iter(self._held))
            self.drop(oldest)
            evicted.append(oldest)
        return evicted

    def get(self, key: OutputKey) -> Held | None:
        """The output, if it is held."""
        return self._held.get(key)

    def drop(self, key: OutputKey) -> None:
        dropped = self._held.pop(key, None)
        if dropped is not None:
            self.size_bytes -= dropped.size_bytes

    def __len__(self) -> int:
        return len(self._held)
