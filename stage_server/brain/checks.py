"""Checks: microbatches that this replica computes again for comparison, and outputs that it lends to other checkers.

    Check ──▶ wanted ──x and g are here, weights held──▶ ready ──computed──▶ Checked to the scheduler
                 ▲
                 └── the hops before and behind send what they hold; an input that does not come is asked for

A check stands beside the cells (cell.py): it adds nothing to a sum and sends nothing on. A newer check of a microbatch
replaces the older one. A route that names this replica ends the check: later inputs are for the cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.messages import Check
from swarm.types import Direction, Hop, Microbatch, PeerId

CHECKS_MAX = 4096  # that wait at one replica


@dataclass(slots=True)
class _Entry:
    """A check that waits for its inputs."""

    command: Check
    lacks: dict[Direction, Hop]  # inputs that are not here, and who has them
    is_old: bool = False  # it was here at the last look


@dataclass(frozen=True, slots=True)
class Wanted:
    """An input that a check lacks: FORWARD x, BACKWARD g."""

    command: Check
    direction: Direction
    of: Hop


@dataclass(slots=True)
class CheckTable:
    """The checks of one replica of `stage`."""

    stage: int
    _entries: dict[Microbatch, _Entry] = field(default_factory=dict)
    _lent: dict[tuple[Microbatch, Direction], Hop] = field(default_factory=dict)  # our outputs, and the newest checker

    def __len__(self) -> int:
        return len(self._entries)

    # Checking ----------------------------------------------------------------------------------------------------

    def take(self, command: Check) -> bool:
        """Take a check on; False if a newer one of the microbatch is here, or there are too many."""
        before = self._entries.get(command.microbatch)
        is_full = before is None and len(self._entries) >= CHECKS_MAX
        if is_full or (before is not None and command.number <= before.command.number):
            return False
        lacks = {}
        if self.stage > 0:
            lacks[Direction.FORWARD] = command.hops[self.stage - 1]
        if self.stage + 1 < len(command.hops):
            lacks[Direction.BACKWARD] = command.hops[self.stage + 1]
        self._entries[command.microbatch] = _Entry(command, lacks)
        return True

    def wants(self, microbatch: Microbatch, direction: Direction, peer: PeerId, incarnation: int) -> bool:
        """Whether a check waits for this input from this peer."""
        entry = self._entries.get(microbatch)
        hop = entry.lacks.get(direction) if entry is not None else None
        return hop is not None and (hop.peer, hop.incarnation) == (peer, incarnation)

    def arrived(self, microbatch: Microbatch, direction: Direction) -> None:
        """A wanted input is here."""
        del self._entries[microbatch].lacks[direction]

    def ready(self, holds: Callable[[int], bool]) -> Check | None:
        """Take out the oldest check whose inputs are here and whose weights this replica `holds`."""
        found = [entry.command for entry in self._entries.values() if not entry.lacks and holds(entry.command.version)]
        command = min(found, key=lambda one: (one.microbatch, one.number), default=None)
        if command is not None:
            del self._entries[command.microbatch]
        return command

    def lacking(self, microbatch: Microbatch) -> list[Wanted]:
        """The inputs that a check waits for."""
        entry = self._entries[microbatch]
        return [Wanted(entry.command, direction, of) for direction, of in entry.lacks.items()]

    def overdue(self) -> list[Wanted]:
        """Inputs that were missing at the last look already, and must now be asked for."""
        found = []
        for microbatch, entry in self._entries.items():
            found += self.lacking(microbatch) if entry.is_old else []
            entry.is_old = True
        return found

    def is_open(self, command: Check) -> bool:
        """Whether this check still waits for its inputs."""
        entry = self._entries.get(command.microbatch)
        return entry is not None and entry.command.number == command.number

    # Lending -----------------------------------------------------------------------------------------------------

    def lend(self, command: Check) -> Direction | None:
        """A checker may ask for our output of a microbatch: FORWARD y, BACKWARD dx. None if we are no neighbour."""
        if abs(command.stage - self.stage) != 1:
            return None
        output = Direction.FORWARD if command.stage > self.stage else Direction.BACKWARD
        self._lent[command.microbatch, output] = command.hops[command.stage]
        return output

    def may_ask(self, microbatch: Microbatch, output: Direction, peer: PeerId, incarnation: int) -> bool:
        """Whether the scheduler has named this peer as one that checks what our output goes into."""
        lent = self._lent.get((microbatch, output))
        return lent is not None and (lent.peer, lent.incarnation) == (peer, incarnation)

    # Forgetting --------------------------------------------------------------------------------------------------

    def forget(self, is_over: Callable[[Microbatch], bool]) -> list[Microbatch]:
        """Drop checks and loans of such microbatches; gives those that were checked."""
        for key in [key for key in self._lent if is_over(key[0])]:
            del self._lent[key]
        return self.drop(is_over)

    def drop(self, is_over: Callable[[Microbatch], bool]) -> list[Microbatch]:
        """Drop checks of such microbatches; gives them."""
        dropped = [microbatch for microbatch in self._entries if is_over(microbatch)]
        for microbatch in dropped:
            del self._entries[microbatch]
        return dropped
