"""Routes by the scheduler's policy beside routes by a minimum-cost flow through all stages, as in GWTF.

    python -m benchmarks.models.flow [--seconds 600] [--seeds 2] [--output json]

64 peers of eight cities (cities.py), 8 in each, one for each of 8 stages, at speeds 1:2:4. A microbatch takes 0.57 s
forward and 1.43 s backward at speed 1, with lognormal noise of sigma 0.1, and its boundary tensor has 16 MB. A peer
computes one after the other; a tensor takes delay + size / rate, and links are never full. So many microbatches are in
flight all the time. With deaths a peer dies 0.2 times an hour and is back 300 s later; what it was given goes to
another replica of the stage, which computes the forward again.

    flow               the most that all stages can carry, by the routes of the least cost d, known anew at each death:
                       d(i, j) = (c_i + c_j) / 2 + (delay_ij + delay_ji) / 2 + 2 size / (rate_ij + rate_ji)
    least_completion   this project's default
    private heaps      SWARM's: each of 8 trainers learns alone how fast replicas are
    uniform            at random

Source: GWTF, arXiv 2509.21221, section 4 (the flow is solved here as a linear program); SWARM, arXiv 2301.11913,
appendix C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count, product
from math import exp, inf
from random import Random
from statistics import fmean

import numpy as np
from scipy.optimize import linprog

from benchmarks.models.cities import CITIES, eight_cities
from benchmarks.models.published import Figure, parser, tell
from scheduler.brain.routing.loads import Pace
from scheduler.brain.routing.policies import POLICIES, ReplicaLoad, StageLoad
from swarm.types import PeerId, Routing

STAGES, SPEEDS = 8, (1.0, 2.0, 4.0)
FORWARD_S, BACKWARD_S, NOISE = 2.0 / 3.5, 5.0 / 3.5, 0.1  # of a microbatch at speed 1
TENSOR_BYTES = 16e6
IN_FLIGHT, TRAINERS = (128, 256), 8
AWAY_S, DEATHS = 300.0, (0.0, 0.2)  # per peer and hour
WARMUP_S = 120.0
DELAY_S, BITS_PER_S = eight_cities(1)
LEAST = 0.95  # of what the flow does


@dataclass(eq=False)
class Server:
    """A peer; it computes one task after the other."""

    name: PeerId
    stage: int
    city: int
    speed: float
    is_here: bool = True
    lives: int = 0
    free_s: float = 0.0  # when it is done with all tasks
    given: float = 0.0  # microbatches that are not done

    def link_s(self, to: Server) -> float:
        """Seconds until a tensor is there."""
        return DELAY_S[self.city][to.city] + 8.0 * TENSOR_BYTES / BITS_PER_S[self.city][to.city]


class ByFlow:
    """Each replica is chosen as often as the flow into it says, from wherever the tensor comes."""

    def __init__(self) -> None:
        self.flows: dict[tuple[Server | None, Server], float] = {}
        self.turns: dict[tuple[Server | None, Server], float] = {}

    def know(self, pools: Sequence[Sequence[Server]]) -> None:
        """Find the flow through these replicas: the most, then the cheapest of these."""
        edges: list[tuple[Server | None, Server]] = [(None, to) for to in pools[0]]
        edges += [(since, to) for stage, pool in enumerate(pools[1:]) for since in pools[stage] for to in pool]
        limits, capacity = np.zeros((sum(map(len, pools)), len(edges))), []
        kept = np.zeros((sum(map(len, pools[:-1])), len(edges)))
        for row, server in enumerate(server for pool in pools for server in pool):
            limits[row] = [float(to is server) for _, to in edges]
            capacity.append(server.speed / (FORWARD_S + BACKWARD_S))
            if server.stage + 1 < STAGES:
                kept[row] = [float(to is server) - float(since is server) for since, to in edges]
        from_source = np.array([float(since is None) for since, _ in edges])
        costs = [0.0 if since is None else _cost_s(since, to) for since, to in edges]
        equal = {"A_eq": kept, "b_eq": np.zeros(len(kept)), "method": "highs"}
        most = -linprog(-from_source, A_ub=limits, b_ub=capacity, **equal).fun
        limits, capacity = np.vstack([limits, -from_source]), [*capacity, -most * (1.0 - 1e-9)]
        found = linprog(costs, A_ub=limits, b_ub=capacity, **equal).x
        self.flows = {edge: float(flow) for edge, flow in zip(edges, found, strict=True) if flow > 1e-9}
        self.turns = dict.fromkeys(self.flows, 0.0)

    def next(self, since: Server | None, pool: Sequence[Server]) -> Server:
        """The replica whose turn it is behind this one; any if the flow has none."""
        edges = [edge for edge in self.flows if edge[0] is since and edge[1] in pool]
        if not edges:
            return max(pool, key=lambda server: (server.speed / (1.0 + server.given), server.name))
        chosen = min(edges, key=lambda edge: (self.turns[edge] + 1.0 / self.flows[edge], edge[1].name))
        self.turns[chosen] += 1.0 / self.flows[chosen]
        return chosen[1]


def _cost_s(server: Server, to: Server) -> float:
    computes = FORWARD_S + BACKWARD_S
    return (computes / server.speed + computes / to.speed + server.link_s(to) + to.link_s(server)) / 2.0


class Fleet:
    """Virtual time, the peers, and one way to route."""

    def __init__(self, routing: Routing | None, trainers: int, in_flight: int, deaths: float, seed: int) -> None:
        """`routing` is a policy of which each trainer has its own; None: by flow. `deaths` are per peer and hour."""
        self.rng, self.dice, self.fate = Random(seed), Random(seed + 1), Random(seed + 2)
        self.policies = [POLICIES[routing]() for _ in range(trainers)] if routing else []
        self.flow, self.pace, self.now_s, self.done = ByFlow(), Pace(), 0.0, 0
        self.on_links_s = 0.0  # of all tensors
        self.in_flight, self.deaths = in_flight, deaths
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.pools: list[list[Server]] = [[] for _ in range(STAGES)]
        for stage, city in product(range(STAGES), range(len(CITIES))):
            speed = SPEEDS[(stage + city) % len(SPEEDS)]
            self.pools[stage].append(Server(PeerId(f"{stage}.{city}"), stage, city, speed, is_here=False))
        self.names = [[server.name for server in pool] for pool in self.pools]
        for server in chain(*self.pools):
            self._comes(server)
        self._changed()

    def run(self, seconds: float) -> float:
        """Microbatches per second, after the warm-up."""
        for number in range(self.in_flight):
            Microbatch(self, number).begin()
        for until_s in (WARMUP_S, WARMUP_S + seconds):
            self.done, self.on_links_s = 0, 0.0
            while self._events[0][0] <= until_s:
                self.now_s, _, event = heappop(self._events)
                event()
        return self.done / seconds

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heappush(self._events, (self.now_s + seconds, next(self._order), event))

    def choose(self, stages: Sequence[int], since: Server | None, trainer: int) -> list[Server]:
        """A replica of each of these stages for a microbatch of a trainer."""
        pools = [[server for server in self.pools[stage] if server.is_here] for stage in stages]
        chosen: list[Server] = []
        for pool in pools if not self.policies else ():
            chosen.append(self.flow.next(chosen[-1] if chosen else since, pool))
        if self.policies:
            policy = self.policies[trainer % len(self.policies)]
            loads = [StageLoad(pool[0].stage, [self._load(server) for server in pool]) for pool in pools]
            names = policy.choose(loads, self.now_s, self.dice, self.in_flight, self.in_flight).plan or ()
            chosen = [
                next(server for server in pool if server.name == name) for pool, name in zip(pools, names, strict=True)
            ]
            for name in names:
                policy.given(name)
        for server in chosen:
            server.given += 1.0
        return chosen

    def finished(self, server: Server, trainer: int, seconds: float, computed_s: float) -> None:
        """A replica is done with a microbatch, forward and backward, waiting included in `seconds`."""
        server.given -= 1.0
        self.pace.observe(server.name, computed_s)
        if self.policies:
            self.policies[trainer % len(self.policies)].done(server.name, seconds)

    def serve(self, server: Server, seconds: float, then: Callable[[float], None], lost: Callable[[], None]) -> None:
        """Queue a computation; `then` gets its seconds. `lost` is called instead, when it should be done, if the peer
        is away or dies meanwhile."""
        takes_s = seconds / server.speed * exp(self.rng.gauss(0.0, NOISE))
        lives = server.lives if server.is_here else -1
        server.free_s = max(server.free_s, self.now_s) + takes_s
        self.after(
            server.free_s - self.now_s, lambda: then(takes_s) if server.is_here and server.lives == lives else lost()
        )

    def _load(self, server: Server) -> ReplicaLoad:
        return ReplicaLoad(server.name, server.given, self.pace.of(server.name, self.names[server.stage]))

    def _comes(self, server: Server) -> None:
        server.is_here, server.lives, server.free_s, server.given = True, server.lives + 1, self.now_s, 0.0
        for policy in self.policies:
            policy.add(server.name, server.stage)
        if self.deaths:
            self.after(self.fate.expovariate(self.deaths / 3600.0), lambda: self._dies(server))

    def _dies(self, server: Server) -> None:
        if sum(other.is_here for other in self.pools[server.stage]) > 1:
            server.is_here = False
            for policy in self.policies:
                policy.remove(server.name)
            self._changed()
            self.after(AWAY_S, lambda: (self._comes(server), self._changed()))

    def _changed(self) -> None:
        if not self.policies:
            self.flow.know([[server for server in pool if server.is_here] for pool in self.pools])


class Microbatch:
    """One microbatch on its way through all stages and back; then the next of its trainer."""

    def __init__(self, fleet: Fleet, trainer: int) -> None:
        self.fleet, self.trainer = fleet, trainer
        self.route: list[Server] = []
        self.spent = [[0.0, 0.0] for _ in range(STAGES)]  # seconds at each stage, and those of computing

    def begin(self) -> None:
        self.route = self.fleet.choose(range(STAGES), None, self.trainer)
        self._forward(0)

    def _forward(self, stage: int) -> None:
        self._compute(stage, FORWARD_S, lambda: self._send(stage, stage + 1, self._forward))

    def _backward(self, stage: int) -> None:
        self._compute(stage, BACKWARD_S, lambda: self._returned(stage))

    def _compute(self, stage: int, seconds: float, then: Callable[[], None]) -> None:
        fleet, since_s = self.fleet, self.fleet.now_s

        def done(takes_s: float) -> None:
            spent = self.spent[stage]
            spent[0], spent[1] = spent[0] + fleet.now_s - since_s, spent[1] + takes_s
            then()

        def lost() -> None:  # the forward is computed again at another one
            since = self.route[stage - 1] if stage else None
            (self.route[stage],), self.spent[stage] = fleet.choose([stage], since, self.trainer), [0.0, 0.0]
            self._compute(stage, seconds if seconds == FORWARD_S else FORWARD_S + BACKWARD_S, then)

        fleet.serve(self.route[stage], seconds, done, lost)

    def _send(self, since: int, to: int, then: Callable[[int], None]) -> None:
        if to == STAGES:
            self._backward(since)
        else:
            link_s = self.route[since].link_s(self.route[to])
            self.fleet.on_links_s += link_s
            self.fleet.after(link_s, lambda: then(to))

    def _returned(self, stage: int) -> None:
        self.fleet.finished(self.route[stage], self.trainer, *self.spent[stage])
        if stage:
            self._send(stage, stage - 1, self._backward)
        else:
            self.fleet.done += 1
            Microbatch(self.fleet, self.trainer).begin()


# Its policy, and how many trainers learn alone; flow has none.
WAYS: dict[str, tuple[Routing | None, int]] = {
    "flow": (None, 1),
    "least_completion": ("least_completion", 1),
    "private heaps": ("iwrr", TRAINERS),
    "uniform": ("uniform", 1),
}


def speeds(in_flight: int, deaths: float, seeds: int, seconds: float) -> dict[str, tuple[float, float]]:
    """Microbatches per second of each way, and how many seconds each is on links; means of the seeds."""
    found = {}
    for way, (routing, trainers) in WAYS.items():
        fleets = [Fleet(routing, trainers, in_flight, deaths, 1000 * seed) for seed in range(seeds)]
        per_s = fmean(fleet.run(seconds) for fleet in fleets)
        found[way] = per_s, fmean(fleet.on_links_s / fleet.done for fleet in fleets)
    return found


def figures(seeds: int, seconds: float) -> list[Figure]:
    found = []
    for in_flight, deaths in product(IN_FLIGHT, DEATHS):
        by_way = speeds(in_flight, deaths, seeds, seconds)
        for way, (per_s, on_links_s) in by_way.items():
            least = LEAST if way == "least_completion" else 0.0
            about = f"{in_flight} in flight, deaths {deaths:.0%}/h, {way}: {per_s:.2f} microbatches/s"
            about += f", each {on_links_s:.1f} s on links; of the flow's"
            found.append(Figure(about, f"≥ {least}" if least else "", per_s / by_way["flow"][0], least, inf))
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=600.0, help="virtual seconds of each run")
    options.add_argument("--seeds", type=int, default=2)
    given = options.parse_args()
    return tell(given, figures(given.seeds, given.seconds))


if __name__ == "__main__":
    sys.exit(main())
