"""The share of each island in the steps after an outer step, where shares follow speed (`swarm.job.shares`).

    rows of an outer step are durable: all begin ──inner steps──▶ each comes to the next outer step: that took it
        ──exchanged──▶ the next shares, durable with the rows of that outer step

The time of an island is measured anew between any two outer steps. Pure.

Decision: docs/decisions/126.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.brain.islands.forks import Division
from scheduler.brain.islands.roster import Roster
from scheduler.brain.outputs import CommitRow
from swarm.job.shares import Shares, next_shares


class Pacing:
    """`shares` belongs to the courses of all islands; None: shares stay equal."""

    def __init__(self, roster: Roster, shares: Shares | None) -> None:
        self._roster, self._shares = roster, shares
        self._began_s: float | None = None  # when the rows of the newest outer step were durable, if that was seen
        self._took_s: dict[int, float] = {}  # from there to the next outer step, by island
        self._next: tuple[int, ...] = ()

    def note(self, now_s: float) -> None:
        """Record which islands have come to the outer step."""
        if self._shares is None or self._began_s is None:
            return
        for island, one in self._roster.at_work().items():
            if one.outer_step is not None and now_s > self._began_s:
                self._took_s.setdefault(island, now_s - self._began_s)

    def decide(self, step: int, divisions: Iterable[Division]) -> tuple[int, ...]:
        """The shares after the outer step `step`, which was just exchanged; islands that begin there have one."""
        if self._shares is None:
            return ()
        course = self._roster.courses[0]
        newest, following = self._shares.of_cycle(course.inner.steps), course.next_outer(step + 1)
        steps = following.behind - course.inner_steps(step) if following is not None else 1
        begin = [one.island for one in divisions]
        able = sorted({*self._roster.present, *begin})
        took_s = {island: took_s for island, took_s in self._took_s.items() if island not in begin}  # by another life
        self._next = next_shares(able, newest, took_s, self._shares.microbatches, steps)
        return self._next

    def durable(self, rows: Sequence[CommitRow], now_s: float) -> None:
        """Apply the decided shares if these rows are of an outer step."""
        course = self._roster.courses[0]
        if self._shares is None or not self._next or not course.is_outer(rows[0].step):
            return
        self._shares.begin(course.inner_steps(rows[0].step), self._next)
        self._next, self._began_s, self._took_s = (), now_s, {}
