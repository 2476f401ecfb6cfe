"""Work beside the cells of one replica, which adds to no sum: checks and evaluations.

    Check, Evaluate ──┐
                      ├─▶ both here, weights held ──▶ next ──computed──▶ Checked, Evaluated, or on to the next hop
    inputs ───────────┘

Only a command makes a task, and an input counts if it comes from a neighbour on that command's route. A command has a
number, the attempt of our hop or the number of the check: a newer one replaces the older, whose messages and results
are ignored.

A check needs x and g. The hops before and behind send what they hold; an input that does not come is asked for. A
route that names this replica ends the check: later inputs are for the cell. An evaluation needs x alone. The scheduler
overwrites no version that is being evaluated; this replica may be some commits behind the others.

Decision: docs/decisions/060.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeAlias, TypeVar

from stage_server.brain.cell import CellTable
from stage_server.brain.neighbours import Claim
from swarm.errors import StaleMessage
from swarm.types import Direction, EvaluationBatch, Hop, Microbatch, PeerId
from swarm.wire.messages import Check, Evaluate

VERSIONS_AHEAD_MAX = 2  # how many commits others may be ahead of this replica
WAITING_MAX = 8192  # tasks at one replica

Subject: TypeAlias = Microbatch | EvaluationBatch
_Held = TypeVar("_Held")


class Timing(Enum):
    """What to do with an input of an evaluation."""

    WANTED = auto()
    EARLY = auto()  # keep it until its command comes, and let it arrive again then
    LATE = auto()  # acknowledge and ignore it


@dataclass(slots=True)
class Task(Generic[_Held]):
    """A command with the inputs that came for it, and the hops that have the others."""

    command: Check | Evaluate
    number: int
    lacks: dict[Direction, Hop]
    inputs: dict[Direction, _Held] = field(default_factory=dict)
    is_old: bool = False  # it was here at the last look

    @property
    def subject(self) -> Subject:
        return _subject(self.command)

    @property
    def version(self) -> int:
        """The weights to compute with."""
        return self.command.version if isinstance(self.command, Check) else self.command.batch.version


class SideWork(Generic[_Held]):
    """The tasks of the replica of `cells`, and the outputs that it lends to the checkers of other stages."""

    def __init__(self, cells: CellTable, peer: PeerId, incarnation: int) -> None:
        self._cells = cells
        self._me = (peer, incarnation)
        self._newest: dict[Subject, int] = {}  # greatest number of a command
        self._open: dict[Subject, Task[_Held]] = {}
        self._lent: dict[tuple[Microbatch, Direction], Hop] = {}  # our outputs, and the newest checker

    def __len__(self) -> int:
        return len(self._newest)

    def newest_attempt(self) -> int:
        """The greatest attempt of an evaluation."""
        return max((at for subject, at in self._newest.items() if isinstance(subject, EvaluationBatch)), default=0)

    # Commands ----------------------------------------------------------------------------------------------------

    def take(self, command: Check | Evaluate) -> bool:
        """Take part, or learn that another replica does now; gives whether there is a new task."""
        subject, stage = _subject(command), self._cells.stage
        hop = command.hops[stage]
        number = command.number if isinstance(command, Check) else hop.attempt
        # An evaluation that is not taken is not sent again: the row before its version would wait for it.
        is_full = isinstance(command, Check) and subject not in self._open and len(self._open) >= WAITING_MAX
        if is_full or number <= self._newest.get(subject, -1) or self._fault(subject):
            return False
        self._newest[subject] = number
        self._open.pop(subject, None)
        if (hop.peer, hop.incarnation) != self._me:
            return False
        task = self._open[subject] = Task(command, number, {})
        if stage > 0:
            task.lacks[Direction.FORWARD] = command.hops[stage - 1]
        if isinstance(command, Check) and stage + 1 < len(command.hops):
            task.lacks[Direction.BACKWARD] = command.hops[stage + 1]
        return True

    def may_hold(self, version: int) -> bool:
        """Whether this replica still holds the weights of `version`, or will."""
        return version >= self._cells.version - self._cells.staleness

    # Inputs ------------------------------------------------------------------------------------------------------

    def wants(self, microbatch: Microbatch, direction: Direction, peer: PeerId, incarnation: int) -> bool:
        """Whether a check waits for this input from this peer."""
        task = self._open.get(microbatch)
        hop = None if task is None else task.lacks.get(direction)
        return hop is not None and (hop.peer, hop.incarnation) == (peer, incarnation)

    def judge(self, batch: EvaluationBatch, claim: Claim) -> Timing:
        """An activation came under the claim of its header; StaleMessage if it is of no evaluation here."""
        if self._cells.stage == 0:
            raise StaleMessage("the first stage takes no evaluation input from a peer")
        if batch.timeline == self._cells.timeline and not self.may_hold(batch.version):
            return Timing.LATE
        if fault := self._fault(batch):
            raise StaleMessage(fault)
        newest, task = self._newest.get(batch, -1), self._open.get(batch)
        if claim.attempt > newest:
            return Timing.EARLY
        if claim.attempt < newest or task is None or not task.lacks:
            return Timing.LATE
        named = Claim.of(task.lacks[Direction.FORWARD])
        if claim != named:
            raise StaleMessage(f"the route of {batch} names {named}, not {claim}")
        return Timing.WANTED

    def arrived(self, subject: Subject, direction: Direction, held: _Held) -> None:
        """A wanted input is here."""
        task = self._open[subject]
        del task.lacks[direction]
        task.inputs[direction] = held

    def lacking(self, command: Check) -> dict[Direction, Hop]:
        """The inputs for which a check waits, FORWARD x and BACKWARD g, and the hops that have them."""
        task = self._open.get(command.microbatch)
        return dict(task.lacks) if task is not None and task.number == command.number else {}

    def overdue(self) -> list[tuple[Check, Direction, Hop]]:
        """The inputs of checks that were missing at the last look already, and must now be asked for."""
        found = []
        for task in self._open.values():
            if isinstance(task.command, Check):
                found += [(task.command, direction, of) for direction, of in task.lacks.items() if task.is_old]
                task.is_old = True
        return found

    # Computing ---------------------------------------------------------------------------------------------------

    def next(self) -> Task[_Held] | None:
        """Take out the first task whose inputs are here and whose weights are held: checks, then older evaluations."""
        ready = (task for task in self._open.values() if not task.lacks and self._cells.holds(task.version))
        task = min(ready, key=lambda task: (isinstance(task.command, Evaluate), task.subject), default=None)
        return None if task is None else self._open.pop(task.subject)

    def is_current(self, task: Task[_Held]) -> bool:
        """Whether the result of a task that `next` gave is still wanted."""
        return self._newest.get(task.subject) == task.number

    # Lending -----------------------------------------------------------------------------------------------------

    def lend(self, command: Check) -> Direction | None:
        """A checker may ask for our output of a microbatch: FORWARD y, BACKWARD dx. None if we are no neighbour."""
        if abs(command.stage - self._cells.stage) != 1:
            return None
        output = Direction.FORWARD if command.stage > self._cells.stage else Direction.BACKWARD
        self._lent[command.microbatch, output] = command.hops[command.stage]
        return output

    def may_ask(self, microbatch: Microbatch, output: Direction, peer: PeerId, incarnation: int) -> bool:
        """Whether the scheduler has named this peer as a checker that takes our output."""
        lent = self._lent.get((microbatch, output))
        return lent is not None and (lent.peer, lent.incarnation) == (peer, incarnation)

    # Forgetting --------------------------------------------------------------------------------------------------

    def drop(self, microbatch: Microbatch) -> None:
        """A route names this replica, so it stops checking the microbatch."""
        self._open.pop(microbatch, None)

    def forget(self, is_over: Callable[[Microbatch], bool]) -> None:
        """Drop checks and loans of such microbatches."""
        for key in [key for key in self._lent if is_over(key[0])]:
            del self._lent[key]
        self._remove(lambda subject: isinstance(subject, Microbatch) and is_over(subject))

    def commit(self, step: int) -> None:
        """The cells have committed a step: drop its checks, and evaluations of weights that are gone."""
        self.forget(lambda microbatch: microbatch.step <= step)
        self._remove(lambda subject: isinstance(subject, EvaluationBatch) and not self.may_hold(subject.version))

    def _remove(self, is_over: Callable[[Subject], bool]) -> None:
        for subject in [subject for subject in self._newest if is_over(subject)]:
            del self._newest[subject]
            self._open.pop(subject, None)

    def _fault(self, subject: Subject) -> str:
        """Why nothing of these weights is evaluated; empty for a check, which the scheduler asks for in time."""
        if isinstance(subject, Microbatch):
            return ""
        ahead = subject.version - self._cells.version
        if subject.timeline == self._cells.timeline and -self._cells.staleness <= ahead <= VERSIONS_AHEAD_MAX:
            return ""
        return (
            f"weights {subject.version} of timeline {subject.timeline} are not evaluated here: "
            f"timeline {self._cells.timeline}, version {self._cells.version}"
        )


def _subject(command: Check | Evaluate) -> Subject:
    return command.microbatch if isinstance(command, Check) else command.batch
