"""What islands pay in loss for rounding proposals, merging them late, late microbatches, and being late, over the same
seeds.

    python -m benchmarks.learning.outer_options [--seeds 3] [--steps 300] [--every 50] [--table docs/benchmarks.md]
        [--save RUNS.json] [--late]

Two islands exchange every so many steps; model, text and loss are those of `benchmarks.learning.outer`, whose file of
--save this one shares. Each row differs in one option from the way that it is compared with.

With --late the islands of some rows are late at some exchanges, in turn, as the outer log of a swarm would say. Others
stand beside allreduce, with as many steps and with more, since islands make more in the same time.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import mean
from typing import Protocol, TypeAlias

from rich.console import Console

from benchmarks.learning.convergence import LENGTH, SEQUENCES, with_data
from benchmarks.learning.kept import Kept
from benchmarks.learning.outer import ALLREDUCE, Way, job, run_name
from benchmarks.learning.runs import SOURCE, parsed, parser_of
from benchmarks.tables import markdown, publish, spread
from swarm.data.batches import Batches
from swarm.job.islands import outer_courses
from swarm.job.outer_log import OuterRecord
from swarm.job.spec import JobSpec
from swarm.reference.trainer import train_local
from swarm.text import counted

MARKS = ("<!-- options -->", "<!-- end of options -->")
LATE_MARKS = ("<!-- late -->", "<!-- end of late -->")
ISLANDS, RATE = 2, 4e-3
LATE = 1  # of the two microbatches of an island's step
MORE = 1.7  # times the steps: fewer than islands make in the time of allreduce over 50 Mbit/s (docs/benchmarks.md)


@dataclass(frozen=True, slots=True)
class Option:
    """A row of the table: a way, in each so manyth exchange an island is late (0: never), so many times the steps."""

    name: str
    way: Way
    against: str
    late_in: int = 0
    times: float = 1.0

    def kept_as(self, seed: int, steps: int) -> str:
        late = f", late in each {self.late_in}th" if self.late_in else ""
        return run_name(self.way, RATE, seed, round(self.times * steps)) + late

    def measure(self, seed: int, steps: int, source: str) -> float:
        def train(spec: JobSpec, batches: Batches) -> float:
            log = late_log(spec, self.late_in) if self.late_in else ()
            return train_local(spec, batches, log=log).evaluations[-1].loss

        return with_data(job(self.way, seed, RATE, round(self.times * steps), source), train)


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
    ]


def late_options(every_steps: int) -> list[Option]:
    """Islands that are late beside islands that are not, and both beside allreduce, which has fewer steps in the same
    time."""
    diloco, streaming = (Way(mode, ISLANDS, (("every_steps", every_steps),)) for mode in ("diloco", "streaming"))
    return [
        Option("allreduce", ALLREDUCE, "allreduce"),
        Option("diloco beside allreduce", diloco, "allreduce"),
        Option(f"diloco, {MORE:g} times the steps", diloco, "allreduce", times=MORE),
        Option("diloco", diloco, "diloco"),
        Option("diloco, 1 of 14 late", diloco, "diloco", late_in=7),
        Option("diloco, 1 of 8 late", diloco, "diloco", late_in=4),
        Option("streaming", streaming, "streaming"),
        Option("streaming, 1 of 14 late", streaming, "streaming", late_in=7),
    ]


def late_log(spec: JobSpec, each: int) -> list[OuterRecord]:
    """In every `each`th exchange but the closing ones an island is late, the two in turn."""
    exchanges = [outer for outer in outer_courses(spec)[0].outer if outer.behind < spec.training.steps]
    return [
        OuterRecord(outer.behind, (1 - late,), {}, outer.fragment, (late,))
        for late, outer in zip(cycle(range(ISLANDS)), exchanges[each - 1 :: each])
    ]


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
    losses: dict[str, list[float]] = {way.name: [] for way in compared}
    for seed in range(arguments.seeds):
        for way in compared:
            started_s = time.perf_counter()
            name = way.kept_as(seed, arguments.steps)
            loss = kept.once(name, partial(way.measure, seed, arguments.steps, SOURCE))
            losses[way.name].append(loss)
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
    parser.add_argument("--late", action="store_true", help="islands that are late at some exchanges")
    arguments = parsed(parser)
    if arguments.late:
        compare(late_options(arguments.every), arguments, LATE_MARKS)
    else:
        compare(options(arguments.every), arguments, MARKS)


if __name__ == "__main__":
    main()
