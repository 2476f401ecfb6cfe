"""Cells: the state of each microbatch at one replica of a stage, and the actions that follow from it.

      previous hop ── x ──▶ ┌──────┐ ── y ──▶ next hop          stage 0: x is the tokens, which come with the Route
                            │ cell │                            last stage: g comes from the loss, with the targets
      previous hop ◀── dx ─ └──────┘ ◀── g ── next hop

A cell is not driven step by step. Whenever something happened to it, `_advance` asks what the cell is still wanted for
(its gradient in the sum, its y, its dx), and returns the one computation, the sends or the questions that bring it
nearer. Repair is therefore the same path as the first run. The rules, which the tests name:

  R1 an input is accepted once                    R4 y and dx are held until the commit
  R2 x and the weights -> forward, y is pushed    R5 what is missing is asked of the neighbour that has it
  R3 g and the graph -> backward, added once      R6 Void forgets; a cell that is no longer on its route is dropped

A backward may be split: its first part gives dx, adds nothing, and can be withdrawn like a forward. The cell then owes
the gradient of its weights, which the second part adds. A cell that is forgotten owes nothing.

The numbers of a microbatch do not depend on the replica that computes them, so an input that is held stays valid for
every later route. Only *sums* must be told apart, by attempts: the greatest void attempt is the step's floor.

Rules for the flow that carries the actions out
-----------------------------------------------
1. Actions are carried out in the order given. `Forget` and `ForgetSums` run on the compute thread: after whatever runs
   there now and before any `Compute` that is returned later. So a Void that meets a running backward cannot leave a
   contribution in the sums. The result of that backward is recognised by its ticket and dropped.
2. Before the flow puts an order on the device it calls `begin(work)`. None means that the order was withdrawn;
   otherwise the flow runs the order that it got back (`accumulate` and `part` may have changed). Every order that was
   begun ends in exactly one `computed_forward` or `computed_backward`. An order that was not begun can always be
   withdrawn. An accumulating backward that was begun cannot: the cell stays and reports, and the ledger settles the two
   holders.
3. The flow first keeps y or dx and then carries out what `computed_*` returned. Outputs are held until `Forget`,
   `DropOutput`, or until the flow calls `evicted`. A finished backward consumes graph, x and g, but not tokens and
   targets.
4. `Average` -> `seal(step)`, or `seal_when(step, digest)` if it came ahead. The parts may be read, and
   `accumulated(step)` compared with the digest of the command, once the action `Sealed(step)` has come: at once, after
   a backward that is on the device, or, ahead, after the one that completes the set.
5. `Commit` -> queue the optimizer on the compute thread, call `commit`, then carry out what it returned.
6. Every few seconds the flow sends what `lacking()` returns, which repairs whatever was lost between two peers.

Decision: docs/decisions/007.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TypeAlias

from swarm.types import Direction, Hop, Microbatch, PeerId, set_digest
from swarm.wire.messages import Accumulated, Forwarded, ReportedCell, Route

EARLY_CELLS_MAX = 4096  # cells that hold inputs or askers, but have no route yet

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


class Gradients(Enum):
    """The gradients that a backward computes."""

    ALL = auto()
    INPUTS = auto()  # dx; what the weights need is kept
    WEIGHTS = auto()  # the gradient of the weights, of what was kept


@dataclass(frozen=True, slots=True)
class Compute:
    """Run one computation with weights `version`; `accumulate` (backward only): add the gradient to the step's sums."""

    microbatch: Microbatch
    direction: Direction
    version: int
    accumulate: bool
    ticket: int  # names this order: results of withdrawn orders are recognised and dropped
    part: Gradients = Gradients.ALL


@dataclass(frozen=True, slots=True)
class Emit:
    """Send the held output: FORWARD y to the next hop, BACKWARD dx to the previous."""

    microbatch: Microbatch
    direction: Direction
    to: Hop
    attempt: int  # ours, for the header


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a Need for a missing input: FORWARD x from the previous hop, BACKWARD g from the next."""

    microbatch: Microbatch
    direction: Direction
    to: Hop
    attempt: int  # ours, for the header


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop graph, inputs, outputs, tokens and targets of the microbatch, and its order if the device has not begun."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class DropOutput:
    """The order of this result was withdrawn meanwhile: do not hold its y (FORWARD) or dx (BACKWARD)."""

    microbatch: Microbatch
    direction: Direction


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

    event: Accumulated | Forwarded


Action: TypeAlias = Compute | Emit | Ask | Forget | DropOutput | ForgetSums | Sealed | Report


@dataclass(frozen=True, slots=True)
class Arrival:
    """The verdict on a boundary tensor: keep it only if `accepted`; `reason` says why not.

    Not accepted with `duplicate`: acknowledge it as if it were accepted. Otherwise refuse it (StaleMessage).
    """

    accepted: bool
    duplicate: bool
    reason: str
    actions: tuple[Action, ...] = ()


@dataclass(slots=True)
class Cell:
    """One microbatch at this replica. `input[FORWARD]` is x, `output[FORWARD]` is y; BACKWARD: g and dx."""

    microbatch: Microbatch
    route: Route | None = None
    newest: int = 0  # greatest attempt of any hop of `route`
    mine: bool = False  # `route` names this replica
    attempt: int = 0  # of our newest hop
    stamp: bytes = b""  # that came with it
    input: dict[Direction, bool] = field(default_factory=lambda: dict.fromkeys(Direction, False))
    used: dict[Direction, bool] = field(default_factory=lambda: dict.fromkeys(Direction, False))  # was here, consumed
    asked: dict[Direction, tuple[PeerId, int]] = field(default_factory=dict)  # of whom, and their attempt
    graph: bool = False
    owed: bool = False  # dx was computed, and what the weights' gradient needs is kept
    output: dict[Direction, bool] = field(default_factory=lambda: dict.fromkeys(Direction, False))
    pushed: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))  # our attempt then
    askers: dict[Direction, dict[PeerId, Hop]] = field(default_factory=lambda: {side: {} for side in Direction})
    order: Compute | None = None
    begun: bool = False
    reported: bool = False  # accumulated, or found not finite
    finite: bool = True
    loss: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0

    @property
    def is_adding(self) -> bool:
        """What will add to the sums is on the device."""
        return self.begun and self.order is not None and self.order.accumulate

    @property
    def is_splitting(self) -> bool:
        """A backward that will leave the weights owed is on the device."""
        return self.begun and self.order is not None and self.order.part is Gradients.INPUTS


class CellTable:
    """All cells of one replica of `stage`; every method gives the actions to carry out, in order.

    `version`: of the replica's weights (commits applied); with `staleness` 1 it holds the version before it as well.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        timeline: int,
        version: int,
        staleness: int,
        *,
        peer: PeerId,
        incarnation: int = 0,
    ) -> None:
        assert 0 <= stage < stages
        self.stage = stage
        self.stages = stages
        self.timeline = timeline
        self.version = version
        self.staleness = staleness
        self.duplicates = 0
        self._me = (peer, incarnation)
        self._cells: dict[int, dict[int, Cell]] = {}
        self._floors: dict[int, int] = {}
        self._sealed: dict[int, bool] = {}  # step -> whether `Sealed` was given
        self._seals_when: dict[int, str] = {}  # step -> digest of the set with which it seals itself
        self._tickets = 0

    # Commands ----------------------------------------------------------------------------------------------------

    def route(self, route: Route) -> tuple[Action, ...]:
        """Take part as the route says, or learn that another replica does instead; older routes change nothing."""
        microbatch, hop = route.microbatch, route.hops[self.stage]
        mine = (hop.peer, hop.incarnation) == self._me
        newest = max(hop.attempt for hop in route.hops)
        if not self.is_open(microbatch) or (mine and hop.attempt <= self._floors.get(microbatch.step, 0)):
            self.duplicates += 1
            return ()
        cell = self._cell(microbatch)
        if newest <= cell.newest:
            self.duplicates += 1
            return ()
        cell.route, cell.newest, cell.mine = route, newest, mine
        if not mine:
            return self._displaced(cell)
        again = cell.reported and hop.attempt > cell.attempt
        cell.attempt, cell.stamp = hop.attempt, route.stamp
        if self.stage == 0:
            cell.input[FORWARD] = True
        report = (Report(self._event(cell)),) if again else ()  # the scheduler has not heard of it, or has forgotten
        return (*report, *self._advance(cell))

    def void(self, step: int, attempt: int) -> tuple[Action, ...]:
        """Forget the cells and sums of the step up to and including the attempt; a repeated Void changes nothing."""
        if step < self.version or attempt <= self._floors.get(step, 0):
            self.duplicates += 1
            return ()
        self._floors[step] = attempt
        cells = self._cells.setdefault(step, {})
        forgotten: list[Action] = []
        renewed: list[Cell] = []
        for index, cell in list(cells.items()):
            if 0 < cell.attempt <= attempt:
                del cells[index]
            elif cell.reported or cell.is_adding:
                # Newer than the Void, yet in the sum that it abolishes: a sum cannot be divided, so it is done again.
                cells[index] = self._anew(cell)
                renewed.append(cells[index])
            else:
                continue
            forgotten.append(Forget(cell.microbatch))
        again = [action for cell in renewed for action in self._advance(cell)]
        return (*forgotten, ForgetSums(step), *self._settle(step), *again)

    def seal(self, step: int) -> tuple[Action, ...]:
        """Freeze the sums; `Sealed` follows at once or after the backward that is on the device."""
        if step < self.version:
            return ()
        self._seals_when.pop(step, None)
        self._sealed[step] = False
        return self._settle(step)

    def seal_when(self, step: int, digest: str) -> tuple[Action, ...]:
        """Freeze the sums as soon as the set in them has this digest; at once if they are frozen already."""
        if step < self.version or step in self._sealed:
            return self.seal(step)
        self._seals_when[step] = digest
        return self._settle(step)

    def unseal(self, step: int) -> tuple[Action, ...]:
        """The round was aborted: the step accumulates again."""
        self._seals_when.pop(step, None)
        self._sealed.pop(step, None)
        return tuple(action for cell in list(self._of(step)) for action in self._advance(cell))

    def unseal_all(self) -> tuple[Action, ...]:
        """All open rounds were given up."""
        steps = sorted({*self._sealed, *self._seals_when})
        return tuple(action for step in steps for action in self.unseal(step))

    def commit(self, step: int, version: int) -> tuple[Action, ...]:
        """Close all cells of the step; from now on the replica computes with `version`."""
        if version <= self.version:
            self.duplicates += 1
            return ()
        self.version = version
        closed: list[Action] = []
        for old in [known for known in self._cells if known <= step]:
            closed += [Forget(cell.microbatch) for cell in self._cells.pop(old).values()]
            self._floors.pop(old, None)
            self._sealed.pop(old, None)
            self._seals_when.pop(old, None)
        waiting = [cell for cells in self._cells.values() for cell in cells.values()]
        return (*closed, *(action for cell in waiting for action in self._advance(cell)))

    # Neighbours --------------------------------------------------------------------------------------------------

    def arrived(self, microbatch: Microbatch, direction: Direction, attempt: int) -> Arrival:
        """A boundary tensor came: FORWARD is x, BACKWARD is g; `attempt` is the sender's."""
        if microbatch.timeline == self.timeline and microbatch.step < self.version:
            return self._repeated(f"step {microbatch.step} is committed")
        if not self.is_open(microbatch):
            return Arrival(
                False, False, f"{microbatch} is not open here: timeline {self.timeline}, version {self.version}"
            )
        if self._is_end(direction):
            return Arrival(False, False, f"stage {self.stage} takes no {direction} input from a peer")
        if self._is_crowded(microbatch):
            return Arrival(False, False, f"{EARLY_CELLS_MAX} microbatches wait for their route")
        cell = self._cell(microbatch)
        if cell.route is not None:
            sender = self._neighbour(cell.route, direction)
            if attempt < sender.attempt:
                return Arrival(False, False, f"attempt {attempt} is older than the route's ({sender.attempt})")
            if not self._lacks(cell, direction):
                return self._repeated(f"{direction} input of {microbatch} is here or used")
        elif cell.input[direction]:
            return self._repeated(f"{direction} input of {microbatch} is here")
        cell.input[direction] = True
        return Arrival(True, False, "", self._advance(cell))

    def need(self, microbatch: Microbatch, direction: Direction, asker: Hop) -> tuple[Action, ...]:
        """A neighbour lacks our output: FORWARD y, BACKWARD dx. It is sent now, or as soon as it exists."""
        towards = BACKWARD if direction is FORWARD else FORWARD  # the side on which the asker's stage lies
        if not self.is_open(microbatch) or self._is_end(towards) or self._is_crowded(microbatch):
            return ()
        cell = self._cell(microbatch)
        if cell.route is not None and asker.attempt < self._neighbour(cell.route, towards).attempt:
            return ()
        cell.askers[direction][asker.peer] = asker
        return self._advance(cell)

    def evicted(self, microbatch: Microbatch, direction: Direction) -> tuple[Action, ...]:
        """The flow dropped a held output to save memory; it is computed again when a neighbour asks."""
        cell = self._cells.get(microbatch.step, {}).get(microbatch.index)
        if cell is None or microbatch.timeline != self.timeline:
            return ()
        cell.output[direction] = False
        if direction is FORWARD and cell.graph and self.stage > 0:
            cell.input[FORWARD], cell.used[FORWARD] = False, True  # x went into the graph: it is asked for again
        return self._advance(cell)

    def lacking(self) -> tuple[Ask, ...]:
        """A Need for every input that a cell waits for, even if it was asked for before."""
        cells = [cell for step in sorted(self._cells) for cell in self._of(step)]
        return tuple(ask for cell in cells for side in Direction if (ask := self._ask(cell, side)) is not None)

    # The device --------------------------------------------------------------------------------------------------

    def begin(self, work: Compute, *, split: bool = False) -> Compute | None:
        """The computation to run now for an order; None if the order was withdrawn.

        With `split` a backward that is to be added gives dx first, if a neighbour waits for that.
        """
        cell = self._ordered(work)
        if cell is None or cell.begun:
            return None
        if work.direction is BACKWARD:
            accumulate = self._adds(cell, work.part)
            wants_dx = work.part is Gradients.ALL and self._wants_output(cell, BACKWARD)
            if not accumulate and not wants_dx:
                cell.order = None
                return None
            if split and accumulate and wants_dx:
                work = replace(work, part=Gradients.INPUTS)
            cell.order = replace(work, accumulate=accumulate and work.part is not Gradients.INPUTS)
        cell.begun = True
        return cell.order

    def computed_forward(self, work: Compute, loss: float, seconds: float, wait_s: float = 0.0) -> tuple[Action, ...]:
        """A forward that was begun is done, and y (if any) is held; `loss` is the sum in nats (last stage, else 0)."""
        cell = self._ordered(work)
        if cell is None:
            return (DropOutput(work.microbatch, FORWARD),)
        cell.order, cell.begun = None, False
        cell.graph = True
        cell.output[FORWARD] = self.stage < self.stages - 1
        cell.loss, cell.forward_s, cell.wait_s = loss, cell.forward_s + seconds, cell.wait_s + wait_s
        report: tuple[Action, ...] = ()
        if self.stage < self.stages - 1 and not cell.reported:  # else computed again for a neighbour
            report = (Report(Forwarded(work.microbatch, self.stage, cell.attempt)),)
        return (*report, *self._advance(cell))

    def computed_backward(self, work: Compute, finite: bool, seconds: float, wait_s: float = 0.0) -> tuple[Action, ...]:
        """A backward that was begun is done, and dx (if any) is held; if not `finite`, nothing was added.

        A wait for which no neighbour waited, that of weights which came later, is not reported.
        """
        cell = self._ordered(work)
        if cell is None:
            return () if work.part is Gradients.WEIGHTS else (DropOutput(work.microbatch, BACKWARD),)
        cell.order, cell.begun = None, False
        cell.backward_s += seconds
        if work.part is Gradients.WEIGHTS:
            cell.owed = False
        else:
            cell.wait_s += wait_s
            cell.owed = cell.owed or work.part is Gradients.INPUTS
            cell.graph = False
            cell.output[BACKWARD] = self.stage > 0
            for side in Direction:
                cell.used[side] = True
                cell.input[side] = self.stage == 0 and side is FORWARD  # tokens stay
            cell.asked.clear()
        report: tuple[Action, ...] = ()
        if work.accumulate:
            assert not cell.reported, f"{cell.microbatch} would be added twice"
            cell.reported, cell.finite = True, finite
            report = (Report(self._event(cell)),)
        return (*report, *self._settle(work.microbatch.step), *self._advance(cell))

    # What is known -----------------------------------------------------------------------------------------------

    def accumulated(self, step: int) -> frozenset[int]:
        """Indexes whose gradient is in the sums of the step."""
        return frozenset(cell.microbatch.index for cell in self._of(step) if cell.reported and cell.finite)

    def set_digest(self, step: int) -> str:
        """Digest of `accumulated(step)`, to be compared with the one in `Average`."""
        return set_digest(self.accumulated(step))

    def is_sealed(self, step: int) -> bool:
        """Whether nothing more is added to the step, not even by a backward that was begun before."""
        return self._sealed.get(step, False)

    def open_cells(self) -> tuple[ReportedCell, ...]:
        """The cells that a new session reports: all that are in the sums, or may still enter them."""
        known = [cell for step in sorted(self._cells) for cell in self._of(step)]
        cells = [cell for cell in known if cell.mine or cell.reported or cell.is_adding]
        return tuple(
            ReportedCell(cell.microbatch, cell.attempt, cell.reported, cell.finite, cell.loss, cell.stamp)
            for cell in cells
        )

    def owed(self) -> int:
        """How many microbatches owe the gradient of their weights, or will once the device is done."""
        cells = [cell for step in self._cells for cell in self._cells[step].values()]
        return sum(cell.owed or cell.is_splitting for cell in cells)

    def newest_attempt(self) -> int:
        """The greatest known attempt of any open step; only a hop with a greater one counts."""
        cells = [cell for step in self._cells for cell in self._of(step)]
        return max([0, *self._floors.values(), *(max(cell.newest, cell.attempt) for cell in cells)])

    def is_open(self, microbatch: Microbatch) -> bool:
        """Whether the step may be open here: others may be one commit ahead of us, two with staleness 1."""
        return microbatch.timeline == self.timeline and 0 <= microbatch.step - self.version <= 1 + self.staleness

    def __contains__(self, microbatch: Microbatch) -> bool:
        """Whether the microbatch has a cell: a `Forget` will come for it."""
        return microbatch.timeline == self.timeline and microbatch.index in self._cells.get(microbatch.step, {})

    def is_mine(self, microbatch: Microbatch) -> bool:
        """Whether the newest known route names this replica."""
        cell = self._cells.get(microbatch.step, {}).get(microbatch.index)
        return cell is not None and cell.mine and microbatch.timeline == self.timeline

    def holds(self, version: int) -> bool:
        """Whether this replica has the weights of `version`."""
        return self.version - self.staleness <= version <= self.version

    def concerns(self, microbatch: Microbatch, side: Direction, to: Hop) -> bool:
        """Whether a tensor or question still goes to `to`: FORWARD the next hop, BACKWARD the previous one.

        A neighbour that asked may know a newer route than this replica.
        """
        cell = self._cells.get(microbatch.step, {}).get(microbatch.index)
        if cell is None or cell.route is None or microbatch.timeline != self.timeline:
            return False
        return to.attempt >= self._neighbour(cell.route, BACKWARD if side is FORWARD else FORWARD).attempt

    def receiver(self, microbatch: Microbatch, side: Direction) -> PeerId | None:
        """The peer to which the newest known route sends an output: FORWARD y, BACKWARD dx; None if there is none."""
        cell = self._cells.get(microbatch.step, {}).get(microbatch.index)
        against = BACKWARD if side is FORWARD else FORWARD
        if cell is None or cell.route is None or self._is_end(against):
            return None
        return self._neighbour(cell.route, against).peer

    def validate(self) -> None:
        """Assert what must hold between any two events."""
        for step, cells in self._cells.items():
            assert step >= self.version, f"step {step} is committed"
            for index, cell in cells.items():
                assert cell.microbatch == Microbatch(self.timeline, step, index)
                assert cell.attempt == 0 or cell.attempt > self._floors.get(step, 0), cell
                assert cell.order is None or cell.mine or cell.reported or cell.is_adding, cell
                assert cell.order is not None or not cell.begun, cell
                assert not (cell.is_adding and cell.reported), cell
                assert not (cell.is_adding and self.is_sealed(step)), cell
                assert not (cell.mine and cell.route is None), cell
                if cell.order is not None:
                    assert self.holds(cell.order.version), cell
                    has_inputs = cell.input[FORWARD] if cell.order.direction is FORWARD else cell.graph
                    assert cell.owed if cell.order.part is Gradients.WEIGHTS else has_inputs, cell
                    assert not (cell.order.accumulate and cell.order.part is Gradients.INPUTS), cell
                assert not (cell.owed and cell.reported), cell
                if cell.mine or cell.reported:
                    for side in Direction:
                        assert not (cell.output[side] and cell.askers[side]), f"unanswered: {cell}"

    # Below: what a cell is still wanted for ----------------------------------------------------------------------

    def _advance(self, cell: Cell) -> tuple[Action, ...]:
        """Send outputs that are held and wanted; then order the next computation, or ask for the missing input."""
        if cell.route is None or not (cell.mine or cell.reported):
            return ()
        actions: list[Action] = [*self._send(cell, FORWARD), *self._send(cell, BACKWARD)]
        if cell.order is not None and (cell.begun or cell.order.part is not Gradients.WEIGHTS):
            return tuple(actions)  # but weights that wait make way for what a neighbour waits for
        if self._wants_forward(cell):
            if cell.input[FORWARD] and self.holds(cell.route.version):
                actions.append(self._place_order(cell, FORWARD))
        elif self._wants_backward(cell) and (cell.input[BACKWARD] or self.stage == self.stages - 1):
            actions.append(self._place_order(cell, BACKWARD))
        if cell.order is None and self._adds(cell, Gradients.WEIGHTS):
            actions.append(self._place_order(cell, BACKWARD, Gradients.WEIGHTS))
        for side in Direction:
            actions += self._ask_once(cell, side)
        return tuple(actions)

    def _wants_sum(self, cell: Cell) -> bool:
        return cell.mine and not cell.reported and cell.microbatch.step not in self._sealed

    def _wants_output(self, cell: Cell, side: Direction) -> bool:
        """Whether y (FORWARD) or dx (BACKWARD) must be computed: the neighbour was not sent it, or a replica asks."""
        if self._is_end(BACKWARD if side is FORWARD else FORWARD) or cell.output[side]:
            return False
        return bool(cell.askers[side]) or (cell.mine and cell.pushed[side] < cell.attempt)

    def _adds(self, cell: Cell, part: Gradients = Gradients.ALL) -> bool:
        """Whether the gradient is wanted, and this part of a backward would add it."""
        return self._wants_sum(cell) and cell.owed is (part is Gradients.WEIGHTS)

    def _wants_backward(self, cell: Cell) -> bool:
        return self._adds(cell) or self._wants_output(cell, BACKWARD)

    def _wants_forward(self, cell: Cell) -> bool:
        return self._wants_output(cell, FORWARD) or (self._wants_backward(cell) and not cell.graph)

    def _lacks(self, cell: Cell, side: Direction) -> bool:
        """Whether the cell waits for x (FORWARD) or g (BACKWARD)."""
        if cell.route is None or cell.input[side] or self._is_end(side) or not (cell.mine or cell.reported):
            return False
        return self._wants_forward(cell) if side is FORWARD else self._wants_backward(cell)

    def _place_order(self, cell: Cell, side: Direction, part: Gradients = Gradients.ALL) -> Compute:
        assert cell.route is not None
        self._tickets += 1
        accumulate = side is BACKWARD and self._adds(cell, part)
        cell.order = Compute(cell.microbatch, side, cell.route.version, accumulate, self._tickets, part)
        return cell.order

    def _send(self, cell: Cell, side: Direction) -> list[Action]:
        """Send the held output to the neighbour on the route (once per attempt of ours) and to all that asked."""
        if not cell.output[side]:
            return []
        assert cell.route is not None
        targets = cell.askers[side]
        if cell.mine and cell.pushed[side] < cell.attempt:
            neighbour = self._neighbour(cell.route, BACKWARD if side is FORWARD else FORWARD)
            targets = {**targets, neighbour.peer: neighbour}
            cell.pushed[side] = cell.attempt
        cell.askers[side] = {}
        return [Emit(cell.microbatch, side, hop, cell.attempt) for hop in targets.values()]

    def _ask_once(self, cell: Cell, side: Direction) -> list[Action]:
        """A Need, if the neighbour will not send by itself because it has sent before, to us or to a predecessor.

        A neighbour whose attempt is not older than ours sends by itself as soon as it has the tensor.
        """
        ask = self._ask(cell, side)
        if ask is None or not (cell.used[side] or cell.attempt > ask.to.attempt):
            return []
        if cell.asked.get(side) == (ask.to.peer, ask.to.attempt):
            return []
        cell.asked[side] = (ask.to.peer, ask.to.attempt)
        return [ask]

    def _ask(self, cell: Cell, side: Direction) -> Ask | None:
        if not self._lacks(cell, side):
            return None
        assert cell.route is not None
        return Ask(cell.microbatch, side, self._neighbour(cell.route, side), cell.attempt)

    def _displaced(self, cell: Cell) -> tuple[Action, ...]:
        """Another replica has the hop now: drop the cell, unless its gradient is in the sum or on its way there."""
        if cell.reported or cell.is_adding:
            return ()
        anew = self._anew(cell)
        self._cells[cell.microbatch.step][cell.microbatch.index] = anew
        return (Forget(cell.microbatch),)

    def _anew(self, cell: Cell) -> Cell:
        """A new cell with the same route and nothing else; its order is withdrawn, since the ticket is gone."""
        anew = Cell(cell.microbatch, cell.route, cell.newest, cell.mine, cell.attempt, cell.stamp)
        anew.input[FORWARD] = self.stage == 0 and cell.mine
        anew.used = dict.fromkeys(Direction, True)  # the neighbours have sent before
        return anew

    def _settle(self, step: int) -> tuple[Action, ...]:
        """Give `Sealed`, if it was asked for and no backward on the device will add anything more."""
        if any(cell.is_adding for cell in self._of(step)):
            return ()
        if step in self._seals_when and self._seals_when[step] == self.set_digest(step):
            return self.seal(step)
        if self._sealed.get(step) is not False:
            return ()
        self._sealed[step] = True
        return (Sealed(step),)

    # Below: small things -----------------------------------------------------------------------------------------

    def _of(self, step: int) -> list[Cell]:
        return [cell for _, cell in sorted(self._cells.get(step, {}).items())]

    def _cell(self, microbatch: Microbatch) -> Cell:
        return self._cells.setdefault(microbatch.step, {}).setdefault(microbatch.index, Cell(microbatch))

    def _ordered(self, work: Compute) -> Cell | None:
        cell = self._cells.get(work.microbatch.step, {}).get(work.microbatch.index)
        current = cell is not None and cell.order is not None and cell.order.ticket == work.ticket
        return cell if current and work.microbatch.timeline == self.timeline else None

    def _is_crowded(self, microbatch: Microbatch) -> bool:
        cells = self._cells.get(microbatch.step, {})
        if microbatch.index in cells or len(cells) < EARLY_CELLS_MAX:
            return False
        return sum(1 for cell in cells.values() if cell.route is None) >= EARLY_CELLS_MAX

    def _is_end(self, side: Direction) -> bool:
        """Whether no stage lies on that side: FORWARD inputs come from before us, BACKWARD inputs from behind."""
        return self.stage == 0 if side is FORWARD else self.stage == self.stages - 1

    def _neighbour(self, route: Route, side: Direction) -> Hop:
        return route.hops[self.stage - 1 if side is FORWARD else self.stage + 1]

    def _event(self, cell: Cell) -> Accumulated:
        return Accumulated(
            microbatch=cell.microbatch,
            stage=self.stage,
            attempt=cell.attempt,
            finite=cell.finite,
            loss=cell.loss if self.stage == self.stages - 1 else 0.0,
            forward_s=cell.forward_s,
            backward_s=cell.backward_s,
            wait_s=cell.wait_s,
        )

    def _repeated(self, reason: str) -> Arrival:
        self.duplicates += 1
        return Arrival(False, True, reason)
