"""The load of each replica, its outstanding work and its pace: kept, and updated only where something changed.

A microbatch that is given, done, taken away or void changes the load of a few replicas. Replicas that were never
measured are assumed to be as fast as the fastest measured one in their stage, so one measurement can change several
loads.

Decisions: docs/decisions/042, 120.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from scheduler.brain.routing.policies import Lanes, ReplicaLoad, StageLoad
from scheduler.brain.state.brain_state import BrainState
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class _Replicas(Sequence[ReplicaLoad]):
    """The loads of a stage's replicas as they are now, in the order of the pool."""

    peers: Sequence[PeerId]
    loads: Mapping[PeerId, ReplicaLoad]

    def __len__(self) -> int:
        return len(self.peers)

    @overload
    def __getitem__(self, at: int) -> ReplicaLoad: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[ReplicaLoad]: ...
    def __getitem__(self, at: int | slice) -> ReplicaLoad | Sequence[ReplicaLoad]:
        return [self.loads[peer] for peer in self.peers[at]] if isinstance(at, slice) else self.loads[self.peers[at]]


class Loads:
    """The loads of all replicas of one job."""

    def __init__(self, state: BrainState) -> None:
        self._state = state
        self._pace = Pace()
        self._loads: dict[PeerId, ReplicaLoad] = {}
        self._changed: set[PeerId] = set()  # whose entry is out of date
        self._unmeasured: list[set[PeerId]] = [set() for _ in state.pool.by_stage]
        self._ranked: list[list[tuple[float, PeerId]]] = [[] for _ in state.pool.by_stage]  # as StageLoad has it
        self._stages = [
            StageLoad(stage, _Replicas(peers, self._loads), self._ranked[stage], Lanes())
            for stage, peers in enumerate(state.pool.by_stage)
        ]

    def add(self, peer: PeerId) -> None:
        self._unmeasured[self._state.pool.stage_of(peer)].add(peer)
        self._enter(peer, self._state.pool.stage_of(peer), self.load(peer))

    def remove(self, peer: PeerId, stage: int) -> None:
        self._enter(peer, stage, None)
        self._pace.forget(peer)
        self._unmeasured[stage].discard(peer)
        for other in self._state.pool.by_stage[stage]:
            self.changed(other)

    def changed(self, peer: PeerId) -> None:
        """Whether the replica may get work has changed."""
        self._changed.add(peer)

    def measured(self, peer: PeerId, seconds: float) -> None:
        """The replica took `seconds` for a microbatch."""
        self._pace.observe(peer, seconds)
        self._paced(peer)

    def waited(self, peer: PeerId, seconds: float) -> None:
        """The replica has had a microbatch for so long and is not done."""
        self._pace.waited(peer, seconds)
        self._paced(peer)

    def _paced(self, peer: PeerId) -> None:
        self._changed.add(peer)
        stage = self._state.pool.stage_of(peer)
        if self._pace.is_known(peer):
            self._unmeasured[stage].discard(peer)
        self._changed |= self._unmeasured[stage]

    def relax(self, now_s: float) -> bool:
        """Assume that slow replicas long without work became faster; gives whether any are slow."""
        faster: list[PeerId] = []
        for peers in self._state.pool.by_stage:
            idle = [peer for peer in peers if not self._state.ledger.outstanding(peer)]
            faster += self._pace.relax(idle, peers, now_s)
        self._changed.update(faster)
        return bool(faster) or self._pace.is_relaxing

    def is_measured(self, peer: PeerId) -> bool:
        return self._pace.is_known(peer)

    def measured_s(self, peer: PeerId) -> float:
        """Seconds per microbatch as measured; 0 if never."""
        return self._pace.of(peer) if self._pace.is_known(peer) else 0.0

    def pace_s(self, peer: PeerId, stage: int) -> float:
        """Seconds per microbatch of a peer in a stage."""
        return self._pace.of(peer, self._state.pool.by_stage[stage])

    def best_s(self, stage: int) -> float:
        """Seconds per microbatch of the stage's fastest replica."""
        return min((self.pace_s(peer, stage) for peer in self._state.pool.by_stage[stage]), default=0.0)

    def by_stage(self) -> list[tuple[ReplicaLoad, ...]]:
        """The loads of all replicas, up to date."""
        return [tuple(stage.replicas) for stage in self.stages()]

    def stages(self) -> Sequence[StageLoad]:
        """The loads of all stages, up to date until something changes; only what has changed is computed again."""
        pool, unknown_s = self._state.pool, dict[int, float]()
        self._changed |= self._state.ledger.take_changed()
        for peer in self._changed:
            if peer not in pool:
                continue
            stage = pool.stage_of(peer)
            if self._pace.is_known(peer):
                pace_s = self._pace.of(peer)
            elif (pace_s := unknown_s.get(stage, 0.0)) == 0.0:
                pace_s = unknown_s[stage] = self.pace_s(peer, stage)
            self._enter(peer, stage, self._load(peer, pace_s))
        self._changed.clear()
        return self._stages

    def load(self, peer: PeerId, *, keep: bool = False) -> ReplicaLoad:
        """The load of a replica. `keep`: the route must keep it, so it counts as available even if it leaves."""
        return self._load(peer, self.pace_s(peer, self._state.pool.stage_of(peer)), keep=keep)

    def _load(self, peer: PeerId, pace_s: float, *, keep: bool = False) -> ReplicaLoad:
        may_work = not self._state.pool[peer].is_suspect if keep else self._state.pool.may_work(peer)
        return ReplicaLoad(peer, self._state.ledger.outstanding(peer), pace_s, may_work)

    def _enter(self, peer: PeerId, stage: int, load: ReplicaLoad | None) -> None:
        """Replace the load of a replica and move it to its rank within its stage; None: it is gone."""
        ranked, before = self._ranked[stage], self._loads.pop(peer, None) if load is None else self._loads.get(peer)
        if before is not None and before.has_credit:
            del ranked[bisect_left(ranked, (before.completion_s, peer))]
        if load is not None:
            self._loads[peer] = load
            if load.has_credit:
                insort(ranked, (load.completion_s, peer))
        if load is not None and load.has_credit:
            self._stages[stage].lanes.enter(peer, load.pace_s)
        else:
            self._stages[stage].lanes.leave(peer)

    def validate(self) -> None:
        """Assert that the loads that are kept equal newly computed ones."""
        assert self._loads.keys() == set(self._state.pool)
        for peer, load in self._loads.items():
            assert peer in self._changed or self._state.ledger.has_changed(peer) or load == self.load(peer)
        for stage in self._stages:
            assert stage.ranked == StageLoad(stage.stage, stage.replicas).ranked
            assert stage.lanes.fits({replica.peer: replica.pace_s for replica in stage.replicas if replica.has_credit})


NEWEST = 0.3
UNKNOWN_S = 0.1
RELAXED = 1.1  # of the best pace of the stage: as good as equal
TRIED_AFTER = 30.0  # times what a replica took: all others may wait that long for a trial


class Pace:
    """How fast each replica computes, measured from its events.

    The pace of a replica is an exponential mean (weight 0.3 for the newest sample) of the device seconds that a
    microbatch took, forward and backward together. A replica that was never measured is assumed to be as fast as the
    fastest of its stage: it is tried soon, and its outstanding work keeps it from being flooded. One that was slow and
    has no work is tried again at times, and its answer counts more than what was known.

    Source: shared least expected completion, algorithms in SWARM (arXiv 2301.11913) appendix C. There each trainer
    measures seconds; that the stage server reports them is ours.
    """

    def __init__(self) -> None:
        self._mean_s: dict[PeerId, float] = {}
        self._took_s: dict[PeerId, float] = {}  # the newest sample
        self._relaxed: set[PeerId] = set()  # since their newest sample
        self._idle_since_s: dict[PeerId, float] = {}  # of slow replicas

    def observe(self, peer: PeerId, seconds: float) -> None:
        """Take in a sample; anything but a positive, finite number of seconds is ignored."""
        if not 0.0 < seconds < float("inf"):
            return
        if peer in self._relaxed:
            self._relaxed.discard(peer)
            del self._mean_s[peer]
        self._took_s[peer] = seconds
        self.waited(peer, seconds)

    def waited(self, peer: PeerId, seconds: float) -> None:
        """The replica has had a computation for so long and is not done, whatever keeps it."""
        if not 0.0 < seconds < float("inf"):
            return
        mean_s = self._mean_s.get(peer)
        self._mean_s[peer] = seconds if mean_s is None else NEWEST * seconds + (1.0 - NEWEST) * mean_s

    def relax(self, idle: Iterable[PeerId], stage: Sequence[PeerId], now_s: float) -> list[PeerId]:
        """Assume that slow replicas without work became faster: halve their distance to the best of their stage.

        Otherwise a replica that was slow for a while would never be tried again. One that did compute slowly, and not
        only kept others waiting, must have been idle for long, because a trial makes others wait. It is then believed
        to be as good as the best, so that it is tried. Gives those whose pace changed.
        """
        best_s = min((self._mean_s[peer] for peer in stage if peer in self._mean_s), default=0.0)
        best_took_s = min((self._took_s[peer] for peer in stage if peer in self._took_s), default=0.0)
        slow = {peer for peer in idle if self._mean_s.get(peer, 0.0) > RELAXED * best_s}
        for peer in self._idle_since_s.keys() & set(stage) - slow:
            del self._idle_since_s[peer]
        changed = []
        for peer in sorted(slow):
            took_s = self._took_s.get(peer, 0.0)
            if took_s > RELAXED * best_took_s:
                if now_s - self._idle_since_s.setdefault(peer, now_s) < TRIED_AFTER * took_s:
                    continue
                del self._idle_since_s[peer]
                self._relaxed.add(peer)
                self._mean_s[peer] = best_s
            else:
                self._mean_s[peer] = (self._mean_s[peer] + best_s) / 2.0
            changed.append(peer)
        return changed

    @property
    def is_relaxing(self) -> bool:
        """Whether a slow replica is idle and will be believed to be faster in time."""
        return bool(self._idle_since_s)

    def of(self, peer: PeerId, stage: Iterable[PeerId] = ()) -> float:
        """Seconds per microbatch of the peer; if unknown, the best of `stage`; if that is unknown too, 0.1."""
        known = self._mean_s.get(peer)
        if known is not None:
            return known
        return min((self._mean_s[other] for other in stage if other in self._mean_s), default=UNKNOWN_S)

    def is_known(self, peer: PeerId) -> bool:
        return peer in self._mean_s

    def forget(self, peer: PeerId) -> None:
        """The peer left; a later incarnation is measured anew."""
        for kept in (self._mean_s, self._took_s, self._idle_since_s):
            kept.pop(peer, None)
        self._relaxed.discard(peer)
