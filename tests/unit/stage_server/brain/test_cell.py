"""What one replica knows of each microbatch: rules R1 to R7, one situation per claim."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

import pytest

from stage_server.brain.cell import (
    EARLY_CELLS_MAX,
    Action,
    Ask,
    CellTable,
    Compute,
    DropOutput,
    Emit,
    Forget,
    ForgetSums,
    Report,
    Sealed,
)
from swarm.types import Direction, Hop, Microbatch, PeerId, set_digest
from swarm.wire.messages import Accumulated, Route
from tests.support.situations import Situation, beside, value_of

F, B = Direction.FORWARD, Direction.BACKWARD
TAKEN, MADE = {F: "x", B: "g"}, {F: "y", B: "dx"}


class Player:
    """Plays a table of cells. Whose line names no other is about microbatch 0 of step 0.

    middle(version=1, staleness=1) | first() | alone()     a replica of a stage among three, two, or the only one
    route(1, mine=2)      a route of microbatch 1; mine, before and behind are the attempts of its hops
    x(1) | g(1)           an input of microbatch 1 arrives
    begin() | end()       the oldest order goes onto the device; the oldest there ends
    compute()             both
    forward(1) | added(1) all until y of microbatch 1 is made; until its gradient is added
    need_y("n2", 3)       the hop asks for an output of ours
    """

    def __init__(self) -> None:
        self.names = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        self.table: Any = None
        self.orders: list[Compute] = []
        self.running: list[Compute] = []

    def play(self, line: str) -> list[str]:
        told: list[str] = value_of(line, self.names)
        self.table.validate()
        return told

    def middle(self, version: int = 0, staleness: int = 0) -> list[str]:
        return self._begun(1, 3, version, staleness)

    def first(self) -> list[str]:
        return self._begun(0, 2)

    def alone(self) -> list[str]:
        return self._begun(0, 1)

    def _begun(self, stage: int, stages: int, version: int = 0, staleness: int = 0) -> list[str]:
        self.table = CellTable(stage, stages, 0, version, staleness, peer=PeerId("me"), incarnation=1)
        self.orders, self.running = [], []
        return []

    def route(
        self, index: int = 0, step: int = 0, *, before: int = 1, mine: int = 1, behind: int = 1, at: str = "me",
        incarnation: int = 1, version: int = -1,
    ) -> list[str]:  # fmt: skip
        hops = {1: [hop(at, mine)], 2: [hop(at, mine), hop("n", behind)]}.get(
            self.table.stages, [hop("p", before), hop(at, mine, incarnation), hop("n", behind)]
        )
        used = step if version < 0 else version
        return self._done(self.table.route(Route(Microbatch(0, step, index), used, tuple(hops))))

    def x(self, index: int = 0, attempt: int = 1, step: int = 0, timeline: int = 0) -> list[str]:
        return self._arrives(Microbatch(timeline, step, index), F, attempt)

    def g(self, index: int = 0, attempt: int = 1) -> list[str]:
        return self._arrives(Microbatch(0, 0, index), B, attempt)

    def _arrives(self, microbatch: Microbatch, direction: Direction, attempt: int) -> list[str]:
        verdict = self.table.arrived(microbatch, direction, attempt)
        said = "accepted" if verdict.accepted else "duplicate" if verdict.duplicate else f"refused: {verdict.reason}"
        return [said, *self._done(verdict.actions)]

    def crowd(self) -> list[str]:
        taken = [self.table.arrived(Microbatch(0, 0, index), F, 1).accepted for index in range(EARLY_CELLS_MAX)]
        return [f"{sum(taken)} accepted"]

    def begin(self) -> list[str]:
        work = self.table.begin(self.orders.pop(0))
        self.running += [work] if work is not None else []
        return ["withdrawn" if work is None else f"on the device: {spelled(work)}"]

    def end(self, *, finite: bool = True, loss: float = 0.0) -> list[str]:
        work = self.running.pop(0)
        if work.direction is F:
            return self._done(self.table.computed_forward(work, loss, 0.25))
        return self._done(self.table.computed_backward(work, finite, 0.5, wait_s=1.0))

    def compute(self, **result: Any) -> list[str]:
        self.begin()
        return self.end(**result)

    def forward(self, index: int = 0) -> list[str]:
        self.route(index)
        self.x(index)
        self.compute()
        return []

    def added(self, index: int = 0) -> list[str]:
        self.forward(index)
        self.g(index)
        self.compute()
        return []

    def need_y(self, who: str = "n", attempt: int = 1, step: int = 0, timeline: int = 0) -> list[str]:
        return self._done(self.table.need(Microbatch(timeline, step, 0), F, hop(who, attempt)))

    def need_dx(self, who: str = "p", attempt: int = 1) -> list[str]:
        return self._done(self.table.need(Microbatch(0, 0, 0), B, hop(who, attempt)))

    def evict_y(self) -> list[str]:
        return self._done(self.table.evicted(Microbatch(0, 0, 0), F))

    def evict_dx(self) -> list[str]:
        return self._done(self.table.evicted(Microbatch(0, 0, 0), B))

    def lacking(self) -> list[str]:
        return self._done(self.table.lacking())

    def void(self, attempt: int) -> list[str]:
        return self._done(self.table.void(0, attempt))

    def seal(self) -> list[str]:
        return self._done(self.table.seal(0))

    def seal_when(self, *indexes: int) -> list[str]:
        return self._done(self.table.seal_when(0, set_digest(indexes)))

    def unseal(self) -> list[str]:
        return self._done(self.table.unseal(0))

    def unseal_all(self) -> list[str]:
        return self._done(self.table.unseal_all())

    def commit(self) -> list[str]:
        return self._done(self.table.commit(0, 1))

    def held(self) -> list[str]:
        """What is in the sum of step 0, and all cells that are open."""
        table, added = self.table, sorted(self.table.accumulated(0))
        assert table.set_digest(0) == set_digest(added)
        told = [f"added {added}{', sealed' if table.is_sealed(0) else ''}; {table.duplicates} duplicates"]
        for cell in table.open_cells():
            how = f"reported{'' if cell.finite else ', not finite'}" if cell.accumulated else "not reported"
            told.append(f"open: {named(cell.microbatch)}, attempt {cell.attempt}, {how}")
        return told

    def _done(self, actions: Iterable[Action]) -> list[str]:
        actions = list(actions)
        self.orders += [action for action in actions if isinstance(action, Compute)]
        return [spelled(action) for action in actions]


def hop(peer: str, attempt: int, incarnation: int = 1) -> Hop:
    return Hop(PeerId(peer), incarnation, attempt, f"at {peer}")


def named(microbatch: Microbatch) -> str:
    return f"{microbatch.step}.{microbatch.index}"


def spelled(action: Action) -> str:
    match action:
        case Compute(microbatch, direction, version, accumulate, ticket):
            into = " and add its gradient" if accumulate else ""
            return f"compute {MADE[direction]} of {named(microbatch)} with weights {version}{into}, order {ticket}"
        case Emit(microbatch, direction, to, attempt):
            return f"send {MADE[direction]} of {named(microbatch)} to {to.peer} {to.attempt}, as {attempt}"
        case Ask(microbatch, direction, to, attempt):
            return f"ask {to.peer} {to.attempt} for {TAKEN[direction]} of {named(microbatch)}, as {attempt}"
        case Forget(microbatch):
            return f"forget {named(microbatch)}"
        case DropOutput(microbatch, direction):
            return f"drop {MADE[direction]} of {named(microbatch)}"
        case ForgetSums(step):
            return f"forget the sums of step {step}"
        case Sealed(step):
            return f"step {step} is sealed"
        case Report(Accumulated() as event):
            times = f"{event.forward_s} s, {event.backward_s} s, waited {event.wait_s} s"
            finite = "" if event.finite else "not finite, "
            return f"report {named(event.microbatch)} attempt {event.attempt}: {finite}loss {event.loss}, {times}"
        case Report(event):
            return f"report y of {named(event.microbatch)}, attempt {event.attempt}"
        case _:
            assert_never(action)


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_a_replica_does_what_the_text_says(situation: Situation) -> None:
    situation.check(Player().play)
