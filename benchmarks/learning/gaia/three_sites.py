"""Gaia at three sites, one of which has links of a fifteenth of the rate: the band, and the barrier.

    python -m benchmarks.learning.gaia.three_sites [--seeds 2] [--steps 120] [--table docs/islands.md]
        [--save RUNS.json]

All sites need a second for a step. The slow links carry a quarter of the model in fp4 in that time, so the limit is to
send a quarter of the model in each step to both others, as both get the same. The mirror clock travels alone, so what
holds islands back is the barrier, where there is one. "Use of the limit" is that of the newest 10 s (30 where the table
says so) behind every step of every island once a minute has passed, until the last step, behind which all is sent: the
median, the least and the most. T is the threshold in that time. Beside it stand averaging every step, and streaming
with as many bytes, and with half, whose seconds are those of steps and of waiting for the slow link. With --save each
result is kept when it is found, and a run that was interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any

from rich.console import Console

from benchmarks.learning import outer
from benchmarks.learning.convergence import LENGTH, with_data
from benchmarks.learning.gaia.band import Band
from benchmarks.learning.gaia.sea import REASONS, Sites
from benchmarks.learning.gaia.significance import Gaia
from benchmarks.learning.gaia.training import streamed_bytes, streamed_s, train_gaia
from benchmarks.learning.kept import Kept
from benchmarks.learning.runs import SOURCE, parsed, parser_of
from benchmarks.tables import markdown, publish, spread
from swarm.data.batches import Batches
from swarm.job.spec import JobSpec
from swarm.reference.trainer import train_local
from swarm.text import counted, size

ISLANDS, SEQUENCES, RATE = 3, 15, 4e-3
STEP_S, SETTLED_S = 1.0, 60.0
RATIO, SLOW = 15, 32 * 1024  # bytes a second of the slow site's links: a quarter of the model in fp4 in each step
MARKS = ("<!-- three sites -->", "<!-- end of three sites -->")


def sites(slow: float) -> Sites:
    """Three of one speed, one of which has links of so many bytes a second."""
    return Sites((STEP_S,) * ISLANDS, (RATIO * slow, RATIO * slow, slow), delay_s=0.05)


SITES, FASTER = sites(SLOW), sites(2 * SLOW)
job = partial(outer.job, sequences=SEQUENCES, most=ISLANDS)


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table: a way of `benchmarks.learning.outer`, or gaia."""

    name: str
    how: outer.Way | Gaia
    sites: Sites = SITES

    def measure(self, seed: int, steps: int, source: str) -> dict[str, Any]:
        """Train once, and tell what the columns of the table need."""
        if isinstance(self.how, Gaia):
            spec = job(outer.Way("diloco", ISLANDS, (("every_steps", 1),)), seed, RATE, steps, source)
            return with_data(spec, partial(sent_when_significant, gaia=self.how, sites=self.sites))
        return with_data(job(self.how, seed, RATE, steps, source), partial(in_turn, sites=self.sites))


def streaming(every: int, overlap: int) -> outer.Way:
    return outer.Way("streaming", ISLANDS, (("every_steps", every), ("overlap_steps", overlap)))


FIXED = Gaia(0.05, clock="alone")
BAND, FINE = Band(), Band(step=0.001)
BARRIER_S = STEP_S
WAYS = (
    Way("allreduce", outer.ALLREDUCE),
    Way("streaming, H 4, fp4", streaming(4, 1)),
    Way("streaming, H 8, overlap 2, fp4", streaming(8, 2)),
    Way("T 0.05, falling", FIXED),
    Way("band", replace(FIXED, band=BAND)),
    Way("band, by 0.001", replace(FIXED, band=FINE)),
    Way("band, by 0.001, over 30 s", replace(FIXED, band=replace(FINE, window_s=30.0))),
    Way("band, by 0.001, holds", replace(FIXED, band=replace(FINE, holds=True))),
    Way("band, by number", replace(FIXED, band=BAND, unit="coordinate")),
    Way("band, by number, by 0.01", replace(FIXED, band=Band(step=0.01), unit="coordinate")),
    Way("T 0.05, falling, barrier", replace(FIXED, barrier_s=BARRIER_S)),
    Way("band, by 0.001, barrier", replace(FIXED, band=FINE, barrier_s=BARRIER_S)),
    Way("the same, links twice as fast", replace(FIXED, band=replace(FINE, share=0.5), barrier_s=BARRIER_S), FASTER),
)


def in_turn(spec: JobSpec, batches: Batches, sites: Sites) -> dict[str, Any]:
    """What a job without Gaia loses, sends, and takes on these links."""
    trained = train_local(spec, batches)
    weights, steps = trained.stages[0].weights.newest(), spec.training.steps
    if spec.has_outer_steps:
        sent, took_s = streamed_bytes(spec, weights), streamed_s(spec, weights, sites)
    else:  # a gradient in float32 in each step, for which all wait
        sent = steps * 4 * sum(one.numel() for one in weights.values())
        took_s = steps * (STEP_S + sites.delay_s) + sent / min(sites.bytes_per_s)
    return {"loss": trained.evaluations[-1].loss, "bytes": sent / steps, "seconds": took_s}


def sent_when_significant(spec: JobSpec, batches: Batches, gaia: Gaia, sites: Sites) -> dict[str, Any]:
    """The same with Gaia, and what band, clock and barrier did. Use and T are those behind the first minute."""
    found = train_gaia(spec, batches, gaia, sites)
    return {
        "loss": found.loss,
        "bytes": found.sent_bytes / spec.training.steps,
        "seconds": found.seconds,
        "uses": [use for one in found.islands for when_s, use in one.uses if when_s > SETTLED_S],
        "thresholds": [
            threshold
            for one in found.islands
            for (when_s, _), threshold in zip(one.uses, one.thresholds, strict=True)
            if when_s > SETTLED_S
        ],
        "stood": {why: [one.stood[why] for one in found.islands] for why in REASONS},
        "stood_s": {why: [one.stood_s[why] for one in found.islands] for why in REASONS},
    }


COLUMNS = (
    "way", "loss", "sent per step", "virtual seconds", "use of the limit", "within 0.9 to 1.1", "T", "at the barrier",
    "at the clock",
)  # fmt: skip


def rows(found: Mapping[Way, Sequence[Mapping[str, Any]]]) -> Iterator[list[str]]:
    """A row for each way; where it takes one figure of several, that is the mean over seeds."""
    base = mean(run["loss"] for run in next(iter(found.values())))
    for way, runs in found.items():
        lost = [run["loss"] for run in runs]
        cells = [
            way.name,
            f"{mean(lost):.3f}{spread(lost)} ({100 * (mean(lost) / base - 1):+.1f} %)",
            size(round(mean(run["bytes"] for run in runs))),
            f"{mean(run['seconds'] for run in runs):.0f}",
        ]
        if isinstance(way.how, Gaia):
            uses, thresholds = ([one for run in runs for one in run[key]] for key in ("uses", "thresholds"))
            within = mean(BAND.low <= use <= BAND.high for use in uses)
            cells += [
                f"{median(uses):.2f} ({min(uses):.2f} to {max(uses):.2f})",
                f"{100 * within:.0f} %",
                f"{min(thresholds):.3f} to {max(thresholds):.3f}",
                *(_stood(runs, why) for why in REASONS),
            ]
        yield cells + [""] * (len(COLUMNS) - len(cells))


def _stood(runs: Sequence[Mapping[str, Any]], why: str) -> str:
    """How often an island stood there, and how long all in all."""
    times, seconds = (mean(mean(run[key][why]) for run in runs) for key in ("stood", "stood_s"))
    return f"{times:.0f} times, {seconds:.0f} s" if times else "–"


def main() -> None:
    arguments = parsed(parser_of(__doc__, seeds=2, steps=120))
    console, kept = Console(), Kept(arguments.save)
    found: dict[Way, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for seed in range(arguments.seeds):
        for way in WAYS:
            name = f"{way.name}, seed {seed}, {arguments.steps} steps"
            run = kept.once(name, partial(way.measure, seed, arguments.steps, SOURCE))
            found[way].append(run)
            console.print(f"{name}  {run['loss']:.4f}  {size(round(run['bytes']))} a step", highlight=False)
    text = (
        f"{markdown(COLUMNS, rows(found))}\n\n{ISLANDS} islands, {arguments.steps} steps of {SEQUENCES * LENGTH} bytes "
        f"and {STEP_S:g} s, {counted(arguments.seeds, 'seed')}, learning rate {RATE:g}. Slow links carry {size(SLOW)} "
        f"a second, the others {RATIO} times that."
    )
    publish(text, arguments.table, MARKS)


if __name__ == "__main__":
    main()
