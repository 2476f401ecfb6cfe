"""What exchanging rarely costs or gains in loss: diloco and streaming beside averaging every step, at equal tokens.

    python -m benchmarks.learning.outer [--seeds 1] [--steps 300] [--rates 0.004] [--table docs/benchmarks.md]
        [--save RUNS.json] [--gaia]

Each run is `swarm train-local` in this process, on the model and text of `convergence`. Every run sees the same tokens
in the same number of steps: with n islands each trains an nth of the batch. One island with outer steps stands beside
several, because outer momentum acts there too and would otherwise be taken for an effect of exchanging rarely. Each way
is shown at that of the learning rates with which it ends lowest for the first seed; other seeds take it. "Loss" is that
of the final weights on held-out text, nats per byte.
With --save each loss is kept when it is found, and a run that was interrupted goes on.

With --gaia two islands exchange with gaia, and with streaming at about as many bytes. "Bytes" are those that an island
sends to the other, for each parameter and step.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from rich.console import Console

from benchmarks.learning.convergence import LENGTH, MARKS, SEQUENCES, resolved, small_llama, trained, with_data
from benchmarks.learning.kept import Kept
from benchmarks.learning.runs import SOURCE, parsed, parser_of
from benchmarks.tables import markdown, publish, spread
from swarm.data.batches import Batches
from swarm.job.spec import JobSpec
from swarm.model.islands.exchange import proposal_bytes, proposed, shortened
from swarm.reference.checkpoints import Islands
from swarm.reference.trainer import StepReport, train_local
from swarm.text import counted

ISLANDS = (1, 2, 4)
HELD_OUT = 0.02


@dataclass(frozen=True, slots=True)
class Way:
    """One way to join islands: averaging.mode, what of [outer] differs from the defaults, and pipeline.overlap."""

    mode: str
    islands: int = 1
    outer: tuple[tuple[str, object], ...] = ()
    late: int = 0  # microbatches of an island's step

    def __str__(self) -> str:
        told = [f"H {value}" if key == "every_steps" else f"{key} {value}" for key, value in self.outer]
        return ", ".join([self.mode, *told, *([f"{self.late} late"] if self.late else [])])


ALLREDUCE = Way("allreduce")


def ways(periods: Sequence[int]) -> list[Way]:
    """The ways that are compared with ALLREDUCE: both modes with every period and number of islands."""
    return [
        Way(mode, islands, (("every_steps", every),))
        for mode in ("diloco", "streaming")
        for every in periods
        for islands in ISLANDS
    ]


def job(
    way: Way, seed: int, rate: float, steps: int, source: str, sequences: int = SEQUENCES, most: int = max(ISLANDS)
) -> JobSpec:
    """The job of one run, with a step of so many sequences that up to `most` islands divide; it is evaluated at its
    end."""
    values: dict[str, Any] = small_llama(seed, rate, steps, source)
    values["data"] |= {"validation_ratio": HELD_OUT}
    values["training"] |= {
        "eval_every_steps": steps,
        "global_batch_sequences": sequences,
        "microbatch_sequences": sequences // most,
    }
    values |= {
        "pipeline": {"stages": 1, "overlap": way.late},
        "islands": {"count": way.islands},
        "averaging": {"mode": way.mode},
        "outer": dict(way.outer),
    }
    return resolved(values)


def loss_of(way: Way, seed: int, rate: float, steps: int, source: str) -> float:
    """Train once; the loss of the final weights on held-out text."""
    return trained(job(way, seed, rate, steps, source)).evaluations[-1].loss


def _gaia(**outer: object) -> Way:
    return Way("gaia", 2, tuple(outer.items()))


def _streaming(every: int, code: str) -> Way:
    return Way("streaming", 2, (("every_steps", every), ("compression", code)))


BESIDE = (  # each way of gaia, and one of streaming that sends about as much
    (_gaia(threshold=0.0), _streaming(1, "bfloat16")),
    (_gaia(threshold=0.01), _streaming(2, "none")),
    (_gaia(threshold=0.05), _streaming(1, "bfloat16")),
    (_gaia(threshold=0.2), _streaming(1, "int8")),
    (_gaia(compression="int8", threshold=0.05), _streaming(1, "fp4")),
    (_gaia(compression="int8", threshold=0.2), _streaming(2, "fp4")),
    (_gaia(every_steps=20, compression="int8", threshold=0.2), _streaming(10, "fp4")),
)
GAIA_MARKS = ("<!-- gaia -->", "<!-- end of gaia -->")


def loss_and_bytes(way: Way, seed: int, rate: float, steps: int, source: str) -> tuple[float, float]:
    """Train once; the loss of the final weights, and the bytes that the first island sends for each parameter and
    step."""
    sent, parameters = 0, 0

    def look(islands: Islands, report: StepReport) -> None:
        nonlocal sent, parameters
        (stage,) = islands[0]
        assert stage.proposals is not None
        parameters = sum(elements for _, elements in stage.parameter_sizes())
        for update in stage.proposals.course.outer:
            if update.is_held and update.captured == report.step + 1:
                coded = [proposed(stage, unit, update.step) for unit in stage.units]
                sent += sum((shortened(stage, each) if way.mode == "gaia" else each).numel() for each in coded)
            elif not update.is_held and update.behind == report.step + 1:
                sent += sum(proposal_bytes(stage, unit, update.step) for unit in stage.units)

    def train(spec: JobSpec, batches: Batches) -> float:
        return train_local(spec, batches, on_commit=look).evaluations[-1].loss

    loss = with_data(job(way, seed, rate, steps, source), train)
    return loss, sent / parameters / steps


def gaia_rows(found: Mapping[Way, Sequence[tuple[float, float]]], base: float) -> Iterator[list[str]]:
    """A row for each way of gaia and the way of streaming beside it, with the means over seeds."""
    for pair in BESIDE:
        cells = []
        for way in pair:
            losses, sizes = zip(*found[way], strict=True)
            loss = mean(losses)
            cells += [str(way), f"{mean(sizes):.3g}", f"{loss:.3f}{spread(losses)} ({100 * (loss / base - 1):+.1f} %)"]
        yield cells


def run_name(way: Way, rate: float, seed: int, steps: int) -> str:
    """The name under which a loss is kept."""
    return f"{way}, {way.islands} islands, rate {rate:g}, seed {seed}, {steps} steps"


Losses = Mapping[tuple[Way, float], Sequence[float]]


def best(losses: Losses, way: Way) -> tuple[float, Sequence[float]]:
    """The learning rate at which the way ends lowest, and its losses there, by seed."""
    return min(((rate, found) for (one, rate), found in losses.items() if one == way), key=lambda item: mean(item[1]))


def rows(losses: Losses, compared: Sequence[Way]) -> Iterator[list[str]]:
    """A row for allreduce and for each mode and period; a column for each number of islands."""
    base = mean(best(losses, ALLREDUCE)[1])
    yield [str(ALLREDUCE), _cell(*best(losses, ALLREDUCE), base), *("" for _ in ISLANDS[1:])]
    for name in dict.fromkeys(map(str, compared)):
        alike = [way for way in compared if str(way) == name]
        yield [name, *(_cell(*best(losses, way), base) for way in alike)]


def _cell(rate: float, found: Sequence[float], base: float) -> str:
    return f"{mean(found):.3f}{spread(found)} ({100 * (mean(found) / base - 1):+.1f} %, rate {rate:g})"


def main() -> None:
    parser = parser_of(__doc__, seeds=1, steps=300)
    parser.add_argument("--every", type=int, nargs="+", default=(10, 50))
    parser.add_argument("--rates", type=float, nargs="+", default=(4e-3,))
    parser.add_argument("--gaia", action="store_true", help="gaia beside streaming")
    arguments = parsed(parser)
    console = Console()
    if arguments.gaia:
        _compare_gaia(arguments, console)
        return
    compared, kept = ways(arguments.every), Kept(arguments.save)
    losses: dict[tuple[Way, float], list[float]] = {}
    for seed in range(arguments.seeds):
        for way in (ALLREDUCE, *compared):
            for rate in arguments.rates if seed == 0 else (best(losses, way)[0],):
                started_s = time.perf_counter()
                run = partial(loss_of, way, seed, rate, arguments.steps, SOURCE)
                name = run_name(way, rate, seed, arguments.steps)
                losses.setdefault((way, rate), []).append(loss := kept.once(name, run))
                console.print(f"{name}  {loss:.4f}  {time.perf_counter() - started_s:.0f} s", highlight=False)
        if seed == 0:
            chosen = {(way, best(losses, way)[0]) for way in (ALLREDUCE, *compared)}
            losses = {key: found for key, found in losses.items() if key in chosen}
    header = ["way", *(counted(count, "island") for count in ISLANDS)]
    text = (
        f"{markdown(header, rows(losses, compared))}\n\n{arguments.steps} steps of {SEQUENCES * LENGTH} bytes, "
        f"{counted(arguments.seeds, 'seed')}, "
        f"learning rates {', '.join(f'{rate:g}' for rate in arguments.rates)}. In brackets: against allreduce, and the "
        "learning rate."
    )
    publish(text, arguments.table, MARKS)


def _compare_gaia(arguments: Namespace, console: Console) -> None:
    kept, (rate, *_) = Kept(arguments.save), arguments.rates
    ways_ = dict.fromkeys(way for pair in BESIDE for way in pair)
    found: dict[Way, list[tuple[float, float]]] = {way: [] for way in ways_}
    averaged = []
    for seed in range(arguments.seeds):
        name = run_name(ALLREDUCE, rate, seed, arguments.steps)
        averaged.append(kept.once(name, partial(loss_of, ALLREDUCE, seed, rate, arguments.steps, SOURCE)))
        for way in ways_:
            started_s = time.perf_counter()
            name = f"{run_name(way, rate, seed, arguments.steps)}, with bytes"
            found[way].append(kept.once(name, partial(loss_and_bytes, way, seed, rate, arguments.steps, SOURCE)))
            console.print(f"{name}  {found[way][-1]}  {time.perf_counter() - started_s:.0f} s", highlight=False)
    header = ["gaia", "bytes", "loss", "streaming", "bytes", "loss"]
    text = (
        f"{markdown(header, gaia_rows(found, mean(averaged)))}\n\n2 islands, {arguments.steps} steps of "
        f"{SEQUENCES * LENGTH} bytes of text, {counted(arguments.seeds, 'seed')}, learning rate {rate:g}. In brackets: "
        f"against allreduce, whose loss is {mean(averaged):.3f}."
    )
    publish(text, arguments.table, GAIA_MARKS)


if __name__ == "__main__":
    main()
