"""What boundary codecs and staleness cost in loss, over seeds, at equal tokens.

    python -m benchmarks.measured.convergence [--seeds 3] [--steps 200] [--table docs/convergence.md]

Each run is `swarm train-local` in this process: the stages, codecs at the cuts, staleness and data of a swarm, whose
weights are bitwise those of this run in reproducible mode. So one core measures what many machines would train.
A seed fixes initial weights and data order; runs of one seed differ in the column's setting alone, so compare along
rows. "Loss" is the mean over the last tenth of the steps, in nats per byte.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table

from swarm.data.batches import Batches, TokenData
from swarm.data.shards import tokenise
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.reference.trainer import train_local

STAGES = 4
MARK_START, MARK_END = "<!-- measured -->", "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Setting:
    """One column: what travels between stages, and how old the weights may be."""

    name: str
    compression: str
    staleness: int


CODECS = (
    Setting("float32", "none", 1),
    Setting("bfloat16", "bfloat16", 1),
    Setting("int8", "int8", 1),
)
STALENESS = (Setting("staleness 1", "none", 1), Setting("staleness 0", "none", 0))


@dataclass(frozen=True, slots=True)
class Run:
    """The losses of one run, step by step, and how long it took."""

    losses: tuple[float, ...]
    seconds: float

    def at(self, share: float) -> float:
        """Mean loss of the tenth of the steps that ends at this share of the run."""
        stop = round(len(self.losses) * share)
        return mean(self.losses[max(0, stop - len(self.losses) // 10) : stop])


def job(setting: Setting, seed: int, steps: int, source: str) -> JobSpec:
    """A small Llama that reads `source` through STAGES stages, so three cuts."""
    values = {
        "name": "convergence",
        "model": {
            "family": "llama",
            "dtype": "float32",
            "config": {
                "hidden_size": 128,
                "intermediate_size": 384,
                "num_hidden_layers": STAGES,
                "num_attention_heads": 4,
                "initializer_range": 0.05,
            },
        },
        "data": {"source": source, "sequence_length": 128},
        "training": {
            "steps": steps,
            "global_batch_sequences": 16,
            "microbatch_sequences": 4,
            "learning_rate": 3e-3,
            "warmup_steps": max(1, steps // 10),
            "seed": seed,
        },
        "pipeline": {"stages": STAGES, "compression": setting.compression, "staleness": setting.staleness},
    }
    return resolve(parse_job(values), vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=STAGES)


def measure(setting: Setting, seed: int, steps: int, source: str) -> Run:
    """Train once."""
    spec = job(setting, seed, steps, source)
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        manifest = tokenise(spec, Path(folder))
        data = TokenData.open([shard.path for shard in manifest.shards], manifest.token_dtype)
        batches = Batches(data, spec.training, spec.data.sequence_length, spec.data.shuffle, seed)
        losses = train_local(spec, batches).losses
    return Run(losses, time.perf_counter() - started_s)


def codec_table(runs: dict[tuple[Setting, int], Run], seeds: Sequence[int]) -> list[list[str]]:
    """A row per seed and one of means: loss per codec, and the greatest difference from float32."""
    rows = []
    finals = {setting: [runs[setting, seed].at(1.0) for seed in seeds] for setting in CODECS}
    for place, seed in [*enumerate(seeds), (None, "mean")]:
        row = {setting: mean(losses) if place is None else losses[place] for setting, losses in finals.items()}
        base = row[CODECS[0]]
        worst = max(abs(loss / base - 1) for loss in row.values())
        rows.append([str(seed), *(f"{loss:.4f}" for loss in row.values()), f"{100 * worst:.2f} %"])
    return rows


def staleness_table(runs: dict[tuple[Setting, int], Run], seeds: Sequence[int]) -> list[list[str]]:
    """A row per share of the run: mean loss over the seeds for each staleness, and their ratio."""
    rows = []
    for share in (0.25, 0.5, 0.75, 1.0):
        stale, synchronous = (mean(runs[setting, seed].at(share) for seed in seeds) for setting in STALENESS)
        each = ", ".join(
            f"{100 * (runs[STALENESS[0], seed].at(share) / runs[STALENESS[1], seed].at(share) - 1):+.1f}"
            for seed in seeds
        )
        percent = f"{100 * (stale / synchronous - 1):+.1f} % ({each})"
        rows.append([f"{100 * share:.0f} %", f"{stale:.4f}", f"{synchronous:.4f}", percent])
    return rows


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", type=Path, help="a Markdown file whose measured part is replaced")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    source = f"{sysconfig.get_paths()['stdlib']}/[a-d]*.py"
    seeds = range(arguments.seeds)
    runs: dict[tuple[Setting, int], Run] = {}
    settings = [*CODECS, STALENESS[1]]  # the first of STALENESS is the first of CODECS
    for seed in seeds:
        for setting in settings:
            run = runs[setting, seed] = measure(setting, seed, arguments.steps, source)
            console.print(
                f"seed {seed}  {setting.name:12} loss {run.at(1.0):.4f}  {run.seconds:.0f} s", highlight=False
            )
    for seed in seeds:
        runs[STALENESS[0], seed] = runs[CODECS[0], seed]
    codec_header = ["seed", *(setting.name for setting in CODECS), "most from float32"]
    staleness_header = ["of the tokens", *(setting.name for setting in STALENESS), "difference (per seed)"]
    parts = [
        ("Boundary codecs", codec_header, codec_table(runs, seeds)),
        ("Staleness", staleness_header, staleness_table(runs, seeds)),
    ]
    text = []
    for title, header, rows in parts:
        table = Table(*header, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        text.append(f"{title}:\n\n{_markdown(header, rows)}")
    seconds = mean(run.seconds for run in runs.values())
    text.append(f"{arguments.steps} steps of 2048 bytes; a run took {seconds:.0f} s on {arguments.threads} thread(s).")
    if arguments.table is not None:
        old = arguments.table.read_text()
        before, _, rest = old.partition(MARK_START)
        after = rest.partition(MARK_END)[2]
        arguments.table.write_text(f"{before}{MARK_START}\n" + "\n\n".join(text) + f"\n{MARK_END}{after}")


if __name__ == "__main__":
    main()
