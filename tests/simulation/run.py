"""Play scenarios: one seed again, or as many as some minutes give.

python -m tests.simulation.run --scenario NAME --seed N      one run, with its history on request
python -m tests.simulation.run --seeds 200                   all scenarios, the same seeds every time, with numbers
python -m tests.simulation.run --minutes 30                  all scenarios, random seeds, with numbers at the end
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from tests.simulation.engine.batch import Run, Sum, catalogue, cores, outcomes, workers
from tests.simulation.engine.player import play
from tests.simulation.engine.scenario import SCENARIOS, Scenario, named


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a seed failed, or if a failpoint was hit too seldom to prove anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS), help="default: all, in turn")
    parser.add_argument("--seed", type=int, help="play this seed and no other")
    parser.add_argument("--minutes", type=float, default=0.0, help="play random seeds for so long")
    parser.add_argument("--seeds", type=int, help="play so many seeds, the same ones every time")
    parser.add_argument("--first-seed", type=int, help="where --minutes begins; drawn if left out")
    parser.add_argument("--processes", type=int, default=cores(), help="that play at once (default: the cores)")
    parser.add_argument("--history", action="store_true", help="with --seed: print every record of the run")
    parser.add_argument("--log", action="store_true", help="with --seed: print what the processes logged last")
    options = parser.parse_args(arguments)
    names = options.scenario or sorted(SCENARIOS)
    if options.seed is not None:
        return max(_one(named(name), options.seed, options.history, options.log) for name in names)
    if options.seeds is not None:
        print(f"the first {options.seeds} seeds of the catalogue, {options.processes} processes", flush=True)
        return _many(catalogue(options.seeds), options.processes, all_of_them=True)
    first_seed = secrets.randbelow(1 << 40) if options.first_seed is None else options.first_seed
    print(f"{len(names)} scenarios in turn, first seed {first_seed}, {options.processes} processes", flush=True)
    runs = _in_turn(names, options.minutes * 60.0, first_seed)
    return _many(runs, options.processes, all_of_them=not options.scenario)


def _one(scenario: Scenario, seed: int, history: bool, log: bool) -> int:
    result = play(scenario, seed)
    if history:
        for record in result.history.records:
            print(record)
    if log:
        print("\n".join(result.log))
    print(result.explain() if result.failures else result)
    print(f"history sha256 {result.history.sha256()}")
    return 1 if result.failures else 0


def _in_turn(names: Sequence[str], seconds: float, first_seed: int) -> Iterator[Run]:
    """Random seeds for so long, one turn at least; a scenario of weight 3 comes three times in a turn."""
    started_s = time.monotonic()
    turn = [name for name in names for _ in range(named(name).weight)]
    for number in itertools.count():
        if number >= len(turn) and time.monotonic() - started_s >= seconds:
            return
        yield turn[number % len(turn)], first_seed + number


def _many(runs: Iterable[Run], processes: int, *, all_of_them: bool) -> int:
    started_s = time.monotonic()
    total = Sum()
    with workers(processes) as pool:
        for outcome in outcomes(pool, runs, processes):
            total.add(outcome)
            if outcome.failures:
                print("\n".join([*outcome.failures, f"replay: {outcome.replay}"]), flush=True)
    print("\n".join(total.report(time.monotonic() - started_s)))
    rare = total.rare() if all_of_them else []
    if rare:
        print(f"too few hits (under {total.hits_due()}): {', '.join(rare)}; play longer")
    missing = total.missing() if all_of_them else []
    if missing:
        print(f"never happened: {', '.join(missing)}; play longer")
    return 1 if total.failed or rare or missing else 0


if __name__ == "__main__":
    sys.exit(main())
