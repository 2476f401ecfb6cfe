"""Routing policies: choose the replica for each hop of a microbatch.

 stage 0        stage 1        stage 2
cost(a) ──────▶ cost(c) ──────▶ cost(e)      cost of a replica: (outstanding + 1) * pace_s
     ╲        ╱        ╲        ╱             cost of a link: its transfer seconds
cost(b) ──────▶ cost(d) ──────▶ cost(f)      the cheapest path is the route

That is `least_completion`, the default; without costs of links no stage influences another, unless the replicas of
several stages are unequal: then a route leads from like to like (`Lanes`). `iwrr` gives each replica a
share of the work that is inverse to its measured seconds, and `uniform` chooses at random; both exist for comparison
(benchmarks/models/routing.py). All three are a `RoutingPolicy`, and avoid links that fail. SWARM calls this stochastic
wiring.

Decisions: docs/decisions/042, 120.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from random import Random
from typing import TypeAlias

from scheduler.brain.state.links import Links
from swarm.text import counted
from swarm.types import Decision, PeerId, Routing

LinkCost: TypeAlias = Callable[[PeerId, PeerId], float]
"""Seconds to carry one boundary tensor between two peers."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The outstanding work of a replica, in microbatches; without credit it takes no new work."""

    peer: PeerId
    outstanding: float
    pace_s: float
    has_credit: bool = True

    @property
    def completion_s(self) -> float:
        """Expected seconds until one more microbatch is done here."""
        return (self.outstanding + 1) * self.pace_s


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The replicas that may take the hop at one stage; ties between them are listed in their order.

    `kept_ranked` has the replicas with credit by (completion_s, peer). With it and `kept_lanes` a policy need not sort
    anew; where replicas are unequal, it still looks at the replicas of a lane.
    """

    stage: int
    replicas: Sequence[ReplicaLoad]
    kept_ranked: Sequence[tuple[float, PeerId]] | None = None
    kept_lanes: Lanes | None = None

    @property
    def ranked(self) -> Sequence[tuple[float, PeerId]]:
        """Those with credit and their `completion_s`, soonest first."""
        if self.kept_ranked is not None:
            return self.kept_ranked
        return sorted((replica.completion_s, replica.peer) for replica in self.replicas if replica.has_credit)

    @property
    def lanes(self) -> Lanes:
        """The lanes of those with credit."""
        if self.kept_lanes is not None:
            return self.kept_lanes
        lanes = Lanes()
        for replica in self.replicas:
            if replica.has_credit:
                lanes.enter(replica.peer, replica.pace_s)
        return lanes


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `choose` is asked, once each stage has a replica with credit."""

    loads: Sequence[StageLoad]
    now_s: float
    rng: Random
    to_do: float
    of_step: float
    links: Links | None


class RoutingPolicy:
    """A way to choose routes. `choose` changes nothing; the other calls say what happened, and may be ignored."""

    def add(self, peer: PeerId, stage: int) -> None:
        """The peer may be chosen from now on: it is new, or a suspect that was heard again."""

    def remove(self, peer: PeerId) -> None:
        """Forget a peer that is suspect or gone."""

    def given(self, peer: PeerId, units: float = 1.0) -> None:
        """The peer was given `units` of work; one microbatch, forward and backward, is one unit."""

    def done(self, peer: PeerId, seconds: float, units: float = 1.0) -> None:
        """The peer finished `units` of work in `seconds`, waiting included."""

    def choose(
        self,
        loads: Sequence[StageLoad],
        now_s: float,
        rng: Random,
        to_do: float = math.inf,
        of_step: float = 0.0,
        links: Links | None = None,
    ) -> Decision[tuple[PeerId, ...]]:
        """One replica with credit per stage, or no plan and why. All randomness comes from `rng`.

        `to_do`: the microbatches that are in flight or can be fed before the next commit. `of_step`: the ones of this
        microbatch's step and older steps. `links`: given while any link fails; a route then has as few failing links
        as can be.
        """
        if lacking := _lacking(loads):
            return Decision(None, lacking)
        return self._choose(_Asked(loads, now_s, rng, to_do, of_step, links))

    @abstractmethod
    def _choose(self, asked: _Asked) -> Decision[tuple[PeerId, ...]]: ...


AS_GOOD = 1.1  # of the least completion: smaller differences mean nothing, as paces and queues are estimates
PACE_POWER = 0.75  # the power of the pace: 1 = all queues end at the same time, 0 = all queues are equally long


class LeastCompletion(RoutingPolicy):
    """Where the microbatch is expected to finish first; among equally good replicas, the one that has waited longest.

    Random ties would let one queue run empty while another grows. Turns keep the flow even.
    """

    def __init__(self) -> None:
        self._given: dict[PeerId, int] = {}  # when each peer was given work, as a count of all work given
        self._count = 0

    def remove(self, peer: PeerId) -> None:
        self._given.pop(peer, None)

    def given(self, peer: PeerId, units: float = 1.0) -> None:
        self._count += 1
        self._given[peer] = self._count

    def _choose(self, asked: _Asked) -> Decision[tuple[PeerId, ...]]:
        loads, links, rng = asked.loads, asked.links, asked.rng
        if links is not None:
            return choose_route(loads, asked.now_s, rng, links.cost_s, links.touches)
        ranked = [load.ranked for load in loads]
        if sum(load.lanes.is_unequal for load in loads) > 1:
            path = self._like_to_like(loads, asked.to_do, asked.of_step, rng)
        else:
            path = tuple(self._next(load, soonest, rng) for load, soonest in zip(loads, ranked, strict=True))
        cost_s = sum(soonest[0][0] for soonest in ranked)
        return Decision(path, f"expected to finish in {cost_s:.3g} s at {asked.now_s:.3f}: {' > '.join(path)}")

    def _like_to_like(
        self, loads: Sequence[StageLoad], to_do: float, of_step: float, rng: Random
    ) -> tuple[PeerId, ...]:
        """A route through replicas that stand alike in their stages: slow ones behind slow ones, fast behind fast.

        While there is much to do, slow replicas get a little more than would end with the others, as a pipeline needs
        about the same number in flight at any speed. No replica gets work that it would end after all the others, and
        no route leads through several slow ones that would be late together. A replica without work may take what ends
        before its own step is committed: a step may have less for it than a whole microbatch.
        """
        per_s = min(load.lanes.per_s for load in loads if load.lanes.is_unequal)
        others_s, step_s = to_do / per_s, max(to_do, of_step) / per_s
        lane, path = ALL, list[PeerId]()
        behind_s = 0.0  # the fastest route
        for load in loads:
            lanes, ranked = load.lanes, load.ranked
            if lanes.is_unequal:
                idle = {replica.peer for replica in load.replicas if not replica.outstanding}
                in_time = [
                    (cost_s, peer)
                    for cost_s, peer in ranked
                    if max(cost_s, behind_s + lanes.pace_s(peer)) <= (step_s if peer in idle else others_s)
                ]
                near = set(lanes.beside(lane))
                in_time = [pair for pair in in_time if pair[1] in near] or in_time
                weighted = sorted((cost_s * lanes.pace_s(peer) ** (PACE_POWER - 1.0), peer) for cost_s, peer in in_time)
                ranked = weighted or ranked
            path.append(self._next(load, ranked, rng))
            if lanes.is_unequal:
                lane = lanes.of(path[-1])
                behind_s += lanes.pace_s(path[-1]) - lanes.best_s
        return tuple(path)

    def _next(self, load: StageLoad, ranked: Sequence[tuple[float, PeerId]], rng: Random) -> PeerId:
        good = bisect_right(ranked, AS_GOOD * ranked[0][0], key=itemgetter(0))
        given = {peer: self._given.get(peer, 0) for _, peer in ranked[:good]}
        longest = min(given.values())
        tied = [peer for peer, since in given.items() if since == longest]
        if len(tied) > 1:  # they were never given anything
            tied = [replica.peer for replica in load.replicas if given.get(replica.peer) == longest]
        return _one_of(tied, rng)


class Uniform(RoutingPolicy):
    """Any replica, with equal probability: the baseline that knows nothing."""

    def _choose(self, asked: _Asked) -> Decision[tuple[PeerId, ...]]:
        return _by_stage(asked, lambda peers: _one_of(peers, asked.rng), "at random")


IWRR_NEWEST = 0.1
IWRR_PRIOR_S = 1.0


@dataclass(slots=True)
class _RoundRobin:
    """A replica's place in the weighted round: `tag` is its virtual finish time."""

    stage: int
    tag: float
    decayed_s: float = 0.0
    weight: float = 0.0  # of the samples in `decayed_s`: 1 - (1 - g)^n

    @property
    def unit_s(self) -> float:
        """Expected seconds per unit."""
        return self.decayed_s / self.weight if self.weight else IWRR_PRIOR_S


class Iwrr(RoutingPolicy):
    """Interleaved weighted round robin: each replica's share of the work is inverse to its measured seconds per unit.

    The replica with the smallest tag is next. Its tag grows at once by the seconds that the work is expected to take.
    Seconds per unit are an exponential mean (0.1 for the newest sample, corrected for its start), and 1.0 before the
    first sample. A newcomer starts at the smallest tag of its stage: it is tried soon, and not flooded.

    Source: stochastic wiring, SWARM (arXiv 2301.11913) appendix C. There every trainer learns alone; here one policy
    learns for all.
    """

    def __init__(self) -> None:
        self._turns: dict[PeerId, _RoundRobin] = {}

    def add(self, peer: PeerId, stage: int) -> None:
        if peer not in self._turns:
            least = min((turns.tag for turns in self._turns.values() if turns.stage == stage), default=0.0)
            self._turns[peer] = _RoundRobin(stage, least)

    def remove(self, peer: PeerId) -> None:
        self._turns.pop(peer, None)

    def given(self, peer: PeerId, units: float = 1.0) -> None:
        if (turns := self._turns.get(peer)) is not None:
            turns.tag += units * turns.unit_s

    def done(self, peer: PeerId, seconds: float, units: float = 1.0) -> None:
        turns = self._turns.get(peer)
        if turns is None or not 0.0 < seconds < float("inf"):
            return
        turns.decayed_s = IWRR_NEWEST * seconds / units + (1.0 - IWRR_NEWEST) * turns.decayed_s
        turns.weight = IWRR_NEWEST + (1.0 - IWRR_NEWEST) * turns.weight

    def _choose(self, asked: _Asked) -> Decision[tuple[PeerId, ...]]:
        return _by_stage(asked, lambda peers: self._next(peers, asked.rng), "next in the weighted round")

    def _next(self, peers: Sequence[PeerId], rng: Random) -> PeerId:
        # A removed replica is offered only if a route must keep it.
        tags = {peer: self._turns[peer].tag if peer in self._turns else 0.0 for peer in peers}
        least = min(tags.values())
        return _one_of([peer for peer, tag in tags.items() if tag == least], rng)


POLICIES: dict[Routing, Callable[[], RoutingPolicy]] = {
    "least_completion": LeastCompletion,
    "iwrr": Iwrr,
    "uniform": Uniform,
}


def choose_route(
    loads: Sequence[StageLoad],
    now_s: float,
    rng: Random,
    link_s: LinkCost,
    has_costly: Callable[[PeerId], bool] = lambda peer: True,
) -> Decision[tuple[PeerId, ...]]:
    """Pick one replica per stage so that the microbatch is expected to finish first, costs of links included.

    Cost of a replica is (outstanding + 1) * pace_s, of a link its transfer seconds; the cheapest path over all stages
    is found in O(stages * replicas^2). Ties are broken by `rng`. No plan if some stage has no replica with credit.
    Links cost nothing to and from a peer that does not have a costly one; few such peers make it O(stages * replicas).

    Source: stochastic wiring, SWARM (arXiv 2301.11913) section 3.2; shared load instead of private heaps is ours.
    """
    if lacking := _lacking(loads):
        return Decision(None, lacking)
    path, cost_s = _cheapest_path(_with_credit(loads), link_s, has_costly, rng)
    return Decision(path, f"expected to finish in {cost_s:.3g} s at {now_s:.3f}: {' > '.join(path)}")


def _by_stage(asked: _Asked, pick: Callable[[Sequence[PeerId]], PeerId], how: str) -> Decision[tuple[PeerId, ...]]:
    """Pick one replica of each stage after the other, among those with which the route has the fewest failing links."""
    links, pools = asked.links, [[replica.peer for replica in pool] for pool in _with_credit(asked.loads)]
    path: list[PeerId] = []
    if links is None:
        path = [pick(peers) for peers in pools]
    else:
        for peers, ahead in zip(pools, _failing_ahead(pools, links), strict=True):
            costs = {peer: ahead[peer] + (links.fails(path[-1], peer) if path else 0) for peer in peers}
            path.append(pick([peer for peer in peers if costs[peer] == min(costs.values())]))
    return Decision(tuple(path), f"{how}: {' > '.join(path)}")


def _failing_ahead(pools: Sequence[Sequence[PeerId]], links: Links) -> list[dict[PeerId, int]]:
    """For each stage and replica: the fewest failing links from there to the last stage."""
    ahead = [dict.fromkeys(pools[-1], 0)]
    for peers in reversed(pools[:-1]):
        beyond = ahead[0]
        ahead.insert(0, {peer: min(links.fails(peer, to) + count for to, count in beyond.items()) for peer in peers})
    return ahead


def _with_credit(loads: Sequence[StageLoad]) -> list[list[ReplicaLoad]]:
    return [[replica for replica in load.replicas if replica.has_credit] for load in loads]


def _lacking(loads: Sequence[StageLoad]) -> str:
    """Why no route is possible; empty if each stage has a replica with credit."""
    for load in loads:
        if not any(replica.has_credit for replica in load.replicas):
            replicas = counted(len(load.replicas), "replica")
            full = f"no credit left at {replicas}" if load.replicas else "no replica"
            return f"stage {load.stage}: {full}"
    return ""


def _cheapest_path(
    pools: Sequence[list[ReplicaLoad]], link_s: LinkCost, has_costly: Callable[[PeerId], bool], rng: Random
) -> tuple[tuple[PeerId, ...], float]:
    """Dynamic programming from the first stage to the last: the best way to reach each replica."""
    reach: dict[PeerId, tuple[float, tuple[PeerId, ...]]] = {
        replica.peer: (replica.completion_s, (replica.peer,)) for replica in pools[0]
    }
    for pool in pools[1:]:
        following: dict[PeerId, tuple[float, tuple[PeerId, ...]]] = {}
        free = _nearest({peer: cost_s for peer, (cost_s, _) in reach.items()})
        for replica in pool:
            nearest_s, nearest = free
            if has_costly(replica.peer):
                arrivals = {peer: cost_s + link_s(peer, replica.peer) for peer, (cost_s, _) in reach.items()}
                nearest_s, nearest = _nearest(arrivals)
            via = _one_of(nearest, rng)
            following[replica.peer] = (nearest_s + replica.completion_s, (*reach[via][1], replica.peer))
        reach = following
    best_s, best = _nearest({peer: cost_s for peer, (cost_s, _) in reach.items()})
    return reach[_one_of(best, rng)][1], best_s


def _nearest(costs_s: Mapping[PeerId, float]) -> tuple[float, list[PeerId]]:
    """The least cost, and the replicas that have it."""
    least_s = min(costs_s.values())
    return least_s, [peer for peer, cost_s in costs_s.items() if cost_s == least_s]


def _one_of(peers: Sequence[PeerId], rng: Random) -> PeerId:
    return peers[0] if len(peers) == 1 else rng.choice(peers)


UNEQUAL = 1.5  # slowest to fastest pace of a stage: below that every route is good
DRIFT = 1.25  # of a pace, before the lanes are drawn anew
BESIDE = 0.1  # of the narrower of two lanes: a smaller overlap is an error of measurement


@dataclass(frozen=True, slots=True)
class Lane:
    """A part of [0, 1)."""

    start: float
    stop: float

    def meets(self, other: Lane) -> bool:
        """Whether they overlap by a tenth of the narrower one."""
        shared = min(self.stop, other.stop) - max(self.start, other.start)
        return shared > BESIDE * min(self.stop - self.start, other.stop - other.start)


ALL = Lane(0.0, 1.0)


class Lanes:
    """Where each replica of a stage stands among the others by speed, so that a route can lead from like to like.

        stage 0    | slow |     medium     |              fast              |       a replica's lane is as wide as its
        stage 1    |  slow    |  slow   |               fast                |       share of the stage's speed
                   0                                                        1

    A microbatch that passes through a slow and a fast replica is in flight as long as the slow one takes, and counts as
    work of the fast one meanwhile. The fast replica runs dry although it seems busy. A route within one lane has no
    such partners.
    """

    def __init__(self) -> None:
        self._pace_s: dict[PeerId, float] = {}  # as the lanes were drawn
        self._order: list[PeerId] = []
        self._of: dict[PeerId, Lane] = {}
        self._starts: list[float] = []
        self._is_stale = False
        self._is_unequal = False
        self._per_s = 0.0

    def enter(self, peer: PeerId, pace_s: float) -> None:
        """The replica may get work and needs `pace_s` > 0 seconds for a microbatch."""
        drawn_s = self._pace_s.get(peer, 0.0)
        if not drawn_s / DRIFT <= pace_s <= drawn_s * DRIFT:
            self._pace_s[peer] = pace_s
            self._is_stale = True

    def leave(self, peer: PeerId) -> None:
        """The replica gets no work any more; nothing happens if it is unknown."""
        self._is_stale |= self._pace_s.pop(peer, None) is not None

    @property
    def is_unequal(self) -> bool:
        """Whether the slowest replica takes more than half as long again as the fastest."""
        self._draw()
        return self._is_unequal

    @property
    def per_s(self) -> float:
        """Microbatches per second of all replicas together."""
        self._draw()
        return self._per_s

    @property
    def best_s(self) -> float:
        """The pace of the fastest replica, as the lanes were drawn."""
        self._draw()
        return self._pace_s[self._order[-1]]

    def pace_s(self, peer: PeerId) -> float:
        """Seconds per microbatch, as the lanes were drawn."""
        return self._pace_s[peer]

    def of(self, peer: PeerId) -> Lane:
        self._draw()
        return self._of[peer]

    def beside(self, lane: Lane) -> list[PeerId]:
        """The replicas whose lanes meet this one, slowest first."""
        self._draw()
        first = max(0, bisect_right(self._starts, lane.start) - 1)
        last = bisect_left(self._starts, lane.stop)
        return [peer for peer in self._order[first:last] if self._of[peer].meets(lane)]

    def fits(self, paces_s: Mapping[PeerId, float]) -> bool:
        """Whether these are the replicas that may get work, with about the known paces."""
        drawn_s = self._pace_s
        return drawn_s.keys() == paces_s.keys() and all(
            drawn_s[peer] / DRIFT <= pace_s <= drawn_s[peer] * DRIFT for peer, pace_s in paces_s.items()
        )

    def _draw(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        self._order = sorted(self._pace_s, key=lambda peer: (-self._pace_s[peer], peer))
        paces_s = [self._pace_s[peer] for peer in self._order]
        self._is_unequal = bool(paces_s) and paces_s[0] > UNEQUAL * paces_s[-1]
        *before, self._per_s = accumulate((1.0 / pace_s for pace_s in paces_s), initial=0.0)
        self._starts = [done / self._per_s for done in before]
        lanes = map(Lane, self._starts, [*self._starts[1:], 1.0])
        self._of = dict(zip(self._order, lanes, strict=True))
