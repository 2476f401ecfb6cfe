"""What goes with the report of a microbatch: hashes of inputs and outputs, which others can compare with their own.

The hashes are over the bytes that travel, so both ends of a link name a tensor alike. They go to the scheduler with the
report that the gradient was added (`Accumulated.digests`): x, y, g, dx, and "" where the stage has none. With or
without hashes, an output that the wire could not carry is named. Decision: docs/decisions/060.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from swarm.types import Direction, Microbatch
from swarm.wire.messages import Accumulated, Forwarded

INPUTS = {Direction.FORWARD: 0, Direction.BACKWARD: 2}  # places of x and g
OUTPUTS = {Direction.FORWARD: 1, Direction.BACKWARD: 3}  # of y and dx
NOTHING = ("", "", "", "")


def digest_of(payload: bytes | memoryview) -> str:
    """sha256 of a tensor as it travels."""
    return hashlib.sha256(payload).hexdigest()


class Commitments:
    """The hashes of open microbatches; empty where the job believes its replicas."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._known: dict[Microbatch, tuple[str, ...]] = {}
        self._overflowed: dict[Microbatch, Direction] = {}

    def __len__(self) -> int:
        return len(self._known)

    def digest(self, payload: bytes | memoryview | None) -> str:
        """The hash of a payload; "" if there is none, or the job does not ask for hashes."""
        return digest_of(payload) if self.is_on and payload is not None else ""

    def took(self, microbatch: Microbatch, direction: Direction, digest: str) -> None:
        """An input was accepted: FORWARD x, BACKWARD g."""
        self._note(microbatch, INPUTS[direction], digest)

    def made(self, microbatch: Microbatch, direction: Direction, digest: str) -> None:
        """An output is ready: FORWARD y, BACKWARD dx."""
        self._note(microbatch, OUTPUTS[direction], digest)

    def overflowed(self, microbatch: Microbatch, direction: Direction) -> None:
        """An output has values that its codec made infinite: FORWARD y, BACKWARD dx. The first is the cause."""
        self._overflowed.setdefault(microbatch, direction)

    def signed(self, event: Accumulated | Forwarded) -> Accumulated | Forwarded:
        """The report as it leaves: with the hashes if the job checks its replicas."""
        if isinstance(event, Accumulated) and (side := self._overflowed.get(event.microbatch)) is not None:
            event = replace(event, overflow=side.value)
        if not self.is_on or not isinstance(event, Accumulated):
            return event
        return replace(event, digests=self._known.get(event.microbatch, NOTHING))

    def forget(self, microbatch: Microbatch) -> None:
        self._known.pop(microbatch, None)
        self._overflowed.pop(microbatch, None)

    def _note(self, microbatch: Microbatch, place: int, digest: str) -> None:
        if self.is_on:
            known = list(self._known.get(microbatch, NOTHING))
            known[place] = digest
            self._known[microbatch] = tuple(known)
