"""What islands pay in loss for rounding proposals, merging them late, late microbatches, and losing half of the
proposals, over the same seeds.

    python -m benchmarks.learning.outer_options [--seeds 3] [--steps 300] [--every 50] [--table docs/benchmarks.md]
        [--save RUNS.json]

Two islands exchange every so many steps; model, text and loss are those of `benchmarks.learning.outer`, whose file of
--save this one shares. Each row differs in one option from the way that it is compared with.

A proposal that is lost is not in the mean: dice say so, drawn for each island and exchange. Its island takes over what
the others have moved and keeps what it has trained, which its next proposal then has too (rebase). Of the closing
exchange nothing is lost. A swarm loses no proposal like that: it repeats the exchange, or goes on without the island.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import mean
from typing import Protocol, TypeAlias

import torch
from rich.console import Console

from benchmarks.learning.convergence import LENGTH, SEQUENCES, with_data
from benchmarks.learning.kept import Kept
from benchmarks.learning.outer import Way, job, loss_of, run_name
from benchmarks.learning.runs import SOURCE, parsed, parser_of
from benchmarks.tables import markdown, publish, spread
from swarm.data.batches import Batches
from swarm.job.islands import courses, island_spec
from swarm.job.outer import MergeRule
from swarm.job.spec import JobSpec
from swarm.model.islands.outer import Merge, compose
from swarm.model.stage import Stage
from swarm.reference.islands import ReferenceOuterSteps
from swarm.reference.trainer import build_stages, evaluate, train_step
from swarm.text import counted

MARKS = ("<!-- options -->", "<!-- end of options -->")
ISLANDS, RATE = 2, 4e-3
LATE = 1  # of the two microbatches of an island's step
REBASE = MergeRule(1.0, 1.0)

# Which of these islands are heard at the exchange of a fragment behind a step.
Heard: TypeAlias = Callable[[int, int, Sequence[int]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Option:
    """A row of the table: a way, and the share of proposals that are lost."""

    name: str
    way: Way
    against: str
    lost: float = 0.0

    def kept_as(self, seed: int, steps: int) -> str:
        return run_name(self.way, RATE, seed, steps) + (f", {self.lost:g} lost" if self.lost else "")

    def measure(self, seed: int, steps: int, source: str) -> float:
        if not self.lost:
            return loss_of(self.way, seed, RATE, steps, source)
        heard = partial(by_dice, seed, self.lost)
        return with_data(job(self.way, seed, RATE, steps, source), partial(train_losing, heard=heard))


def options(every_steps: int) -> list[Option]:
    """All rows; a way that is named beside itself is what others are compared with."""
    every = ("every_steps", every_steps)

    def streaming(*outer: tuple[str, object]) -> Way:
        return Way("streaming", ISLANDS, (every, *outer))

    return [
        Option("streaming, not rounded", streaming(("compression", "none")), "streaming, not rounded"),
        Option("streaming, fp4", streaming(), "streaming, not rounded"),
        Option("streaming, overlap 0", streaming(("overlap_steps", 0)), "streaming, overlap 0"),
        Option("streaming, overlap 1", streaming(), "streaming, overlap 0"),
        Option("streaming, overlap 5", streaming(("overlap_steps", 5)), "streaming, overlap 0"),
        Option("streaming, half of a step late", Way("streaming", ISLANDS, (every,), LATE), "streaming, overlap 1"),
        Option("diloco", Way("diloco", ISLANDS, (every,)), "diloco"),
        Option("diloco, half of a step late", Way("diloco", ISLANDS, (every,), LATE), "diloco"),
        Option("diloco, half lost", Way("diloco", ISLANDS, (every,)), "diloco", lost=0.5),
    ]


def by_dice(seed: int, lost: float, step: int, fragment: int, islands: Sequence[int]) -> list[int]:
    """The islands whose proposals are not lost."""
    return [one for one in islands if Random(f"{seed}-{step}-{fragment}-{one}").random() >= lost]


class LosingOuterSteps(ReferenceOuterSteps):
    """Outer steps to which not all proposals come."""

    def __init__(self, spec: JobSpec, islands: Sequence[Sequence[Stage]], heard: Heard) -> None:
        super().__init__(spec, islands)
        self._heard = heard

    def _merge(self, fragment: int, step: int, islands: Sequence[int]) -> bool:
        heard = self._heard(step, fragment, islands)
        if step == self._spec.training.steps - 1 or len(heard) == len(islands):
            return super()._merge(fragment, step, islands)
        proposed = self._proposed.pop(fragment)
        counted = [proposed[one][1] for one in heard]
        shares = [tokens / sum(counted) for tokens in counted]
        names = next(iter(proposed.values()))[0] if heard else ()
        deltas = {name: compose([proposed[one][0][name] for one in heard], shares) for name in names}
        for island in islands:
            rule = self._plan.rule(step) if island in heard else REBASE
            if island not in heard:
                self._tokens[fragment][island] += proposed[island][1]
            for stage, held in self._held(self._islands[island], fragment):
                there = {name: deltas.get(kept, torch.zeros(())) for name, kept in held.items()}
                stage.merge(stage.version, Merge(there, self._plan.update if heard else None, rule))
        return True


def train_losing(spec: JobSpec, batches: Batches, heard: Heard) -> float:
    """Train a resolved spec; the loss of the final weights on held-out text."""
    share, paths = island_spec(spec), courses(spec)
    islands = [build_stages(share, torch.device("cpu")) for _ in paths]
    outer = LosingOuterSteps(spec, islands, heard)
    for step in range(spec.training.steps):
        made = {one: train_step(islands[one], share, batches, path.at(step)) for one, path in enumerate(paths)}
        outer.after(step, {one: report.tokens for one, report in made.items()})
    return evaluate(islands[0], share, batches, spec.training.steps).loss


Losses: TypeAlias = Mapping[str, Sequence[float]]


class Compared(Protocol):
    """A row of a table: its name, and that of the one that it is compared with."""

    @property
    def name(self) -> str: ...
    @property
    def against(self) -> str: ...
    def kept_as(self, seed: int, steps: int) -> str:
        """The name under which its loss is kept."""
        ...

    def measure(self, seed: int, steps: int, source: str) -> float:
        """Train once; the loss of the final weights on held-out text."""
        ...


def rows(losses: Losses, compared: Sequence[Compared]) -> Iterator[list[str]]:
    """A row for each option, with what its loss is above that of the way beside it: of the means, and by seed."""
    for option in compared:
        found = losses[option.name]
        row = [option.name, f"{mean(found):.3f}{spread(found)}"]
        if option.against == option.name:
            yield [*row, "", "", ""]
            continue
        beside = losses[option.against]
        by_seed = " ".join(f"{100 * (one / other - 1):+.1f}" for one, other in zip(found, beside, strict=True))
        yield [*row, option.against, f"{100 * (mean(found) / mean(beside) - 1):+.1f} %", by_seed]


COLUMNS = ("way", "loss", "beside", "difference", "by seed, %")


def compare(compared: Sequence[Compared], arguments: Namespace, marks: tuple[str, str]) -> None:
    """Train each with all seeds, and publish the table."""
    console, kept = Console(), Kept(arguments.save)
    losses: dict[str, list[float]] = {one.name: [] for one in compared}
    for seed in range(arguments.seeds):
        for one in compared:
            started_s = time.perf_counter()
            name = one.kept_as(seed, arguments.steps)
            loss = kept.once(name, partial(one.measure, seed, arguments.steps, SOURCE))
            losses[one.name].append(loss)
            console.print(f"{name}  {loss:.4f}  {time.perf_counter() - started_s:.0f} s", highlight=False)
    text = (
        f"{markdown(COLUMNS, rows(losses, compared))}\n\n{counted(ISLANDS, 'island')}, H {arguments.every}, "
        f"{arguments.steps} steps of {SEQUENCES * LENGTH} bytes, {counted(arguments.seeds, 'seed')}, "
        f"learning rate {RATE:g}."
    )
    publish(text, arguments.table, marks)


def main() -> None:
    parser = parser_of(__doc__, seeds=3, steps=300)
    parser.add_argument("--every", type=int, default=50)
    arguments = parsed(parser)
    compare(options(arguments.every), arguments, MARKS)


if __name__ == "__main__":
    main()
