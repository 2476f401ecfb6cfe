"""What narrow places cost in loss at equal tokens, over seeds, by kind, factor and number of places.

    python -m benchmarks.learning.narrow_places [--seeds 3] [--steps 240] [--rates 4e-3] [--ways WAY ...]
        [--synchronous] [--save RUNS.json]

Each run is `swarm train-local` in this process, with the small Llama and the text of `benchmarks.learning.convergence`,
in two microbatches, of which one is late. "/3" is a place behind each of the first three layers, "/1" one in the
middle. int8 rounds what crosses a cut there; without it there is one stage, since no cut changes a bit.

Each way is shown at its best rate. "Tokens" is the share of its tokens after which the way without places first had the
loss that the narrow one ends with: below 1, so many tokens it is worth.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from rich.console import Console

from benchmarks.learning.convergence import SEQUENCES, Run, resolved, small_llama, trained
from benchmarks.learning.convergence import STAGES as LAYERS
from benchmarks.learning.kept import Kept
from benchmarks.learning.runs import SOURCE, parsed, parser_of
from benchmarks.tables import markdown, spread
from swarm.job.spec import JobSpec
from swarm.text import counted


@dataclass(frozen=True, slots=True)
class Way:
    """One way to carry less: the places of the model, and the codec at its cuts."""

    name: str
    kind: str = "none"
    factor: int = 4
    places: int = LAYERS - 1
    codec: str = "none"

    @property
    def bytes_per_token(self) -> float:
        """The bytes of a boundary tensor, one way, at the width of the model."""
        return (4.0 if self.codec == "none" else 1.02) / (1 if self.kind == "none" else self.factor)


PLAIN = Way("float32")
WAYS = (
    PLAIN,
    Way("int8", codec="int8"),
    *(Way(f"{kind} {factor} /3", kind, factor) for kind in ("maxout", "bottleneck") for factor in (2, 4)),
    *(Way(f"{kind} 4 /1", kind, 4, 1) for kind in ("maxout", "bottleneck")),
    Way("maxout 16 /1", "maxout", 16, 1),
    Way("maxout 4, int8 /1", "maxout", 4, 1, "int8"),
    *(Way(f"anchor 8 /{places}", "anchor", 8, places) for places in (3, 1)),
    Way("anchor 8, int8 /1", "anchor", 8, 1, "int8"),
)


def job(way: Way, seed: int, rate: float, steps: int, *, synchronous: bool = False) -> JobSpec:
    """The small Llama with the places and the cuts of a way; half late, or with plain AdamW and nothing late."""
    values: dict[str, Any] = small_llama(seed, rate, steps, SOURCE)
    values["training"]["microbatch_sequences"] = SEQUENCES // 2
    if synchronous:
        values["training"]["lookahead"] = 0.0
    if way.kind != "none":
        values["model"]["narrow"] = {"kind": way.kind, "factor": way.factor, "every": LAYERS // (way.places + 1)}
    stages = 1 if way.codec == "none" else way.places + 1
    pipeline = {"stages": stages, "compression": way.codec, "overlap": 0 if synchronous else 1}
    return resolved(values | {"pipeline": pipeline})


def best(runs: Mapping[tuple[Way, float], list[Run]], way: Way) -> tuple[float, list[Run]]:
    """The learning rate at which the way ends lowest, and its runs there."""
    found = {rate: made for (one, rate), made in runs.items() if one == way}
    rate = min(found, key=lambda rate: mean(run.at(1.0) for run in found[rate]))
    return rate, found[rate]


def rows(runs: Mapping[tuple[Way, float], list[Run]]) -> Iterator[list[str]]:
    """A row per way, against the one without places and codec, seed by seed."""
    _, plain = best(runs, PLAIN)
    for way in dict.fromkeys(way for way, _ in runs):
        rate, made = best(runs, way)
        ends = [run.at(1.0) for run in made]
        pairs = list(zip(ends, plain, strict=True))
        costs = " ".join(f"{100 * (end / base.at(1.0) - 1):+.1f}" for end, base in pairs)
        shares = [base.reaches(end) for end, base in pairs]
        worth = " ".join("1.00" if share is None else f"{share:.2f}" for share in shares)
        yield [
            way.name,
            f"{way.bytes_per_token:.2f}",
            f"{rate:g}",
            f"{mean(ends):.3f}{spread(ends)}",
            f"{costs} %",
            worth,
        ]


def main() -> None:
    parser = parser_of(__doc__, seeds=3, steps=240)
    parser.add_argument("--rates", type=float, nargs="+", default=(2e-3, 4e-3, 8e-3))
    parser.add_argument("--ways", nargs="+", default=[way.name for way in WAYS])
    parser.add_argument("--synchronous", action="store_true", help="nothing is late, and AdamW has no lookahead")
    arguments = parsed(parser)
    if arguments.table is not None:
        parser.error("--table: this one only prints")
    kept = Kept(arguments.save)
    console = Console()
    runs: dict[tuple[Way, float], list[Run]] = {}

    def run(way: Way, rate: float, seed: int) -> dict[str, Any]:
        began_s = time.perf_counter()
        spec = job(way, seed, rate, arguments.steps, synchronous=arguments.synchronous)
        made = Run(trained(spec).losses, spec.sync_steps, spec.overlap)
        took_s = time.perf_counter() - began_s
        console.print(f"{way.name:20} {rate:g}  seed {seed}  {made.at(1.0):.4f}  {took_s:.0f} s", highlight=False)
        return asdict(made)

    for seed in range(arguments.seeds):
        for way in (way for way in WAYS if way.name in arguments.ways):
            for rate in arguments.rates:
                how = " synchronous" if arguments.synchronous else ""
                name = f"{way.name}, {arguments.steps}{how} steps at {rate:g}, seed {seed}"
                found = kept.once(name, lambda way=way, rate=rate, seed=seed: run(way, rate, seed))  # type: ignore[misc]
                runs.setdefault((way, rate), []).append(Run(**found | {"losses": tuple(found["losses"])}))
    header = ["way", "bytes per number of the width", "best rate", "loss", "against float32, each seed", "tokens"]
    text = (
        f"{markdown(header, rows(runs))}\n\n{arguments.steps} steps of 1024 bytes, {counted(arguments.seeds, 'seed')}, "
        f"learning rates {', '.join(f'{rate:g}' for rate in arguments.rates)}."
    )
    console.print(text, highlight=False)


if __name__ == "__main__":
    main()
