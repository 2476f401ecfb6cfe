"""What overlap, lookahead and boundary codecs cost or gain in loss, over seeds, at equal tokens.

    python -m benchmarks.learning.convergence [--seeds 3] [--steps 400] [--table docs/convergence.md]
        [--save RUNS.json [--go-on]]

Each run is `swarm train-local` in this process: the stages, codecs at the cuts, overlap and data of a swarm, whose
weights are bitwise those of this run in reproducible mode. So one core measures what many machines would train. A seed
fixes initial weights and data order. Each way runs at every learning rate of a small grid and is shown at its best one.
"Loss" is the mean over the last tenth of the steps so far, in nats per byte.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar

from rich.console import Console

from benchmarks.learning.runs import SOURCE, parsed, parser_of
from benchmarks.tables import markdown, publish
from swarm.data.batches import Batches, TokenData
from swarm.data.corpus import tokenise
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.reference.trainer import Trained, train_local
from swarm.text import counted

STAGES, MICROBATCHES, SEQUENCES, LENGTH, WIDTH = 4, 8, 16, 64, 64
RATES = (2e-3, 4e-3)
MARKS = ("<!-- measured -->", "<!-- end -->")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train: what of [pipeline] and [training] differs from the defaults."""

    name: str
    pipeline: tuple[tuple[str, object], ...] = ()
    lookahead: float = 0.3


AUTO = "half late (auto)"
SYNCHRONOUS = Way("synchronous AdamW", (("overlap", 0),), lookahead=0.0)
WAYS = (
    SYNCHRONOUS,
    Way("AdamW, all late", (("overlap", "all"), ("sync_steps", 0)), lookahead=0.0),
    Way("synchronous, lookahead", (("overlap", 0),)),
    Way("a quarter late", (("overlap", MICROBATCHES // 4),)),
    Way(AUTO),
    Way("all late, lookahead", (("overlap", "all"),)),
)
SHORT = tuple(way for way in WAYS if ("overlap", "all") not in way.pipeline)
CODECS = (Way("float32"), Way("bfloat16", (("compression", "bfloat16"),)), Way("int8", (("compression", "int8"),)))


@dataclass(frozen=True, slots=True)
class Run:
    """The losses of one run, step by step."""

    losses: tuple[float, ...]
    sync_steps: int  # how many of them, from the first, overlap nothing
    overlap: int  # how many microbatches of each step after those use weights one step old

    def at(self, share: float) -> float:
        """Mean loss of the tenth of the steps that ends at this share of the run."""
        stop = round(len(self.losses) * share)
        return mean(self.losses[max(0, stop - len(self.losses) // 10) : stop])

    def reaches(self, loss: float) -> float | None:
        """The share of the run after which `at` is no higher than `loss`; None if it never is."""
        shares = (percent / 100 for percent in range(10, 101))
        return next((share for share in shares if self.at(share) <= loss), None)


def job(way: Way, seed: int, rate: float, steps: int, source: str, width: int) -> JobSpec:
    """A small Llama that reads `source` through STAGES stages, so three cuts."""
    values = small_llama(seed, rate, steps, source, width)
    values["training"]["lookahead"] = way.lookahead
    return resolved(values | {"pipeline": {"stages": STAGES, "compression": "none"} | dict(way.pipeline)})


def small_llama(seed: int, rate: float, steps: int, source: str, width: int = WIDTH) -> dict[str, Any]:
    """The values of a job file: a model of STAGES layers that learns the bytes of `source`."""
    return {
        "name": "convergence",
        "model": {
            "family": "llama",
            "dtype": "float32",
            "config": {
                "hidden_size": width,
                "intermediate_size": 3 * width,
                "num_hidden_layers": STAGES,
                "num_attention_heads": 4,
                "initializer_range": 0.05,
            },
        },
        "data": {"source": source, "sequence_length": LENGTH},
        "training": {
            "steps": steps,
            "global_batch_sequences": SEQUENCES,
            "microbatch_sequences": SEQUENCES // MICROBATCHES,
            "learning_rate": rate,
            "warmup_steps": max(1, steps // 10),
            "seed": seed,
        },
    }


def resolved(values: dict[str, Any]) -> JobSpec:
    """The job spec of these values, with every "auto" replaced."""
    return resolve(parse_job(values), Basis(ByteTokenizer.vocabulary_size, stages=STAGES))


def measure(way: Way, seed: int, rate: float, steps: int, source: str, width: int) -> Run:
    """Train once."""
    spec = job(way, seed, rate, steps, source, width)
    return Run(trained(spec).losses, spec.sync_steps, spec.overlap)


def trained(spec: JobSpec) -> Trained:
    """Tokenise and train a resolved spec in this process."""
    return with_data(spec, train_local)


def with_data(spec: JobSpec, train: Callable[[JobSpec, Batches], T]) -> T:
    """Tokenise, and train in this way."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = tokenise(spec, Path(folder))
        data = TokenData.open([shard.path for shard in manifest.shards], manifest.token_dtype)
        return train(spec, Batches.of_job(spec, data, manifest.end_of_text))


def best(runs: dict[tuple[Way, float], list[Run]], way: Way) -> tuple[float, list[Run]]:
    """The learning rate at which the way ends lowest, and its runs there."""
    return min(
        ((rate, made) for (one, rate), made in runs.items() if one == way),
        key=lambda item: mean(run.at(1.0) for run in item[1]),
    )


def save(path: Path, runs: dict[tuple[Way, float], list[Run]]) -> None:
    """Keep all losses, for tables that are made of them later, and for a run that goes on."""
    text = json.dumps(
        [{"way": way.name, "rate": rate, "runs": [asdict(run) for run in made]} for (way, rate), made in runs.items()]
    )
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def saved(path: Path) -> dict[tuple[Way, float], list[Run]]:
    """What `save` kept; KeyError for a way that is none of WAYS."""
    ways = {way.name: way for way in WAYS}
    return {
        (ways[entry["way"]], entry["rate"]): [Run(**run | {"losses": tuple(run["losses"])}) for run in entry["runs"]]
        for entry in json.loads(path.read_text())
    }


def overlap_rows(runs: dict[tuple[Way, float], list[Run]]) -> Iterator[list[str]]:
    """A row per way: loss at its best rate, and how soon it reaches what synchronous AdamW does."""
    _, base = best(runs, SYNCHRONOUS)
    for way in WAYS:
        rate, made = best(runs, way)
        ends = [run.at(1.0) for run in made]
        spread = f" ± {stdev(ends):.3f}" if len(ends) > 1 else ""
        versus = 100 * (mean(ends) / mean(run.at(1.0) for run in base) - 1)
        yield [way.name, f"{rate:g}", f"{mean(ends):.3f}{spread}", f"{versus:+.1f} %"] + [
            " ".join(_share(run.reaches(of.at(share))) for run, of in zip(made, base, strict=True))
            for share in (0.75, 1.0)
        ]


def codec_rows(runs: dict[Way, list[Run]], seeds: Sequence[int]) -> Iterator[list[str]]:
    """A row per seed: loss per codec, and the greatest difference from float32."""
    for place, seed in enumerate(seeds):
        row = [runs[way][place].at(1.0) for way in CODECS]
        worst = max(abs(loss / row[0] - 1) for loss in row)
        yield [str(seed), *(f"{loss:.4f}" for loss in row), f"{100 * worst:.2f} %"]


def _share(share: float | None) -> str:
    return "never" if share is None else f"{share:.2f}"


def main() -> None:
    parser = parser_of(__doc__, seeds=3, steps=400)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--source", default=SOURCE, help="the text that is learned, as data.source of a job file")
    parser.add_argument("--width", type=int, default=WIDTH, help="hidden size of the model")
    parser.add_argument("--short", action="store_true", help="leave out what is all late, and the codecs")
    parser.add_argument("--go-on", action="store_true", help="leave out runs that the file of --save has already")
    arguments = parsed(parser)
    if arguments.table is not None and arguments.short:
        parser.error("--short leaves out what --table shows")
    console = Console()
    seeds = range(arguments.seeds)

    def run(way: Way, rate: float, seed: int) -> Run:
        started_s = time.perf_counter()
        made = measure(way, seed, rate, arguments.steps, arguments.source, arguments.width)
        took_s = time.perf_counter() - started_s
        console.print(f"{way.name:24} {rate:g}  seed {seed}  {made.at(1.0):.4f}  {took_s:.0f} s", highlight=False)
        return made

    compared = SHORT if arguments.short else WAYS
    by_rate = {(way, rate): list[Run]() for way in compared for rate in arguments.rates}
    if arguments.go_on and arguments.save is not None and arguments.save.exists():
        by_rate |= {key: made for key, made in saved(arguments.save).items() if key in by_rate}
    if any(len(made.losses) != arguments.steps for runs in by_rate.values() for made in runs):
        parser.error(f"--save {arguments.save}: it has runs of another number of steps")
    for seed in seeds:
        for (way, rate), runs in by_rate.items():
            if len(runs) > seed:
                continue
            runs.append(run(way, rate, seed))
            if arguments.save is not None:
                save(arguments.save, by_rate)
    if arguments.short:
        return
    auto = next(way for way in WAYS if way.name == AUTO)
    by_codec = {CODECS[0]: by_rate[auto, arguments.rates[-1]]}
    by_codec |= {way: [run(way, arguments.rates[-1], seed) for seed in seeds] for way in CODECS[1:]}
    ways = ["way", "best rate", "loss", "against synchronous AdamW", "reaches its 75 %", "reaches its 100 %"]
    codecs = ["seed", *(way.name for way in CODECS), "most from float32"]
    text = (
        f"Overlap and lookahead:\n\n{markdown(ways, overlap_rows(by_rate))}\n\n"
        f"Boundary codecs, with the defaults:\n\n{markdown(codecs, codec_rows(by_codec, seeds))}\n\n"
        f"{arguments.steps} steps of {SEQUENCES * LENGTH} bytes in {MICROBATCHES} microbatches, {STAGES} stages, "
        f"{counted(arguments.seeds, 'seed')}, learning rates {', '.join(f'{rate:g}' for rate in arguments.rates)}."
    )
    publish(text, arguments.table, MARKS)


if __name__ == "__main__":
    main()
