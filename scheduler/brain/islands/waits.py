"""What each island does, and how long each has stood at exchanges, by what it waited for. Pure.

Not chosen: states sampled every two seconds, because an exchange on fast links is shorter than that.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.brain.islands.roster import Roster
from scheduler.brain.job import JobBrain
from scheduler.brain.state.mode import Mode
from swarm.job.course import OuterCourse
from swarm.types import IslandState

WAITS = (IslandState.WAITING, IslandState.EXCHANGING)


class Waits:
    """The seconds since the job's brain began."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._seconds: dict[int, dict[IslandState, float]] = {}  # by island
        self._waiting: dict[int, IslandState] = {}  # since `_noted_s`
        self._noted_s = 0.0

    def note(self, now_s: float) -> None:
        """Record what each island waits for; it counts until the next call."""
        self._seconds = {island: dict(self.of(island, now_s)) for island in range(len(self._roster.islands))}
        found = states(self._roster)
        self._waiting, self._noted_s = {one: state for one, state in found.items() if state in WAITS}, now_s

    def of(self, island: int, now_s: float) -> Mapping[IslandState, float]:
        """Seconds that an island has waited, by state."""
        waited = dict.fromkeys(WAITS, 0.0) | self._seconds.get(island, {})
        if island in self._waiting:
            waited[self._waiting[island]] += now_s - self._noted_s
        return waited


def states(roster: Roster) -> dict[int, IslandState]:
    """What each island does now."""
    all_are_there = roster.outer_step is not None
    at_work = {n: _state(one, roster.courses[n], all_are_there) for n, one in roster.at_work().items()}
    return dict.fromkeys(roster.lost, IslandState.LOST) | at_work


def _state(island: JobBrain, course: OuterCourse, all_are_there: bool) -> IslandState:
    if island.mode in (Mode.SAVING, Mode.ENDED):
        return IslandState.SAVING
    if island.mode is not Mode.RUNNING:
        return IslandState.LOADING
    if not course.is_outer(island.agreed):
        return IslandState.TRAINING
    if island.begun > island.agreed:
        return IslandState.EXCHANGING
    if island.outer_step is None:
        return IslandState.EVALUATING
    return IslandState.EXCHANGING if all_are_there else IslandState.WAITING
