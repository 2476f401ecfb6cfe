"""What islands of unequal speed learn in each step and second: diloco, with equal shares and by speed.

    python -m benchmarks.learning.unequal_islands [--seeds 3] [--steps 120] [--save FILE] [--table docs/benchmarks.md]

Four islands need 0.58, 0.75, 1.51 and 3.33 s for a step, as in Liu et al. (arXiv 2401.09135). Each run is `swarm
train-local` in this process, on the model and text of `convergence`; time is that of a virtual clock, with exchanges
that take none. Every run sees the same tokens, and ends when they are trained. "Loss" is that of the outer weights on
held-out text, nats per byte. Ways are compared with the same outer learning rate and momentum, as which pair is taken
means more than which way. With --save each curve is kept when it is found, and a run that was interrupted goes on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from benchmarks.learning.convergence import LENGTH, SEQUENCES, resolved, small_llama
from benchmarks.learning.kept import Kept
from benchmarks.learning.runs import SOURCE, parsed, parser_of
from benchmarks.tables import markdown, publish, spread
from swarm.data.batches import Batches, TokenData
from swarm.data.corpus import tokenise
from swarm.job.leases import fill
from swarm.job.spec import JobSpec
from swarm.reference.trainer import Trained, train_local
from swarm.text import counted

STEP_S = (0.58, 0.75, 1.51, 3.33)  # of each island
HELD_OUT, RATE = 0.02, 4e-3
MARKS = ("<!-- unequal -->", "<!-- end of unequal -->")
FIRST_ENDS = "loss when the first way has ended"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to join islands of unequal speed."""

    name: str
    outer: tuple[tuple[str, object], ...] = ()
    shares: str = "equal"


def pair(learning_rate: float, momentum: float) -> tuple[tuple[str, object], ...]:
    """The numbers of the outer step, for a way that does not take "auto"."""
    return ("learning_rate", learning_rate), ("momentum", momentum)


DILOCO = Way("diloco")
WAYS = (
    DILOCO,
    Way("diloco", pair(0.7, 0.5)),
    Way("diloco, shares by speed", shares="speed"),
    Way("diloco, shares by speed", pair(0.7, 0.5), shares="speed"),
)
# A point of a curve: seconds of the virtual clock, and the loss then.
Curve = Sequence[tuple[float, float]]


def job(way: Way, seed: int, steps: int, every: int, source: str) -> JobSpec:
    values: dict[str, Any] = small_llama(seed, RATE, steps, SOURCE)
    values["data"] |= {"validation_ratio": HELD_OUT}
    values["training"] |= {"eval_every_steps": every}
    if way.shares == "speed":
        values["training"] |= {"microbatch_sequences": 1}
    values |= {
        "pipeline": {"stages": 1, "overlap": 0},
        "islands": {"count": len(STEP_S), "shares": way.shares},
        "averaging": {"mode": "diloco"},
        "outer": {"every_steps": every, **dict(way.outer)},
    }
    return resolved(values)


def curve(spec: JobSpec, batches: Batches) -> Curve:
    """Train once: the loss at each evaluation, and when that is."""
    speeds = [1 / seconds for seconds in STEP_S] if spec.islands.shares == "speed" else ()
    trained = train_local(spec, batches, speeds=speeds)
    return [(_time_s(spec, trained, at), one.loss) for at, one in enumerate(trained.evaluations)]


def _time_s(spec: JobSpec, trained: Trained, at: int) -> float:
    """When an evaluation takes place, behind an exchange: a period takes as long as the slowest island needs for it."""
    one, islands = trained.evaluations[at], len(STEP_S)
    equal_s, every = max(STEP_S), spec.outer.every_steps
    assert every != "auto", "the job says it"
    if spec.islands.shares == "equal":
        return one.version * equal_s
    whole = spec.training.microbatches
    made = fill(every * whole, {n: (0.0, 1 / step_s, every, 1) for n, step_s in enumerate(STEP_S)}, whole)
    period_s = max(made[n] * step_s / (whole / islands) for n, step_s in enumerate(STEP_S))
    return min(one.version, every) * equal_s + max(0, one.version / every - 1) * period_s


Curves = Mapping[Way, Sequence[Curve]]


def pair_text(spec: JobSpec) -> str:
    """The outer learning rate and momentum of a resolved job."""
    return f"{spec.outer.learning_rate:g}, {spec.outer.momentum:g}"


def at_time(curve: Curve, time_s: float) -> float:
    """The newest loss at a time."""
    return next((loss for when_s, loss in reversed(curve) if when_s <= time_s), curve[0][1])


def rows(curves: Curves, pairs: Mapping[Way, str]) -> Iterator[list[str]]:
    """A row for each way: its loss in the end, how long that took, and its loss when the first way was at its end."""
    base, base_s = mean(curve[-1][1] for curve in curves[DILOCO]), curves[DILOCO][0][-1][0]
    end_s = min(found[0][-1][0] for found in curves.values())
    for way, found in curves.items():
        lost, took_s = [curve[-1][1] for curve in found], found[0][-1][0]
        against = [100 * (loss / curve[-1][1] - 1) for loss, curve in zip(lost, curves[DILOCO], strict=True)]
        yield [
            way.name,
            f"{pairs[way]}{'' if way.outer else ' (auto)'}",
            f"{mean(lost):.3f}{spread(lost)} ({100 * (mean(lost) / base - 1):+.1f} %)",
            " ".join(f"{percent:+.1f}" for percent in against),
            f"{took_s:.0f} ({base_s / took_s:.2f}x)",
            f"{mean(at_time(curve, end_s) for curve in found):.3f}",
        ]


def main() -> None:
    parser = parser_of(__doc__, seeds=3, steps=120)
    parser.add_argument("--every", type=int, default=10)
    arguments = parsed(parser)
    console, kept = Console(), Kept(arguments.save)
    curves: dict[Way, list[Curve]] = {way: [] for way in WAYS}
    pairs: dict[Way, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        manifest = tokenise(job(DILOCO, 0, arguments.steps, arguments.every, SOURCE), Path(folder))
        data = TokenData.open([shard.path for shard in manifest.shards], manifest.token_dtype)
    for seed in range(arguments.seeds):
        for way in WAYS:
            spec = job(way, seed, arguments.steps, arguments.every, SOURCE)
            pairs[way] = pair_text(spec)
            name = f"{way.name}, outer {pairs[way]}, H {arguments.every}, seed {seed}, {arguments.steps} steps"
            batches = Batches.of_job(spec, data, manifest.end_of_text)
            found = kept.once(name, partial(curve, spec, batches))
            curves[way].append(found)
            end_s, loss = found[-1]
            console.print(f"{name}  {loss:.4f} after {end_s:.0f} s", highlight=False)
    header = ["way", "outer rate, momentum", "loss in the end", "by seed, %", "virtual seconds", FIRST_ENDS]
    text = (
        f"{markdown(header, rows(curves, pairs))}\n\n{arguments.steps} steps of {SEQUENCES * LENGTH} bytes, "
        f"H {arguments.every}, {counted(arguments.seeds, 'seed')}, learning rate {RATE:g}. In brackets, and by seed: "
        "against the first row."
    )
    publish(text, arguments.table, MARKS)


if __name__ == "__main__":
    main()
