"""Islands in virtual time, with speeds and exchanges, whose leases the scheduler's own Pacing cuts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

from scheduler.brain.islands.pacing import Pacing
from scheduler.brain.outputs import Note, WriteRows
from scheduler.brain.state.brain_state import Mode
from swarm.job.course import IslandCourse, OuterCourse
from swarm.job.leases import Cut, Leases

Speed: TypeAlias = Callable[[float], float]  # microbatches a second, at a time
TURN_S = 0.5  # a speed is constant for so long


@dataclass(slots=True)
class Runner:
    """An island, as Pacing sees its brain."""

    begun: int = 0
    agreed: int = 0
    mode: Mode = Mode.RUNNING
    settings: Any = field(default_factory=lambda: SimpleNamespace(first_step=0))
    over_s: float = math.inf  # when its step under way is over
    lost_s: float = math.inf


@dataclass(slots=True)
class Race:
    """A job from its start on; `speeds` has one for each island, and `lost_s` when some are lost."""

    speeds: Sequence[Speed]
    steps: int = 60
    every: int = 20
    microbatches: int = 16
    overlap: int = 0
    exchange_s: float = 0.0
    step_s: Sequence[float] = ()  # what a step takes beside its microbatches, by island
    by_speed: bool = True
    carried_s: Callable[[float, float], float] = lambda at_s, for_s: at_s + for_s  # when a transfer is over
    lost_s: Mapping[int, float] = field(default_factory=dict)
    now_s: float = 0.0
    cuts: list[tuple[float, Cut]] = field(default_factory=list)
    told: list[tuple[float, str]] = field(default_factory=list)
    leases: Leases = field(init=False)
    runners: list[Runner] = field(init=False)
    courses: list[OuterCourse] = field(init=False)
    pacing: Pacing = field(init=False)
    _exchanged: tuple[int, float] = (-1, math.inf)  # the outer step under way, and when all hold its mean

    def __post_init__(self) -> None:
        count = len(self.speeds)
        self.leases = Leases(count, self.microbatches, self.steps, self.every)
        leases = self.leases if self.by_speed else None
        inner = [IslandCourse(self.steps, self.every, count, island, leases) for island in range(count)]
        self.courses = [OuterCourse(course, overlap_steps=self.overlap) for course in inner]
        self.runners = [Runner(lost_s=self.lost_s.get(island, math.inf)) for island in range(count)]
        self.begin_pacing()

    def begin_pacing(self) -> None:
        """As a scheduler that is started, with all leases that are durable."""
        roster: Any = SimpleNamespace(islands=self.runners, courses=self.courses, at_work=self.at_work)
        self.pacing = Pacing(roster, self.leases if self.by_speed else None)

    def at_work(self) -> dict[int, Runner]:
        return {number: one for number, one in enumerate(self.runners) if one.lost_s > self.now_s}

    def run(self, until_s: float = math.inf) -> float:
        """When the last step is over, or `until_s` if that comes first."""
        while not self._is_over():
            while self._go_on():
                self.pace()
            if self._is_over():
                break
            ends_s = [runner.over_s for runner in self.at_work().values()] + [self._exchanged[1]]
            ends_s += [runner.lost_s for runner in self.runners]
            following_s = min(end_s for end_s in ends_s if end_s > self.now_s)
            if following_s > until_s:
                break
            self.now_s = following_s
        return self.now_s

    def _is_over(self) -> bool:
        return all(runner.agreed >= self.courses[0].steps for runner in self.at_work().values())

    def pace(self) -> None:
        self.pacing.note(self.now_s)
        for output in self.pacing.look((), self.now_s):
            if isinstance(output, Note):
                self.told.append((self.now_s, output.message))
            for cut in output.shares if isinstance(output, WriteRows) else ():
                self.cuts.append((self.now_s, cut))
                self.pacing.durable(cut)

    def _go_on(self) -> bool:
        """Whether something happens now."""
        for island, one in self.at_work().items():
            course = self.courses[island]
            if one.over_s <= self.now_s:
                one.agreed, one.over_s = one.agreed + 1, math.inf
                return True
            is_idle = one.begun == one.agreed < course.steps
            if is_idle and not course.is_outer(one.begun) and course.may_begin(one.begun):
                usual = self.microbatches // len(self.speeds)
                one.over_s = self._trained_s(island, course.microbatches(one.begun, usual))
                one.begun += 1
                return True
        return self._exchange()

    def _exchange(self) -> bool:
        """Whether the exchange that is under way goes on: it begins once all hold what they propose."""
        at_work = self.at_work().values()
        outer = self.courses[0].next_outer(min(runner.agreed for runner in at_work))
        if outer is None:
            return False
        if self._exchanged[0] != outer.step:
            if any(runner.agreed < outer.captured_version for runner in at_work):
                return False
            self._exchanged = outer.step, self.carried_s(self.now_s, self.exchange_s)
            return True
        if self._exchanged[1] > self.now_s or any(runner.agreed != outer.step for runner in at_work):
            return False
        for runner in at_work:
            runner.begun = runner.agreed = outer.step + 1
        return True

    def _trained_s(self, island: int, microbatches: int) -> float:
        """When these microbatches are trained, begun now."""
        at_s, left, speed = self.now_s, float(microbatches), self.speeds[island]
        while left > 1e-9:
            turn_s = (math.floor(at_s / TURN_S + 1e-9) + 1) * TURN_S - at_s
            took_s = min(turn_s, left / speed(at_s)) if speed(at_s) > 0 else turn_s
            at_s, left = at_s + took_s, left - took_s * speed(at_s)
        return at_s + (self.step_s[island] if self.step_s else 0.0)
