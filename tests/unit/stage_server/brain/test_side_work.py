"""Checks and evaluations at one replica: when they are computed, and to whom it lends what it made."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from stage_server.brain import side_work
from stage_server.brain.cell import CellTable
from stage_server.brain.neighbours import Claim
from stage_server.brain.side_work import SideWork, Timing
from swarm.errors import StaleMessage
from swarm.types import Direction, EvaluationBatch, Hop, Microbatch, PeerId
from swarm.wire.messages import Check, Evaluate
from tests.support.situations import Situation, beside, value_of

F, B = Direction.FORWARD, Direction.BACKWARD
TAKEN, MADE = {F: "x", B: "g"}, {F: "lends y", B: "lends dx", None: "lends nothing"}
AT = Microbatch(0, 5, 0)


class Player:
    """Plays the side work of "here", a replica of one of three stages; p0 to p2 are the others on each route.

    table(1, version=4)             a replica of stage 1 begins with these weights
    take(check(number=2))           a command: a check of microbatch 5.0, or an evaluation of version 4
    x("p0") | g("p2")               an input of the check arrives
    came(2, peer="p0")              an input of the evaluation arrives, of attempt 2
    next() | current()              what is computed now; whether its result is still wanted
    lacking(2) | overdue()          what check number 2 waits for; what is to be asked for
    lend(2) | may_ask(F)            a checker of stage 2 is named; whether it may ask for our output
    commit_until(5)                 the weights go on
    """

    def __init__(self) -> None:
        self.names = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")} | {"F": F, "B": B}
        self.work: SideWork[str] | Any = None
        self.cells: Any = None
        self.task: Any = None

    def play(self, line: str) -> list[str]:
        told: list[str] = value_of(line, self.names)
        return told

    def table(self, stage: int = 1, *, version: int = 4, staleness: int = 1) -> list[str]:
        self.cells = CellTable(stage, 3, 0, version, staleness, peer=PeerId("here"), incarnation=1)
        self.work = SideWork[str](self.cells, PeerId("here"), 1)
        return []

    def _hops(self, attempt: int, stage: int, peer: str, ours: int) -> tuple[Hop, ...]:
        named = [peer if at == stage else f"p{at}" for at in range(3)]
        return tuple(Hop(PeerId(name), 1, ours if at == stage else attempt, "") for at, name in enumerate(named))

    def check(self, index: int = 0, number: int = 1, *, stage: int = -1, step: int = 5) -> Check:
        at = self.cells.stage if stage < 0 else stage
        return Check(Microbatch(0, step, index), 4, at, number, self._hops(2, at, "here", 3))

    def evaluate(self, attempt: int = 1, *, version: int = 4, peer: str = "here") -> Evaluate:
        return Evaluate(EvaluationBatch(0, version, 0), self._hops(attempt, self.cells.stage, peer, attempt))

    def take(self, command: Check | Evaluate) -> list[str]:
        return ["taken" if self.work.take(command) else "not taken"]

    def x(self, peer: str = "p0", incarnation: int = 1) -> list[str]:
        return self._arrives(F, peer, incarnation)

    def g(self, peer: str = "p2", incarnation: int = 1) -> list[str]:
        return self._arrives(B, peer, incarnation)

    def _arrives(self, direction: Direction, peer: str, incarnation: int) -> list[str]:
        if not self.work.wants(AT, direction, PeerId(peer), incarnation):
            return ["not wanted"]
        self.work.arrived(AT, direction, TAKEN[direction])
        return ["wanted"]

    def came(
        self, attempt: int = 1, *, version: int = 4, timeline: int = 0, peer: str = "p0", incarnation: int = 1
    ) -> list[str]:
        batch = EvaluationBatch(timeline, version, 0)
        try:
            timing = self.work.judge(batch, Claim(PeerId(peer), incarnation, attempt))
        except StaleMessage as error:
            return [f"refused: {error.message}"]
        if timing is Timing.WANTED:
            self.work.arrived(batch, F, f"x of attempt {attempt}")
        return [timing.name.lower()]

    def next(self) -> list[str]:
        self.task = task = self.work.next()
        if task is None:
            return ["nothing"]
        return [f"{type(task.command).__name__} number {task.number}: {', '.join(task.inputs.values()) or 'no input'}"]

    def current(self) -> list[str]:
        return ["current" if self.work.is_current(self.task) else "withdrawn"]

    def lacking(self, number: int = 1, *, index: int = 0, step: int = 5) -> list[str]:
        lacks = self.work.lacking(self.check(index, number, step=step))
        return [f"{TAKEN[direction]} of {hop.peer}" for direction, hop in lacks.items()]

    def overdue(self) -> list[str]:
        return [f"{TAKEN[direction]} of {hop.peer}" for _, direction, hop in self.work.overdue()]

    def lend(self, stage: int) -> list[str]:
        return [MADE[self.work.lend(self.check(stage=stage))]]

    def may_ask(self, output: Direction, peer: str = "here", incarnation: int = 1) -> list[str]:
        return ["yes" if self.work.may_ask(AT, output, PeerId(peer), incarnation) else "no"]

    def commit_until(self, version: int) -> list[str]:
        for step in range(self.cells.version, version):
            self.cells.commit(step, step + 1)
            self.work.commit(step)
        return []

    def commit_step(self, step: int) -> list[str]:
        self.work.commit(step)
        return []

    def drop(self, index: int, step: int) -> list[str]:
        self.work.drop(Microbatch(0, step, index))
        return []

    def known(self) -> list[str]:
        return [f"{len(self.work)} commands, newest attempt {self.work.newest_attempt()}"]


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_side_work_is_done_as_the_text_says(situation: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_work, "WAITING_MAX", 2)
    situation.check(Player().play)


def test_whatever_comes_twice_in_whatever_order_makes_one_order() -> None:
    for order in permutations(range(4)):
        player = Player()
        player.table()
        player.take(player.evaluate())
        for number in order:
            assert player.take(player.evaluate()) == ["not taken"] if number % 2 else player.came()
        assert player.next() == ["Evaluate number 1: x of attempt 1"]
        assert player.next() == ["nothing"]
