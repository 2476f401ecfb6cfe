"""Validation of the weights while training goes on: routes evaluation batches, and says how long a version must stay.

    made(v) ──▶ open: microbatches fed in order, a bounded number in flight ──all losses──▶ EvaluationRow(v, loss)
                      └── a replica of the route is lost: the whole microbatch again, attempt + 1

Evaluation v computes with weights v, which the replicas overwrite when they commit step v + staleness. So that step,
inner or outer, is not committed before evaluation v is complete (`permits`). In no other way does evaluation hold
training up, and for this reason it cannot starve. On the devices training goes first: evaluation fills the moments
without training work, and there is no such work left at the latest when a step waits for its row.

A repeated microbatch gives the same loss, so a late answer of an older attempt is only ignored. The losses are added in
order of the microbatches, as in one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.brain.outputs import EvaluationRow
from scheduler.brain.routing.policies import ReplicaLoad
from scheduler.brain.settings import BrainSettings
from swarm.job.course import PLAIN, Course
from swarm.text import counted
from swarm.types import PeerId
from swarm.wire.messages import Evaluated

IN_FLIGHT_MAX = 1024  # a stage server holds at most this many inputs whose command is late


@dataclass(frozen=True, slots=True)
class EvaluationRoute:
    """One evaluation microbatch goes to `peers`, one per stage; `displaced` were on its route before."""

    version: int
    index: int
    attempt: int
    peers: tuple[PeerId, ...]
    displaced: tuple[PeerId, ...]


@dataclass(slots=True)
class _Given:
    """A microbatch in flight; without peers it waits to be given again."""

    attempt: int
    peers: tuple[PeerId, ...]
    before: tuple[PeerId, ...] = ()


@dataclass(slots=True)
class _Run:
    """The evaluation of one version."""

    version: int
    fed: int = 0
    given: dict[int, _Given] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)


class Evaluations:
    """All evaluations of a job."""

    def __init__(self, settings: BrainSettings, course: Course = PLAIN) -> None:
        self._settings = settings
        self._course = course
        self._microbatches = settings.evaluation_microbatches
        self._is_on = settings.evaluates
        self._runs: dict[int, _Run] = {}  # in order of version
        self._outstanding: Counter[PeerId] = Counter()
        self._least_attempt = 0
        self._newest_attempt = 0
        self.duplicates = 0

    @property
    def is_idle(self) -> bool:
        return not self._runs

    @property
    def in_flight(self) -> int:
        """Microbatches that were given to replicas and not answered."""
        return sum(bool(given.peers) for run in self._runs.values() for given in run.given.values())

    def made(self, version: int) -> None:
        """A commit made this version: evaluate it if it is due."""
        settings = self._settings
        is_due = self._course.is_evaluated(version, settings.eval_every_steps, settings.steps)
        if self._is_on and self._microbatches and is_due:
            self._runs[version] = _Run(version)

    def take_over(self, *, is_here: bool = True) -> None:
        """Evaluate from now on what another island did, or leave it to another."""
        self._is_on = is_here

    def raise_attempt(self, attempt: int) -> None:
        """A replica knows of this attempt, maybe of an earlier scheduler start: new ones are greater."""
        self._least_attempt = max(self._least_attempt, attempt)

    def permits(self, step: int) -> bool:
        """Whether the row of this step may be written: its commit overwrites weights `step - staleness`."""
        return all(version > step - self._settings.staleness for version in self._runs)

    def may_feed(self, in_flight_max: int) -> bool:
        """Whether there is room, and something to give away."""
        if self.in_flight >= min(in_flight_max, IN_FLIGHT_MAX):
            return False
        waits = (
            run.fed < self._microbatches or any(not given.peers for given in run.given.values())
            for run in self._runs.values()
        )
        return any(waits)

    def feed(self, stages: Sequence[Sequence[ReplicaLoad]], in_flight_max: int) -> list[EvaluationRoute]:
        """Give microbatches away, lost ones and older versions first; `stages` has the replicas of each stage.

        At each stage the replica that is expected to be free first takes the next one, training included.
        """
        turns: list[EvaluationRoute] = []
        room = min(in_flight_max, IN_FLIGHT_MAX) - self.in_flight
        for run in self._runs.values():
            lost = [index for index, one in sorted(run.given.items()) if not one.peers]
            while room > 0 and (lost or run.fed < self._microbatches):
                peers = self._choose(stages)
                if peers is None:
                    return turns
                index = lost.pop(0) if lost else run.fed
                run.fed = max(run.fed, index + 1)
                before = run.given.get(index, _Given(0, ()))
                given = run.given[index] = _Given(max(before.attempt, self._least_attempt) + 1, peers)
                self._newest_attempt = max(self._newest_attempt, given.attempt)
                self._outstanding.update(peers)
                displaced = tuple(peer for peer in before.before if peer not in peers)
                turns.append(EvaluationRoute(run.version, index, given.attempt, peers, displaced))
                room -= 1
        return turns

    def awaits(self, peer: PeerId, event: Evaluated) -> bool:
        """Whether the peer was asked for this loss."""
        run = self._runs.get(event.batch.version)
        given = run.given.get(event.batch.index) if run is not None else None
        is_current = given is not None and given.peers[-1:] == (peer,) and given.attempt == event.attempt
        return is_current and event.batch.timeline == self._settings.timeline

    def evaluated(self, peer: PeerId, event: Evaluated) -> EvaluationRow | None:
        """A loss came; gives the row once it was the last of its version. Anything unasked changes nothing."""
        if not self.awaits(peer, event):
            self.duplicates += 1
            return None
        run = self._runs[event.batch.version]
        run.losses[event.batch.index] = event.loss
        self._outstanding.subtract(run.given.pop(event.batch.index).peers)
        if len(run.losses) < self._microbatches:
            return None
        del self._runs[run.version]
        total = 0.0
        for index in range(self._microbatches):  # left to right, as the one-process reference adds
            total += run.losses[index]
        tokens = self._settings.evaluation_tokens
        return EvaluationRow(self._settings.timeline, run.version, total / tokens, tokens)

    def withdraw(self, peer: PeerId) -> None:
        """The peer is suspect or gone: its evaluation batches are given again, as a whole."""
        for run in self._runs.values():
            for given in run.given.values():
                if peer in given.peers:
                    self._outstanding.subtract(given.peers)
                    given.before = tuple(other for other in given.peers if other != peer)
                    given.peers = ()

    def start_over(self) -> None:
        """Begin all open evaluations again, as their results so far may be wrong."""
        for version, run in self._runs.items():
            for given in run.given.values():
                self._outstanding.subtract(given.peers)
            self._runs[version] = _Run(version)
        self._least_attempt = self._newest_attempt

    def waiting_for(self) -> str:
        """The evaluation under way, for a person; empty if none."""
        for run in self._runs.values():
            steps = self._course.inner_steps(run.version)
            return (
                f"evaluation of the weights after {counted(steps, 'step')}: {len(run.losses)} of {self._microbatches}"
            )
        return ""

    def _choose(self, stages: Sequence[Sequence[ReplicaLoad]]) -> tuple[PeerId, ...] | None:
        chosen = []
        for replicas in stages:
            able = [replica for replica in replicas if replica.has_credit]
            if not able:
                return None
            chosen.append(min(able, key=self._completion_s).peer)
        return tuple(chosen)

    def _completion_s(self, load: ReplicaLoad) -> float:
        return (load.outstanding + self._outstanding[load.peer] + 1) * load.pace_s
