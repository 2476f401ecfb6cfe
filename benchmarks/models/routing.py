"""How well each routing policy uses unequal replicas, by event simulation with the scheduler's own code.

    python -m benchmarks.models.routing [--seeds 5] [--seconds 600] [--table docs/routing.md]

The model: 4 stages of 8 replicas, each a FIFO queue that needs 0.1 * 4^U seconds per unit of work (U uniform in 0..1,
lognormal noise of sigma 0.1 on every task); forward is 1 unit, backward 2.5 in reverse order of the stages. A closed
loop keeps 48 microbatches in flight; messages take 20 ms one way.

    plain       as above
    straggler   one replica of each stage is 10 times slower from 200 s to 400 s; capacity is counted without that
    far         100 ms one way, 80 in flight

Two ways to route. "hop by hop": a replica is chosen anew for each forward and each backward, and the answer returns to
the process that chose, as in the published system; the expected values are of this model. "whole routes": what
this project's brain does, one decision per microbatch for all stages, backward where forward was, tensors from replica
to replica.

Percent is completed microbatches against min over stages of sum over replicas of 1 / (3.5 * seconds per unit); p99 is
of a microbatch's seconds from decision to end. Nothing is measured in real time: a seed gives the same table anywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import exp
from pathlib import Path
from random import Random
from statistics import mean

from scheduler.brain.routing.loads import Pace
from scheduler.brain.routing.policies import POLICIES, ReplicaLoad, RoutingPolicy, StageLoad
from swarm.types import PeerId, Routing

STAGES = 4
REPLICAS = 8
FORWARD_UNITS = 1.0
BACKWARD_UNITS = 2.5
NOISE = 0.1
SLOW_S = (200.0, 400.0)
SLOW_FACTOR = 10.0
TOLERANCE_POINTS = 2.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One column of the table."""

    name: str
    one_way_s: float = 0.02
    in_flight: int = 48
    straggler: bool = False


SCENARIOS = (Scenario("plain"), Scenario("straggler", straggler=True), Scenario("far", one_way_s=0.1, in_flight=80))

# Percent of capacity that the model is expected to give, hop by hop.
EXPECTED: dict[Routing, tuple[float, float, float]] = {
    "uniform": (55.7, 41.0, 58.6),
    "iwrr": (96.9, 90.2, 98.0),
    "least_completion": (98.9, 92.6, 98.8),
}


@dataclass(frozen=True, slots=True)
class Result:
    """Percent of capacity, and the 99th percentile of a microbatch's seconds."""

    percent: float
    p99_s: float


@dataclass(slots=True)
class Server:
    """A replica: one task at a time, first come, first served."""

    peer: PeerId
    unit_s: float
    slow: bool
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    busy: bool = False
    outstanding: float = 0.0  # units given and not known to be done

    def next(self) -> None:
        """Begin the oldest task, if there is one."""
        self.busy = bool(self.queue)
        if self.queue:
            self.queue.popleft()()


class Simulation:
    """Virtual time, servers, and one shared policy."""

    def __init__(self, routing: Routing, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.rng, self.dice = Random(seed), Random(seed + 1)
        self.policy: RoutingPolicy = POLICIES[routing]()
        self.pace = Pace()
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.latencies_s: list[float] = []
        self.stages: list[list[Server]] = []
        for stage in range(STAGES):
            pool = [
                Server(PeerId(f"{stage}.{number}"), 0.1 * 4 ** self.rng.random(), scenario.straggler and number == 0)
                for number in range(REPLICAS)
            ]
            self.stages.append(pool)
            for server in pool:
                self.policy.add(server.peer, stage)
        self.peers = [[server.peer for server in pool] for pool in self.stages]
        self.servers = {server.peer: server for pool in self.stages for server in pool}
        self.capacity_per_s = min(
            sum(1 / ((FORWARD_UNITS + BACKWARD_UNITS) * server.unit_s) for server in pool) for pool in self.stages
        )

    def run(self, microbatch: Callable[[Simulation], None], seconds: float) -> Result:
        """Keep the scenario's number of microbatches in flight."""
        for _ in range(self.scenario.in_flight):
            microbatch(self)
        while self._events and self._events[0][0] <= seconds:
            self.now_s, _, event = heappop(self._events)
            event()
        done = sorted(self.latencies_s)
        percent = 100 * len(done) / seconds / self.capacity_per_s
        return Result(percent, done[int(0.99 * (len(done) - 1))])

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heappush(self._events, (self.now_s + seconds, next(self._order), event))

    def choose(self, stages: Sequence[int], units: float) -> list[Server]:
        """Ask the policy for a replica in each of these stages, and tell it what they were given."""
        loads = [
            StageLoad(
                stage,
                tuple(
                    # Least completion adds one unit for the work at hand; this is `units` of them.
                    ReplicaLoad(load.peer, load.outstanding + units - 1.0, self.pace.of(load.peer, self.peers[stage]))
                    for load in self.stages[stage]
                ),
            )
            for stage in stages
        ]
        chosen = [self.servers[peer] for peer in self.policy.choose(loads, self.now_s, self.dice).plan or ()]
        for server in chosen:
            self.policy.given(server.peer, units)
            server.outstanding += units
        return chosen

    def finished(self, server: Server, units: float, *, seconds: float, device_s: float) -> None:
        """The one who chooses hears that the work is done."""
        server.outstanding -= units
        self.policy.done(server.peer, seconds, units)
        self.pace.observe(server.peer, device_s / units)

    def serve(self, server: Server, units: float, done: Callable[[float, float], None]) -> None:
        """Queue a task at the server now; `done` gets its seconds of waiting and of computing."""
        arrived_s = self.now_s

        def start() -> None:
            slow = SLOW_FACTOR if server.slow and SLOW_S[0] <= self.now_s < SLOW_S[1] else 1.0
            device_s = units * server.unit_s * slow * exp(self.rng.gauss(0.0, NOISE))
            waited_s = self.now_s - arrived_s

            def end() -> None:
                server.next()
                done(waited_s, device_s)

            self.after(device_s, end)

        server.queue.append(start)
        if not server.busy:
            server.next()


def hop_by_hop(simulation: Simulation) -> None:
    """One microbatch whose every task is a decision of its own; then the next one."""
    started_s = simulation.now_s
    one_way_s = simulation.scenario.one_way_s
    tasks = [(stage, FORWARD_UNITS) for stage in range(STAGES)]
    tasks += [(stage, BACKWARD_UNITS) for stage in reversed(range(STAGES))]

    def go(number: int) -> None:
        if number == len(tasks):
            simulation.latencies_s.append(simulation.now_s - started_s)
            hop_by_hop(simulation)
            return
        stage, units = tasks[number]
        (server,) = simulation.choose([stage], units)
        asked_s = simulation.now_s

        def served(_: float, device_s: float) -> None:
            simulation.after(one_way_s, lambda: answered(device_s))

        def answered(device_s: float) -> None:
            # The published mean is of the whole call, network included.
            simulation.finished(server, units, seconds=simulation.now_s - asked_s, device_s=device_s)
            go(number + 1)

        simulation.after(one_way_s, lambda: simulation.serve(server, units, served))

    go(0)


def whole_routes(simulation: Simulation) -> None:
    """One microbatch on a route that is decided once; replicas report when backward is done. Then the next one."""
    started_s = simulation.now_s
    one_way_s = simulation.scenario.one_way_s
    route = simulation.choose(range(STAGES), 1.0)
    spent = [[0.0, 0.0] for _ in route]  # waiting and computing at each stage
    tasks = [(stage, FORWARD_UNITS) for stage in range(STAGES)]
    tasks += [(stage, BACKWARD_UNITS) for stage in reversed(range(STAGES))]

    def go(number: int) -> None:
        stage, units = tasks[number]
        server = route[stage]

        def served(waited_s: float, device_s: float) -> None:
            spent[stage][0] += waited_s
            spent[stage][1] += device_s
            if number >= STAGES:
                simulation.after(one_way_s, reported)
            if number + 1 == len(tasks):
                simulation.after(one_way_s, ended)
            elif tasks[number + 1][0] == stage:  # the last stage turns round in place
                go(number + 1)
            else:
                simulation.after(one_way_s, lambda: go(number + 1))

        def reported() -> None:
            waited_s, device_s = spent[stage]
            simulation.finished(server, 1.0, seconds=waited_s + device_s, device_s=device_s)

        simulation.serve(server, units, served)

    def ended() -> None:
        simulation.latencies_s.append(simulation.now_s - started_s)
        whole_routes(simulation)

    simulation.after(one_way_s, lambda: go(0))


WAYS: dict[str, Callable[[Simulation], None]] = {"hop by hop": hop_by_hop, "whole routes": whole_routes}


def measure(way: str, routing: Routing, scenario: Scenario, seeds: int, seconds: float) -> Result:
    """The mean over seeds."""
    results = [Simulation(routing, scenario, 1000 * seed).run(WAYS[way], seconds) for seed in range(seeds)]
    return Result(mean(result.percent for result in results), mean(result.p99_s for result in results))


def table(results: dict[str, dict[Routing, list[Result]]]) -> list[str]:
    """Markdown: percent of capacity / p99 seconds, expected percent in brackets where there is one."""
    lines = []
    for way, rows in results.items():
        lines += ["", f"{way[0].upper()}{way[1:]}:", ""]
        lines += [
            "| policy | " + " | ".join(scenario.name for scenario in SCENARIOS) + " |",
            "|---|" + "---|" * len(SCENARIOS),
        ]
        for routing, row in rows.items():
            cells = []
            for place, result in enumerate(row):
                cell = f"{result.percent:.1f} / {result.p99_s:.1f}"
                if way == "hop by hop":
                    expected = EXPECTED[routing][place]
                    off = abs(result.percent - expected) > TOLERANCE_POINTS
                    cell += f" ({expected}{', OUT' if off else ''})"
                cells.append(cell)
            lines.append(f"| {routing} | " + " | ".join(cells) + " |")
    return lines[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual seconds of each run")
    parser.add_argument("--table", type=Path, help="write the table into this file too")
    options = parser.parse_args()
    results: dict[str, dict[Routing, list[Result]]] = {}
    for way in WAYS:
        for routing in EXPECTED:
            row = [measure(way, routing, scenario, options.seeds, options.seconds) for scenario in SCENARIOS]
            results.setdefault(way, {})[routing] = row
            print(f"{way}, {routing} done", file=sys.stderr, flush=True)
    lines = table(results)
    print("\n".join(lines))
    if options.table is not None:
        text = options.table.read_text()
        start, end = "<!-- measured -->\n", "<!-- end -->"
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        options.table.write_text(head + start + "\n".join(lines) + "\n" + end + tail)
    return 0 if all("OUT" not in line for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
