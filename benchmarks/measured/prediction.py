"""The play's tokens/s beside those of real processes, for six shapes of swarm (scheduler/planning/play.py).

    python -m benchmarks.measured.prediction [--only 0,3] [--compute 0.2] [--output json]

Each shape is a scheduler and stage servers, real processes whose computations take given times
(modelled_stage_server.py): a forward and a backward `--compute` seconds each at speed 1. With links every process is at
a host of its own (tests/chaos/relay.py, which needs root), and each pair of stage servers has a link of 100 Mbit/s and
the round-trip time that is stated; the scheduler is half as far. Measured are 8 steps behind 3, while more come behind
them, in the played swarm as in the real one. "Off" is played over measured, less 1.

The play takes from a shape what a plan would know: peers, speeds, cut, overlap, bytes, and the delay of links that the
stage servers themselves have measured by the end (half of the shortest time until a receipt).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.measured.churn_processes import STEPS
from benchmarks.measured.unequal_processes import STEP_S, Unequal, until_steps
from scheduler.planning.bound import CutBound
from scheduler.planning.plan import Plan
from scheduler.planning.play import Play, Played, PlayRules, workload
from scheduler.planning.pool import PeerPool, PoolLink, PoolPeer
from swarm.job.spec import JobSpec
from tests.chaos.relay import Relay, why_not

LINK_BITS_PER_S = 100e6
LOOPBACK_BITS_PER_S = 1e10
SEEDS = 3
NOISE = 0.02  # of computations that are slept, beside others on two cores


@dataclass(frozen=True, slots=True)
class Shape:
    """A swarm: stages, speeds of a stage's replicas, the share of late microbatches, round trips between peers."""

    stages: int
    speeds: tuple[float, ...]
    microbatches: int
    late: float
    round_trip_s: float = 0.0

    @property
    def name(self) -> str:
        ratio = ":".join(f"{speed:g}" for speed in self.speeds)
        link = f"{self.round_trip_s * 1e3:g} ms" if self.round_trip_s else "no links"
        return f"{self.stages} stages of {ratio}, {self.late:g} of {self.microbatches} late, {link}"

    @property
    def late_microbatches(self) -> int:
        return round(self.late * self.microbatches)


SHAPES = (
    Shape(2, (1.0, 1.0), 12, 0.0),
    Shape(2, (1.0, 2.0, 4.0), 28, 0.5),
    Shape(4, (1.0, 1.0), 12, 0.25, 0.02),
    Shape(3, (1.0, 2.0, 4.0), 28, 0.0, 0.02),
    Shape(2, (1.0, 2.0, 4.0), 28, 0.25, 0.1),
    Shape(4, (1.0, 1.0), 12, 0.5, 0.1),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One shape; rates in tokens/s."""

    name: str
    measured: float
    played: float
    spread: float  # of the play
    busy: float  # of the processors, while it was measured

    @property
    def off(self) -> float:
        return self.played / self.measured - 1.0


def play(shape: Shape, spec: JobSpec, compute_s: float, delay_s: float) -> list[Played]:
    """What the play says of a shape whose links have such a delay, once for each seed."""
    rules = PlayRules(noise=NOISE, forward=0.5, owed_max=shape.stages)
    peers, places = [], []
    for stage in range(shape.stages):
        names = [f"peer-{stage}-{replica}" for replica in range(len(shape.speeds))]
        places.append(tuple(names))
        peers += [
            PoolPeer(name, "cpu", 0, "here", speed, LOOPBACK_BITS_PER_S, LOOPBACK_BITS_PER_S)
            for name, speed in zip(names, shape.speeds, strict=True)
        ]
    bits_per_s = LINK_BITS_PER_S if shape.round_trip_s else LOOPBACK_BITS_PER_S
    link = PoolLink(delay_s, bits_per_s)
    links = {(a.name, b.name): link for a in peers for b in peers}
    pool = PeerPool(tuple(peers), links, by_peer=True)
    plan = Plan(spec.split, tuple(places), 2, shape.late_microbatches)
    load = workload(CutBound(pool, spec))
    work, apply_s = (2.0 * compute_s,) * shape.stages, (STEP_S,) * shape.stages
    load = replace(load, work=work, apply_s=apply_s, reach_s=shape.round_trip_s / 4.0)
    return [Play(pool, plan, load, rules, seed).run() for seed in range(SEEDS)]


def measure(shape: Shape, compute_s: float, steps: int) -> tuple[JobSpec, float, float, float]:
    """The spec and the tokens/s of real processes, the delay of their links, and how busy the processors were."""
    options = argparse.Namespace(stages=shape.stages, speeds=shape.speeds, compute=compute_s)
    with _hosts(shape) as (hosts, at), tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        with Unequal(Path(name), options, hosts, at) as trial:
            trial.add_servers(shape.stages * len(shape.speeds))
            job = trial.job(
                shape.stages, STEPS, config__num_hidden_layers=shape.stages,
                training__global_batch_sequences=2 * shape.microbatches, training__learning_rate=1e-4,
                pipeline__overlap=shape.late_microbatches, pipeline__sync_steps=0,
                checkpoint__every_steps=0, checkpoint__every_s=0.0,
            )  # fmt: skip
            rules = PlayRules()
            until_steps(trial, job, rules.warm_up)
            psutil.cpu_percent()
            commits_s = until_steps(trial, job, rules.warm_up + steps)
            busy = psutil.cpu_percent() / 100.0
            seconds = commits_s[rules.warm_up + steps - 1] - commits_s[rules.warm_up - 1]
            tokens = 2 * shape.microbatches * job.spec.data.sequence_length
            receipts_s = [link.receipt_s for peer in trial.peers() for link in peer.links if link.receipt_s]
            return job.spec, tokens * steps / seconds, median(receipts_s) / 2.0 if receipts_s else 0.0, busy


@contextlib.contextmanager
def _hosts(shape: Shape) -> Iterator[tuple[Sequence[str], Sequence[Sequence[str]]]]:
    """The scheduler's host and one for each stage server, and how to run there; nothing without links."""
    if not shape.round_trip_s:
        yield (), ()
        return
    count = 1 + shape.stages * len(shape.speeds)
    with Relay(count, seed=0) as relay:
        for one in range(count):
            for other in range(one):
                delay_s = shape.round_trip_s / (2.0 if other else 4.0)
                relay.between(one, other, delay_s=delay_s, bytes_per_s=LINK_BITS_PER_S / 8.0 if other else 0.0)
        relay.move_here(0)
        yield relay.hosts, [relay.at(host) for host in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=lambda text: [int(one) for one in text.split(",")], default=range(len(SHAPES)))
    parser.add_argument("--compute", type=float, default=0.25, help="seconds of a forward, and of a backward")
    parser.add_argument("--steps", type=int, default=8, help="measured ones")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if any(SHAPES[number].round_trip_s for number in options.only) and (lack := why_not()):
        parser.error(lack)
    found = [
        compare(SHAPES[number], options.compute, options.steps) if len(options.only) == 1 else _apart(number, options)
        for number in options.only
    ]
    if options.output == "json":
        print(json.dumps({"load": os.getloadavg()[0], "shapes": [{**asdict(one), "off": one.off} for one in found]}))
        return 0
    table = Table("swarm", "measured", "played", "off", "processors busy")
    for one in found:
        table.add_row(one.name, f"{one.measured:.1f}", f"{one.played:.1f}", f"{one.off:+.1%}", f"{one.busy:.0%}")
    Console(width=140).print(table)
    return 0


def compare(shape: Shape, compute_s: float, steps: int) -> Compared:
    """One shape, measured and played."""
    spec, measured, delay_s, busy = measure(shape, compute_s, steps)
    rates = [one.tokens_per_s for one in play(shape, spec, compute_s, delay_s)]
    found = Compared(shape.name, measured, mean(rates), max(rates) - min(rates), busy)
    print(f"{shape.name}: measured {measured:.1f}, played {found.played:.1f}, {found.off:+.1%}", file=sys.stderr)
    return found


def _apart(number: int, options: argparse.Namespace) -> Compared:
    """One shape in a process of its own: a thread that has gone to a host does not come back."""
    words = ["--only", str(number), "--compute", str(options.compute), "--steps", str(options.steps)]
    command = [sys.executable, "-m", "benchmarks.measured.prediction", *words, "--output", "json"]
    made = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    (values,) = json.loads(made.stdout)["shapes"]
    del values["off"]
    return Compared(**values)


if __name__ == "__main__":
    sys.exit(main())
