"""Many runs of the simulation, one process per core: what is kept of each run, and the sum of all runs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TypeAlias

from tests.simulation.engine.player import play
from tests.simulation.engine.scenario import EDGES, SCENARIOS, named

HITS_MIN = 50  # of each failpoint in 200 runs or more, or they prove little about it; in fewer, one in four runs
SEEDS_OF_REAL = 2
FIRST_SEED = 1
AHEAD = 3  # runs per process that are handed out before they are needed

Run: TypeAlias = tuple[str, int]  # scenario, seed


def catalogue(seeds: int) -> list[Run]:
    """The same runs every time: seeds 1, 2, 3 ... of each scenario, shared out by weight; two of each real model."""
    runs: list[Run] = []
    share: Counter[str] = Counter()
    for name, scenario in SCENARIOS.items():
        if scenario.workload.real:  # costs a hundred times as much
            share[name] = SEEDS_OF_REAL
    turn = [name for name in sorted(set(SCENARIOS) - set(share)) for _ in range(SCENARIOS[name].weight)]
    share.update(islice(cycle(turn), seeds - share.total()))
    for name in sorted(share, key=lambda name: -share[name]):
        runs += [(name, FIRST_SEED + number) for number in range(share[name])]
    return runs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of a run; small, since it travels between processes."""

    scenario: str
    seed: int
    failures: tuple[str, ...]
    explanation: str  # empty if nothing failed
    replay: str
    counts: Counter[str]
    edges: Counter[str]
    microbatches: int
    events: int  # records of the history, all of which were judged
    virtual_s: float
    cpu_s: float


def outcome_of(run: Run) -> Outcome:
    """Play and judge; an exception of the simulator itself is a failure of the seed too."""
    scenario, seed = named(run[0]), run[1]
    started_s = time.process_time()
    result = play(scenario, seed)
    return Outcome(
        scenario.name,
        seed,
        tuple(result.failures),
        result.explain() if result.failures else "",
        result.replay,
        result.counts,
        result.edges,
        result.microbatches,
        len(result.history.records),
        result.virtual_s,
        time.process_time() - started_s,
    )


@contextmanager
def workers(count: int = 0) -> Iterator[ProcessPoolExecutor]:
    """A pool of `count` processes that play, one per core if 0; runs that have not begun when it ends are left out."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count or cores(), mp_context=context, initializer=_prepare)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _prepare() -> None:
    gc.freeze()  # torch and its friends live for ever: looking through them takes a seventh of the time
    gc.set_threshold(50_000, 20, 100)


def outcomes(pool: ProcessPoolExecutor, runs: Iterable[Run], count: int) -> Iterator[Outcome]:
    """The outcome of each run, in the order of completion; `runs` is read only a little ahead."""
    left = iter(runs)
    waiting: set[Future[Outcome]] = {pool.submit(outcome_of, run) for run in islice(left, AHEAD * count)}
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        waiting |= {pool.submit(outcome_of, run) for run in islice(left, len(done))}
        for future in done:
            yield future.result()


@dataclass(slots=True)
class Sum:
    """The sum of many runs."""

    seeds: int = 0
    failed: int = 0
    microbatches: int = 0
    events: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    by_scenario: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    edges: Counter[str] = field(default_factory=Counter)
    shown: set[tuple[str, str]] = field(default_factory=set)  # kinds of faults, by scenario

    def add(self, outcome: Outcome) -> None:
        """Count a run."""
        self.seeds += 1
        self.failed += bool(outcome.failures)
        self.microbatches += outcome.microbatches
        self.events += outcome.events
        self.virtual_s += outcome.virtual_s
        self.cpu_s += outcome.cpu_s
        self.by_scenario[outcome.scenario] += 1
        self.counts.update(outcome.counts)
        self.edges.update(outcome.edges)
        self.shown |= {(outcome.scenario, kind) for kind, count in outcome.counts.items() if count}

    def hits(self) -> dict[str, int]:
        """How often a process died at each failpoint."""
        return {edge: self.counts[f"failpoint {edge}"] for edge in EDGES}

    def rare(self) -> list[str]:
        """Failpoints that were hit too seldom."""
        return [edge for edge, hits in self.hits().items() if hits < self.hits_due()]

    def hits_due(self) -> int:
        """How often so many runs must hit a failpoint."""
        return min(HITS_MIN, max(1, self.seeds // 4))

    def missing(self) -> list[str]:
        """Scenarios whose runs never showed the fault that they are there for."""
        due = [(name, kind) for name in self.by_scenario for kind in SCENARIOS[name].must_happen]
        return [f"{kind} in {name}" for name, kind in sorted(due) if (name, kind) not in self.shown]

    def report(self, elapsed_s: float) -> Sequence[str]:
        """Lines for a person."""
        faults = {kind: count for kind, count in sorted(self.counts.items()) if not kind.startswith("failpoint ")}
        width = max(map(len, [*faults, *self.by_scenario]), default=0)
        return [
            f"{self.seeds} seeds, {self.failed} failed; {self.microbatches} microbatches committed, "
            f"{self.events} events judged; {self.virtual_s:.0f} simulated s in {elapsed_s:.0f} s "
            f"(CPU {self.cpu_s:.0f} s)",
            "seeds per scenario",
            *(f"  {name:{width}} {count:8}" for name, count in sorted(self.by_scenario.items())),
            "faults",
            *(f"  {kind:{width}} {count:8}" for kind, count in faults.items()),
            "failpoints: a process died there, of so many times that it was passed",
            *(f"  {edge:{width}} {hits:8} {self.edges[edge]:8}" for edge, hits in self.hits().items()),
        ]
