"""What one replica knows of each microbatch, and what it does next (signatures first; see the class).

Rules for the flow that carries the actions out
-----------------------------------------------
* Actions are carried out in the order given. `Forget` and `ForgetSums` run on the compute thread: after whatever runs
  there now, before any `Compute` that was returned later.
* Before a `Compute` is put on the device, the flow asks `begin(work)`; None means: no longer wanted, do not run it.
  What begin() returns is what to run (`accumulate` may have become False since). Whatever was begun ends in exactly one
  `computed_forward(work, ...)` or `computed_backward(work, ...)`.
* `Emit` sends the output that the flow holds (y: FORWARD, dx: BACKWARD); outputs are held until the microbatch is
  forgotten or the flow tells `evicted`. A finished backward consumes graph, x and g; tokens and targets stay.
* `Average` -> `seal(step)`; only when the action `Sealed(step)` comes (at once, or after a backward that was on the
  device) may the parts be read and `set_digest(step)` be compared.
* `Commit` -> queue the optimizer on the compute thread, then `commit(step, version)` and carry out what it returns.
* Every few seconds the flow may send what `lacking()` returns: repairs whatever got lost between peers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from swarm.messages import Accumulated, ReportedCell, Route
from swarm.types import Direction, Hop, Microbatch, PeerId


@dataclass(frozen=True, slots=True)
class Compute:
    """Run one computation with weights `version`; `accumulate` (backward only): add the gradient to the step's sums."""

    microbatch: Microbatch
    direction: Direction
    version: int
    accumulate: bool
    ticket: int  # names this order: results of withdrawn orders are recognised and dropped


@dataclass(frozen=True, slots=True)
class Emit:
    """Send the held output: FORWARD y to the next hop, BACKWARD dx to the previous."""

    microbatch: Microbatch
    direction: Direction
    to: Hop


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a Need for a missing input: FORWARD x from the previous hop, BACKWARD g from the next."""

    microbatch: Microbatch
    direction: Direction
    to: Hop


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop graph, inputs and outputs of the microbatch."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class ForgetSums:
    """Drop the gradient sums of the step."""

    step: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """Nothing will be added to the sums of the step until `unseal`: the parts may be read now."""

    step: int


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the scheduler."""

    event: Accumulated


Action: TypeAlias = Compute | Emit | Ask | Forget | ForgetSums | Sealed | Report


@dataclass(frozen=True, slots=True)
class Arrival:
    """What became of a boundary tensor: keep it only if `accepted`; `reason` says why not.

    Not accepted with `duplicate`: acknowledge it as if it were accepted. Otherwise refuse it (StaleMessage).
    """

    accepted: bool
    duplicate: bool
    reason: str
    actions: tuple[Action, ...] = ()


class CellTable:
    """All cells of one replica of `stage`; every method gives the actions to carry out, in order."""

    def __init__(
        self, stage: int, stages: int, timeline: int, version: int, staleness: int, *, peer: PeerId, incarnation: int = 0
    ) -> None: ...

    def route(self, route: Route) -> tuple[Action, ...]:
        """Take part as the route says, or learn that another replica does now."""
        raise NotImplementedError

    def arrived(self, microbatch: Microbatch, direction: Direction, attempt: int) -> Arrival:
        """A boundary tensor came: FORWARD is x, BACKWARD is g; `attempt` is the sender's."""
        raise NotImplementedError

    def begin(self, work: Compute) -> Compute | None:
        """What to run now for an order; None if it was withdrawn."""
        raise NotImplementedError

    def computed_forward(self, work: Compute, loss: float, seconds: float, wait_s: float = 0.0) -> tuple[Action, ...]:
        """The forward that was begun is done; y (if any) is held by the flow; `loss` in nats (last stage)."""
        raise NotImplementedError

    def computed_backward(self, work: Compute, finite: bool, seconds: float, wait_s: float = 0.0) -> tuple[Action, ...]:
        """The backward that was begun is done; dx (if any) is held by the flow."""
        raise NotImplementedError

    def need(self, microbatch: Microbatch, direction: Direction, asker: Hop) -> tuple[Action, ...]:
        """A neighbour lacks our output: FORWARD y, BACKWARD dx."""
        raise NotImplementedError

    def void(self, step: int, attempt: int) -> tuple[Action, ...]:
        """Forget the cells and sums of the step up to and including the attempt."""
        raise NotImplementedError

    def seal(self, step: int) -> tuple[Action, ...]:
        """Freeze the sums; `Sealed` follows at once or after the backward that is on the device."""
        raise NotImplementedError

    def unseal(self, step: int) -> tuple[Action, ...]:
        """The round was aborted: the step accumulates again."""
        raise NotImplementedError

    def commit(self, step: int, version: int) -> tuple[Action, ...]:
        """Close all cells of the step; the replica holds `version` for whatever is computed from now on."""
        raise NotImplementedError

    def enter(self, timeline: int, version: int) -> tuple[Action, ...]:
        """Drop all cells and sums: a new timeline starts."""
        raise NotImplementedError

    def evicted(self, microbatch: Microbatch, direction: Direction) -> tuple[Action, ...]:
        """The flow dropped a held output to save memory; it is computed again if somebody asks."""
        raise NotImplementedError

    def lacking(self) -> tuple[Ask, ...]:
        """A Need for every input that a cell on its route still lacks."""
        raise NotImplementedError

    def accumulated(self, step: int) -> frozenset[int]:
        """Indexes whose gradient is in the sums of the step."""
        raise NotImplementedError

    def set_digest(self, step: int) -> str:
        """Digest of `accumulated(step)`, to be compared with the one in `Average`."""
        raise NotImplementedError

    def is_sealed(self, step: int) -> bool:
        raise NotImplementedError

    def open_cells(self) -> tuple[ReportedCell, ...]:
        """What is reported when the session is dialled again."""
        raise NotImplementedError

    def story(self, step: int, index: int) -> Iterable[str]:
        """Every transition of the cell, with its cause."""
        raise NotImplementedError

    def validate(self) -> None:
        """Assert the invariants."""
        raise NotImplementedError
