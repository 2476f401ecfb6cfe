"""What islands train is counted once, whatever order Hypothesis chooses: steps, exchanges, losses, forks, restarts.

The rules for spans, leases and rows are the product's (Roster, OuterCourse, Rows); islands are versions, and the model
is sets of portions. A portion weighs `1 << portion` tokens, so a sum of tokens names the portions that it counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.brain.islands.roster import Roster
from scheduler.brain.islands.rows import Rows
from scheduler.brain.outputs import CommitRow, Exchanged, Fork
from scheduler.brain.state.brain_state import Mode
from swarm.job.course import IslandCourse, OuterCourse


@dataclass(frozen=True, slots=True)
class Life:
    """What a roster asks the settings of an island's brain."""

    timeline: int
    first_step: int = 0
    split: tuple[int, ...] = (1,)

    def tokens_of(self, portion: int) -> int:
        return 1 << portion


@dataclass(slots=True)
class Island:
    """One that has made all steps before its version; `trained` are the portions of this life, by inner step."""

    settings: Life
    course: OuterCourse
    version: int = 0
    trained: dict[int, int] = field(default_factory=dict)
    merged: dict[int, set[int]] = field(default_factory=dict)  # by fragment
    mode: Mode = Mode.RUNNING

    @property
    def outer_step(self) -> int | None:
        return self.version if self.course.is_outer(self.version) else None

    def delegates(self, stage: int, step: int) -> tuple[()]:
        return ()


@st.composite
def courses(draw: st.DrawFn) -> list[OuterCourse]:
    islands, steps, lease = draw(st.integers(1, 3)), draw(st.integers(1, 12)), draw(st.integers(1, 5))
    fragments = draw(st.integers(1, lease))
    overlap = draw(st.integers(0, (lease - 1) // fragments))
    streams = fragments > 1 or overlap > 0
    return [OuterCourse(IslandCourse(steps, lease, islands, n), fragments, overlap, streams) for n in range(islands)]


def weight(of: Iterable[int]) -> int:
    return sum(1 << portion for portion in of)


class IslandsTile(RuleBasedStateMachine):
    """Portions: `trained` by island, `counted` by fragment, `left_out` by island and fragment when a life is lost, and
    `kept` in the steps of the job up to the newest exchange. People are told of `told` steps with these `tokens`."""

    @initialize(courses=courses(), data=st.data())
    def begin(self, courses: list[OuterCourse], data: st.DataObject) -> None:
        self.courses = courses
        self.absent = range(data.draw(st.integers(1, len(courses)), label="at work at first"), len(courses))
        made: list[Any] = [Island(Life(number), course) for number, course in enumerate(courses)]
        self.roster = Roster(made, tuple(courses), least=1, lost=dict.fromkeys(self.absent, "not placed"))
        self.rows, self.told, self.tokens = Rows(0, courses), 0, 0
        self.durable: list[CommitRow] = []
        self.forks: list[Fork] = []
        self.made: list[Exchanged] = []
        self.counted: dict[int, set[int]] = {p: set() for p in range(courses[0].fragments)}
        self.left_out: dict[tuple[int, int], set[int]] = {}
        self.trained = [set[int]() for _ in courses]
        self.is_lost_since = False  # an island, since the newest exchange
        self.kept: set[int] = set()  # of steps before the newest outer one

    def _write(self, rows: list[CommitRow], forks: Sequence[Fork] = (), made: Exchanged | None = None) -> None:
        self.durable += rows
        self.forks += forks
        self.made += [made] if made is not None else []
        told = self.rows.take(rows, forks, self.roster.present, made)
        assert [row.step for row in told.rows] == list(range(self.told, self.told + len(told.rows))), "in order, once"
        self.told += len(told.rows)
        self.tokens += sum(row.tokens for row in told.rows) - told.dropped_tokens

    def _row(self, island: Any, tokens: int = 0) -> CommitRow:
        return CommitRow(island.settings.timeline, island.version, {}, 1.0, 1.0, 1.0, 0.1, False, tokens)

    def _training(self) -> list[int]:
        at_work = self.roster.at_work()
        return [n for n, one in at_work.items() if one.outer_step is None and one.version < self.courses[n].steps]

    @precondition(lambda self: self._training())
    @rule(data=st.data(), steps=st.integers(1, 6))
    def island_trains(self, data: st.DataObject, steps: int) -> None:
        number = data.draw(st.sampled_from(self._training()))
        for _ in range(steps):
            if number in self._training():
                self._train(number)

    def _train(self, number: int) -> None:
        island: Any = self.roster.islands[number]
        portion = island.course.at(island.version).portion
        assert portion not in self.trained[number], "no life of the island has trained it before"
        self.trained[number].add(portion)
        row = self._row(island, island.settings.tokens_of(portion))
        island.trained[island.course.inner_steps(island.version)] = portion
        island.version += 1
        self._write([row])

    @precondition(lambda self: self.roster.outer_step is not None)
    @rule(anew=st.booleans())
    def islands_exchange(self, anew: bool) -> None:
        step = self.roster.outer_step
        assert step is not None
        outer, at_work = self.courses[0].outer_at(step), self.roster.at_work()
        proposed = {delegation.timeline: delegation.tokens for delegation in self.roster.delegations(step, at_work, {})}
        rows = []
        for island in at_work.values():
            made: Any = island
            merged = made.merged.setdefault(outer.fragment, set())
            new = {portion for at, portion in made.trained.items() if at < outer.captured} - merged
            assert proposed[made.settings.timeline] == weight(new), "what it has trained since, each portion once"
            assert not new & self.counted[outer.fragment], "nobody has counted it"
            merged |= new
            self.counted[outer.fragment] |= new
            self.kept |= {made.trained[at] for at in made.course.trained_before(step)}
            rows.append(self._row(made))
            made.version += 1
        begins = sorted(self.roster.lost) if anew and self.roster.may_begin_behind(step) else []
        origin = self.roster.timelines[min(at_work)]
        forks = [Fork(self.roster.next_timeline(number), origin, step + 1) for number in begins]
        self._write(rows, forks, Exchanged(step, (), False, 1.0, tuple(row.timeline for row in rows)))
        for number, fork in zip(begins, forks, strict=True):
            life: Any = Island(Life(fork.timeline, fork.version), self.courses[number], fork.version)
            self.roster.renew(number, life, ())
        self.is_lost_since = False
        assert self.tokens == weight(self.kept), "what one that is lost has trained since is taken back"

    @precondition(lambda self: len(self.roster.present) > 1)
    @rule(data=st.data())
    def island_is_lost(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.roster.present))
        life: Any = self.roster.islands[number]
        for fragment in self.counted:
            rest = set(life.trained.values()) - life.merged.get(fragment, set())
            self.left_out.setdefault((number, fragment), set()).update(rest)
        self.roster.lose(number, "it died")
        self.is_lost_since = True

    @rule()
    def scheduler_restarts(self) -> None:
        """It has the database alone. Who was lost since the newest exchange is not in there, and is noticed anew."""
        rebuilt = Rows(0, self.courses)
        made = rebuilt.rebuild(self.durable, self.forks, self.absent, self.made)
        assert [row.step for row in made] == list(range(len(made)))
        tokens = sum(row.tokens for row in made)
        if not self.is_lost_since:
            assert (len(made), tokens) == (self.told, self.tokens)
        assert rebuilt.log == self.rows.log
        self.rows, self.told, self.tokens = rebuilt, len(made), tokens

    @invariant()
    def spans_and_leases_tile(self) -> None:
        """What was trained is counted by each fragment, left out by it with a life that was lost, or waits for it."""
        for number, course in enumerate(self.courses):
            life: Any = self.roster.islands[number]
            leased = {course.inner.at(at).portion for at in range(course.inner.steps)}
            assert len(leased) == course.inner.steps
            assert self.trained[number] <= leased
            for fragment, counted in self.counted.items():
                left_out = self.left_out.get((number, fragment), set())
                is_lost = number in self.roster.lost
                pending = set() if is_lost else set(life.trained.values()) - life.merged.get(fragment, set())
                parts = [counted & leased, left_out, pending]
                assert sum(map(len, parts)) == len(self.trained[number]), "they overlap, or one is in none"
                assert set.union(*parts) == self.trained[number]
                if life.version == course.steps:
                    assert not pending, "the closing merge has all"
        every = [course.inner.at(at).portion for course in self.courses for at in range(course.inner.steps)]
        assert sorted(every) == list(range(len(every)))


TestIslandsTile = IslandsTile.TestCase
TestIslandsTile.settings = settings(max_examples=60, stateful_step_count=60)
