"""How much of the possible throughput rebalancing keeps under churn: an event simulation of a fluid.

    python -m benchmarks.models.rebalancing [--seeds 4] [--hours 32] [--docs docs/rebalancing.md]

The scheduler's own code (scheduler/brain/replicas/rebalancing.py) and the published rules (benchmarks/models/rules.py)
balance the same fleets. Peers come, die without a word and move as events; between events microbatches flow at the rate
of the weakest stage. It has no routing and no queues: docs/routing.md measures whether an unequal stage is used
fully.

The setting of the paper: 4 stages, 100 equal peers, 32 h. A peer is up for 8 h and away for 1.5 h on average
(exponential), and 60 s pass until one that came or moved can serve. The optimum is floor(peers up / 4) peers per stage.
The paper replays a trace of preemptible T4 counts that is not published; this churn stands for it.

Throughput E: N / integral of min over stages of sum of speeds alive, where N are
committed microbatches, each counted once. A replica leaves the integral at its death, a joiner enters it when it
reports idle. Raw: N / what the fleet does without faults. What a death costs here, as parameters: the work of
`redo_s + detect_s` seconds of that replica is done again by its stage, before anything else; the whole pipeline stands
for `stall_s`; a joiner fetches its stage for `join_s`. Averaging is hidden behind the next step. These are efficiencies
of the protocol with modelled compute, not of accelerators.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean, stdev

from benchmarks.models.rules import Costed, Nobody, Peer, Petals, Rule, Swarm, View
from scheduler.brain.settings import RebalanceSettings
from swarm.types import PeerId

STAGES = 4
PEERS = 100
HOUR_S = 3600.0
# All cells are unverified: known from a third-party summary, not checked against the paper itself.
PUBLISHED = {
    "none": (82.7, 99.0, 45.4),
    "SWARM's rule, T = 300 s": (95.8, 99.4, 88.9),
    "SWARM's rule, T = 60 s": (97.6, 99.8, 91.7),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet and its fate; seconds and bytes are stated beside every figure."""

    hours: float = 32.0
    up_h: float = 8.0  # mean life
    away_s: float = 1.5 * HOUR_S  # mean time until a peer that died is back, as a new one
    join_s: float = 60.0  # from idle to serving: the state's transfer
    peers: int = PEERS
    spread: float = 1.0  # speeds are spread ** U(0, 1): 1 = all equal
    noise: float = 0.0  # of measured speeds, uniform
    redo_s: float = 0.0
    detect_s: float = 0.0
    stall_s: float = 0.0
    speed: float = 0.5  # microbatches per second of one peer
    state_bytes: int = 1_500_000_000  # of a stage: 60 s at 200 Mb/s
    boundary_bytes: int = 4_000_000  # of an activation or gradient


PAPER = Setting()


@dataclass(slots=True)
class Tally:
    """Integrals over time; `hourly` has (done, optimum) of each hour."""

    done: float = 0.0
    alive: float = 0.0
    optimum: float = 0.0
    moves: int = 0
    deaths: int = 0
    hourly: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def percent(self) -> float:
        return 100.0 * self.done / self.optimum

    def percent_of_hour(self, hour: int) -> float:
        done, optimum = self.hourly[hour]
        return 100.0 * done / optimum


class Simulation:
    """One fleet under one rule."""

    def __init__(self, setting: Setting, rule: Rule, seed: int) -> None:
        self.setting, self.rule = setting, rule
        self.fate, self.rng = Random(seed), Random(seed + 1)
        self.now_s = 0.0
        self.tally = Tally()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._names = count()
        self.peers: dict[PeerId, Peer] = {}
        self.moving: dict[PeerId, int] = {}  # mover -> stage that it still serves, -1 if none
        for number in range(setting.peers):
            peer = self._born()
            peer.stage = number % STAGES
        if rule.period_s < float("inf"):
            self._after(rule.period_s, self._window)

    def run(self) -> Tally:
        end_s = self.setting.hours * HOUR_S
        hours = [HOUR_S * hour for hour in range(1, int(self.setting.hours) + 1)]
        for mark_s in [*hours, *([] if hours and hours[-1] == end_s else [end_s])]:
            while self._events[0][0] <= mark_s:
                at_s, _, event = heappop(self._events)
                self._flow(at_s)
                event()
            self._flow(mark_s)
        return self.tally

    def serving(self) -> list[float]:
        """Speed of each stage, by those that compute."""
        capacities = [0.0] * STAGES
        for peer in self.peers.values():
            if (stage := self._serves_stage(peer)) >= 0:
                capacities[stage] += peer.speed
        return capacities

    def _serves_stage(self, peer: Peer) -> int:
        """The stage that it computes for; -1 if none."""
        return self.moving.get(peer.name, -1) if peer.arriving else peer.stage

    def _flow(self, until_s: float) -> None:
        """Let time pass at the rates of now."""
        seconds = until_s - self.now_s
        if seconds <= 0.0:
            return
        alive = [0.0] * STAGES
        for peer in self.peers.values():
            old = self.moving.get(peer.name, -1)
            alive[old if old >= 0 else peer.stage] += peer.speed
        if self.setting.spread == 1.0:
            optimum = len(self.peers) // STAGES * self.setting.speed
        else:
            optimum = sum(peer.speed for peer in self.peers.values()) / STAGES
        self._count(min(self.serving()) * seconds, optimum * seconds)
        self.tally.alive += min(alive) * seconds
        self.now_s = until_s

    def _count(self, done: float, optimum: float = 0.0) -> None:
        self.tally.done += done
        self.tally.optimum += optimum
        # What ends at a full hour belongs to the hour before.
        hour = int(self.now_s // HOUR_S)
        before = self.tally.hourly.get(hour, (0.0, 0.0))
        self.tally.hourly[hour] = (before[0] + done, before[1] + optimum)

    def _born(self) -> Peer:
        peer = Peer(
            PeerId(f"peer-{next(self._names):05}"), self.setting.speed * self.setting.spread ** self.fate.random()
        )
        self.peers[peer.name] = peer
        self._after(self.fate.expovariate(1.0 / (self.setting.up_h * HOUR_S)), lambda: self._dies(peer))
        return peer

    def _comes(self) -> None:
        peer = self._born()
        view = self._view(without=peer.name)
        peer.stage, peer.since_s, peer.arriving = self.rule.join(view, self.rng), self.now_s, True
        self._after(self.setting.join_s, lambda: self._serves(peer))

    def _serves(self, peer: Peer) -> None:
        peer.arriving = False
        self.moving.pop(peer.name, None)

    def _dies(self, peer: Peer) -> None:
        setting = self.setting
        capacities = self.serving()
        rate = min(capacities)
        stage = self._serves_stage(peer)
        if stage >= 0:  # its stage does its open work again; if others limit, they wait for less than all of it
            again = peer.speed * (setting.redo_s + setting.detect_s)
            left = capacities[stage] - peer.speed
            self._count(-min(again * rate / left if left > 0.0 else again, self.tally.done))
            self._count(-min(rate * setting.stall_s, self.tally.done))
        self.tally.deaths += 1
        del self.peers[peer.name]
        self.moving.pop(peer.name, None)
        self._after(self.fate.expovariate(1.0 / setting.away_s), self._comes)

    def _window(self) -> None:
        for name, target in self.rule.consider(self._view(), self.now_s, self.rng):
            peer = self.peers[name]
            self.moving[name] = peer.stage if self.rule.prewarm else -1
            peer.stage, peer.since_s, peer.arriving = target, self.now_s, True
            self.tally.moves += 1
            self._after(self.setting.join_s, lambda peer=peer: self._serves(peer))  # type: ignore[misc]
        self._after(self.rule.period_s, self._window)

    def _view(self, without: PeerId | None = None) -> View:
        noise = self.setting.noise
        peers = {name: peer for name, peer in self.peers.items() if name != without}
        speeds = {
            name: peer.speed * (1.0 + noise * (2.0 * self.rng.random() - 1.0) if noise else 1.0)
            for name, peer in peers.items()
        }
        moving = next(iter(self.moving), None)
        return View(
            STAGES, peers, speeds, moving, self.setting.state_bytes, self.setting.state_bytes / self.setting.join_s
        )

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heappush(self._events, (self.now_s + seconds, next(self._order), event))


# Tables ------------------------------------------------------------------------------------------------------------

COSTED = RebalanceSettings()
ANY_GAIN = RebalanceSettings(min_gain=0.0)


def rules() -> list[Callable[[], Rule]]:
    """What is compared, each made anew for every run."""
    return [
        Nobody,
        lambda: Swarm(300.0),
        lambda: Swarm(60.0),
        Petals,
        lambda: Costed(COSTED),
        lambda: Costed(ANY_GAIN, name="costed, any gain"),
    ]


def runs(setting: Setting, rule: Callable[[], Rule], seeds: int) -> list[Tally]:
    """One tally per seed; a seed gives each rule the same lives."""
    return [Simulation(setting, rule(), 1000 * seed).run() for seed in range(seeds)]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds."""
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def of_optimum(setting: Setting, seeds: int, chosen: Sequence[Callable[[], Rule]]) -> list[str]:
    """Percent of the optimum, beside what is published."""
    lines = [
        "| rule | overall | first hour | last hour | moves | published: overall / first / last |",
        "|---|---|---|---|---|---|",
    ]
    last = int(setting.hours) - 1
    for rule in chosen:
        tallies = runs(setting, rule, seeds)
        name = rule().name
        published = PUBLISHED.get(name) if setting.spread == 1.0 else None
        hours = [spread([tally.percent_of_hour(hour) for tally in tallies]) for hour in (0, last)]
        lines.append(
            f"| {name} | {spread([tally.percent for tally in tallies])} | {hours[0]} | {hours[1]} "
            f"| {mean(tally.moves for tally in tallies):.0f} "
            f"| {' / '.join(map(str, published)) if published else '–'} |"
        )
    return lines


CHURN = Setting(hours=8.0, away_s=120.0, redo_s=20.0, detect_s=0.5, stall_s=1.0)


def efficiency(setting: Setting, seeds: int) -> list[str]:
    """E and the raw ratio under churn."""
    lines = [
        "| churn | rule | E | raw | raw at best | deaths/h | moves/h | bytes moved / across boundaries |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for per_hour in (0.2, 0.52):
        at = replace(setting, up_h=1.0 / per_hour)
        for rule in (lambda: Costed(COSTED), Nobody):
            tallies = runs(at, rule, seeds)
            full = at.peers * at.speed / STAGES * at.hours * HOUR_S
            sent = [2 * (STAGES - 1) * at.boundary_bytes * tally.done for tally in tallies]
            moved = mean(tally.moves * at.state_bytes / bytes_ for tally, bytes_ in zip(tallies, sent, strict=True))
            lines.append(
                f"| {per_hour:.0%}/h | {rule().name} | {spread([100 * tally.done / tally.alive for tally in tallies])} "
                f"| {spread([100 * tally.done / full for tally in tallies])} "
                f"| {spread([100 * tally.optimum / full for tally in tallies])} "
                f"| {mean(tally.deaths for tally in tallies) / at.hours:.1f} "
                f"| {mean(tally.moves for tally in tallies) / at.hours:.1f} | {moved:.2%} |"
            )
    return lines


def report(seeds: int, hours: float) -> list[str]:
    """All tables, in Markdown."""
    paper = Setting(hours=hours)
    part = max(1.0, hours / 4)
    unequal = Setting(hours=part, spread=4.0, noise=0.1)
    churn = replace(CHURN, hours=min(CHURN.hours, hours))
    lines = [f"{PEERS} equal peers, {hours:g} h, percent of floor(up / {STAGES}); {seeds} seeds, mean ± deviation:", ""]
    lines += of_optimum(paper, seeds, rules())
    lines += [
        "",
        f"{PEERS} peers of speeds 1 to 4, measured with ±10 % noise, {part:g} h, percent of (speeds up) / {STAGES}:",
    ]
    lines += ["", *of_optimum(unequal, seeds, rules())]
    lines += ["", "16 such peers:"]
    lines += ["", *of_optimum(replace(unequal, peers=16), seeds, rules())]
    lines += [
        "",
        f"Churn, {PEERS} equal peers, {churn.hours:g} h; a dead peer is back after {churn.away_s:g} s, joins in ",
    ]
    lines[-1] += f"{churn.join_s:g} s; a death costs {churn.redo_s:g} + {churn.detect_s:g} s of its own work and "
    lines[-1] += f"{churn.stall_s:g} s of the pipeline:"
    lines += [""]
    return lines + efficiency(churn, seeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--hours", type=float, default=32.0)
    parser.add_argument("--docs", type=Path, help="write the tables into this file too")
    options = parser.parse_args()
    lines = report(options.seeds, options.hours)
    print("\n".join(lines))
    if options.docs is not None:
        text = options.docs.read_text()
        start, end = "<!-- measured -->\n", "<!-- end -->"
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        options.docs.write_text(head + start + "\n".join(lines) + "\n" + end + tail)
    return 0


if __name__ == "__main__":
    sys.exit(main())
