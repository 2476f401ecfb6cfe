"""Islands that send what is significant, when it is (Gaia), beside fragments in turn (streaming), at equal tokens.

    python -m benchmarks.learning.gaia [--seeds 3] [--steps 120] [--rates 0.004] [--table docs/islands.md]
        [--save RUNS.json]

Two islands, of one speed, whose links carry any amount at once; `benchmarks.learning.gaia.three_sites` has slow links.
No island may be more than one step ahead of what it has heard of the other. With --save each result is kept when it is
found, and a run that was interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

from rich.console import Console

from benchmarks.learning import outer
from benchmarks.learning.convergence import LENGTH, SEQUENCES, with_data
from benchmarks.learning.gaia.significance import Gaia
from benchmarks.learning.gaia.training import streamed_bytes, train_gaia
from benchmarks.learning.kept import Kept
from benchmarks.learning.runs import SOURCE, parsed, parser_of
from benchmarks.tables import markdown, publish, spread
from swarm.reference.trainer import train_local
from swarm.text import counted, size

MARKS = ("<!-- gaia -->", "<!-- gaia end -->")


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table: a way of `benchmarks.learning.outer`, or gaia."""

    name: str
    how: outer.Way | Gaia

    def measure(self, seed: int, rate: float, steps: int, source: str) -> dict[str, float]:
        """Train once: the loss of the final weights on held-out text, and the bytes that an island sends another."""
        if isinstance(self.how, outer.Way):
            spec = outer.job(self.how, seed, rate, steps, source)
            trained = with_data(spec, train_local)
            weights = trained.stages[0].weights.newest()
            if spec.has_outer_steps:
                return {"loss": trained.evaluations[-1].loss, "bytes": streamed_bytes(spec, weights)}
            gradient = 4 * sum(one.numel() for one in weights.values())  # float32
            return {"loss": trained.evaluations[-1].loss, "bytes": steps * gradient}
        spec = outer.job(outer.Way("diloco", ISLANDS, (("every_steps", 1),)), seed, rate, steps, source)
        found = with_data(spec, partial(train_gaia, gaia=self.how))
        return {"loss": found.loss, "bytes": found.sent_bytes}


ISLANDS = 2
WAYS = (
    Way("allreduce", outer.ALLREDUCE),
    *(
        Way(f"streaming, H {every}, fp4", outer.Way("streaming", ISLANDS, (("every_steps", every),)))
        for every in (2, 5, 10, 50)
    ),
    Way("gaia, T 0, slack 0, float32", Gaia(threshold=0.0, slack=0, compression="none")),
    *(Way(f"gaia, T {threshold:g}, fp4", Gaia(threshold)) for threshold in (0.01, 0.05, 0.2)),
    Way("gaia, T 0.05 not falling, fp4", Gaia(0.05, decay="none")),
)
BY_NUMBER = tuple(
    Way(f"gaia by number, T {threshold:g}, bfloat16", Gaia(threshold, unit="coordinate", compression="bfloat16"))
    for threshold in (0.01, 0.05, 0.2)
)


def rows(found: Mapping[tuple[Way, float], Sequence[Mapping[str, float]]], steps: int) -> Iterator[list[str]]:
    """A row for each way, at the rate where it ends lowest."""

    def loss(one: Sequence[Mapping[str, float]]) -> float:
        return mean(run["loss"] for run in one)

    base: float | None = None
    for way in dict.fromkeys(way for way, _ in found):
        at_rates = [(rate, one) for (other, rate), one in found.items() if other == way]
        rate, runs = min(at_rates, key=lambda item: loss(item[1]))
        base = loss(runs) if base is None else base
        sent = size(round(mean(run["bytes"] for run in runs) / steps))
        yield [
            way.name,
            f"{loss(runs):.3f}{spread([run['loss'] for run in runs])}",
            f"{100 * (loss(runs) / base - 1):+.1f} %",
            f"{rate:g}",
            sent,
        ]


COLUMNS = ("way", "loss", "against allreduce", "rate", "sent per step")


def main() -> None:
    parser = parser_of(__doc__, seeds=3, steps=120)
    parser.add_argument("--rates", type=float, nargs="+", default=(4e-3,))
    parser.add_argument("--by-number", action="store_true", help="the same by single numbers, in the place of blocks")
    arguments = parsed(parser)
    console, kept = Console(), Kept(arguments.save)
    found: dict[tuple[Way, float], list[dict[str, float]]] = {}
    for seed in range(arguments.seeds):
        for way in (WAYS[0], *BY_NUMBER) if arguments.by_number else WAYS:
            for rate in arguments.rates:
                name = f"{way.name}, rate {rate:g}, seed {seed}, {arguments.steps} steps"
                run = kept.once(name, partial(way.measure, seed, rate, arguments.steps, SOURCE))
                found.setdefault((way, rate), []).append(run)
                console.print(f"{name}  {run['loss']:.4f}  {size(round(run['bytes']))}", highlight=False)
    text = (
        f"{markdown(COLUMNS, rows(found, arguments.steps))}\n\n{ISLANDS} islands, {arguments.steps} steps of "
        f"{SEQUENCES * LENGTH} bytes, {counted(arguments.seeds, 'seed')}, "
        f"learning rates {', '.join(f'{rate:g}' for rate in arguments.rates)}."
    )
    publish(text, arguments.table, MARKS)


if __name__ == "__main__":
    main()
