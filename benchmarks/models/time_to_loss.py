"""How soon each way of training reaches a loss: the losses that were measured, at the speed of a modelled pipeline.

    python -m benchmarks.learning.convergence --save RUNS.json
    python -m benchmarks.models.time_to_loss RUNS.json [--stages 2 4 8] [--table docs/convergence.md]

A step's time is that of `benchmarks.models.bubbles`, which needs no learning; a loss after so many steps is that of
`benchmarks.learning.convergence`, which needs no clock. A step before `pipeline.sync_steps` takes as long as a
synchronous one. What 1F1B does is "synchronous AdamW": it has the same idle time and the same updates. So the
synchronous ways compute a backward in one call, and all others split it, as does "synchronous, lookahead, split".
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

import structlog

from benchmarks.learning.convergence import SYNCHRONOUS, WAYS, Run, Way, best, saved
from benchmarks.models.bubbles import STAGES, Shape, step_units
from benchmarks.tables import markdown, publish

SYNCHRONOUS_LOOKAHEAD = next(way for way in WAYS if way.name == "synchronous, lookahead")
SPLIT = f"{SYNCHRONOUS_LOOKAHEAD.name}, split"
OPPONENTS = (SYNCHRONOUS.name, SYNCHRONOUS_LOOKAHEAD.name, SPLIT)
GOALS = (0.75, 1.0)  # the loss of synchronous AdamW after this share of its tokens
MARKS = ("<!-- modelled -->", "<!-- modelled end -->")


StepUnits: TypeAlias = Callable[[bool, int], float]
"""A step's time by whether its backwards are computed in one call each, and by its late microbatches."""


def units_to(run: Run, loss: float, step_units_of: Callable[[int], float]) -> float | None:
    """How long the run takes to reach the loss; `step_units_of` gives a step's time by its late microbatches.

    None if it never reaches it.
    """
    share = run.reaches(loss)
    if share is None:
        return None
    steps = share * len(run.losses)
    synchronous = min(steps, run.sync_steps)
    return synchronous * step_units_of(0) + (steps - synchronous) * step_units_of(run.overlap)


def speedup(ours: list[float | None], theirs: list[float | None]) -> str:
    """How many times as fast the first is on average over seeds; "never" where a seed of either does not arrive."""
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if one is not None and other is not None]
    return f"{mean(other / one for one, other in pairs):.2f}" if len(pairs) == len(ours) else "never"


def rows(runs: dict[tuple[Way, float], list[Run]], goal: float, step_units_of: StepUnits) -> Iterator[list[str]]:
    """For each way: how many times as fast as each of OPPONENTS."""
    times = by_seed(runs, goal, step_units_of)
    for name, ours in times.items():
        yield [name, *(speedup(ours, times[other]) for other in OPPONENTS)]


def measured(runs: dict[tuple[Way, float], list[Run]]) -> list[Way]:
    """The ways that have runs."""
    return [way for way in WAYS if any(one == way for one, _ in runs)]


def by_seed(
    runs: dict[tuple[Way, float], list[Run]], goal: float, step_units_of: StepUnits
) -> dict[str, list[float | None]]:
    """For each way, and for SPLIT, how long each seed takes, in units of `step_units_of`; None: it never arrives."""
    goals = [run.at(goal) for run in best(runs, SYNCHRONOUS)[1]]

    def times(way: Way, whole: bool) -> list[float | None]:
        pairs = zip(best(runs, way)[1], goals, strict=True)
        return [units_to(run, loss, partial(step_units_of, whole)) for run, loss in pairs]

    found = {way.name: times(way, ("overlap", 0) in way.pipeline) for way in measured(runs)}
    return found | {SPLIT: times(SYNCHRONOUS_LOOKAHEAD, False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="what benchmarks.learning.convergence --save wrote")
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument("--table", type=Path, help="a Markdown file whose modelled part is replaced")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    runs = saved(arguments.runs)
    if arguments.output == "json":
        print(json.dumps(_times(runs, arguments.stages)))
        return
    columns: dict[str, list[str]] = {}
    header = ["way"]
    for stages in arguments.stages:
        for goal in GOALS:
            header.append(f"{stages} stages (idle {Shape(stages).bubble:.0%}), to {goal:.0%}")
            for name, *ratios in rows(runs, goal, partial(modelled_units, stages)):
                columns.setdefault(name, []).append(" / ".join(ratios))
    text = markdown(header, iter([[name, *cells] for name, cells in columns.items()]))
    publish(text, arguments.table, MARKS)


@cache
def modelled_units(stages: int, whole: bool, overlap: int) -> float:
    """A step's time in a pipeline of so many stages."""
    return step_units(Shape(stages, whole=whole), overlap)


def _times(runs: dict[tuple[Way, float], list[Run]], numbers: Sequence[int]) -> Any:
    """All that the table is made of: times by number of stages and goal, and the losses at the end."""
    times = {
        stages: {f"{goal:.0%}": by_seed(runs, goal, partial(modelled_units, stages)) for goal in GOALS}
        for stages in numbers
    }
    losses = {way.name: [run.at(1.0) for run in best(runs, way)[1]] for way in measured(runs)}
    return {"times": times, "losses": losses}


if __name__ == "__main__":
    main()
