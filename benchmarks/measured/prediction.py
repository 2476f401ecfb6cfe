"""The play's tokens/s beside those of real processes, for seven shapes of swarm (scheduler/planning/play.py).

    python -m benchmarks.measured.prediction [--only 0,3] [--compute 0.2] [--output json]

Each shape is a scheduler and stage servers, real processes whose computations take given times
(modelled_stage_server.py): a forward and a backward `--compute` seconds each at speed 1. With links every process is at
a host of its own (tests/chaos/relay.py, which needs root), and each pair of stage servers has a link of 100 Mbit/s and
the round-trip time that is stated; the scheduler is half as far. Measured are 8 steps behind 3, while more come behind
them, in the played swarm as in the real one. "Off" is played over measured, less 1.

In the last shape two islands of 2 stages of 2 replicas have leases by speed; the replicas of the second one are half as
fast. Only between islands the links have that round trip, and 1 Mbit/s. Measured are two periods of 6 steps behind one.

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
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.measured.churn_processes import STEPS
from benchmarks.measured.unequal_processes import STEP_S, Unequal, until_steps
from scheduler.planning.bound import CutBound
from scheduler.planning.plan import Plan
from scheduler.planning.play import Play, Played, PlayRules, workload
from scheduler.planning.pool import PeerPool, PoolLink, PoolPeer
from swarm.job.islands import island_spec
from swarm.job.spec import JobSpec
from tests.chaos.relay import Relay, why_not
from tests.support.processes import Process

LINK_BITS_PER_S, BETWEEN_BITS_PER_S = 100e6, 1e6  # of peers, and of peers of two islands
LOOPBACK_BITS_PER_S = 1e10
SEEDS = 3
NOISE = 0.02  # of computations that are slept, beside others on two cores
EVERY, WIDTH = 6, 64  # steps between exchanges, and of the model that islands exchange


@dataclass(frozen=True, slots=True)
class Shape:
    """A swarm: stages, speeds of a stage's replicas, the share of late microbatches, round trips between peers."""

    stages: int
    speeds: tuple[float, ...]
    microbatches: int
    late: float
    round_trip_s: float = 0.0
    islands: int = 1  # the replicas of a stage are of the first island, and then of the second

    @property
    def name(self) -> str:
        ratio = ":".join(f"{speed:g}" for speed in self.speeds)
        link = f"{self.round_trip_s * 1e3:g} ms" if self.round_trip_s else "no links"
        islands = f"{self.islands} islands, " if self.islands > 1 else ""
        return f"{islands}{self.stages} stages of {ratio}, {self.late:g} of {self.microbatches} late, {link}"

    @property
    def late_microbatches(self) -> int:
        return round(self.late * self.microbatches)

    def island(self, replica: int) -> int:
        return replica * self.islands // len(self.speeds)

    def changes(self) -> dict[str, object]:
        """What islands change in the job file."""
        if self.islands == 1:
            return {}
        return {
            "averaging__mode": "diloco", "islands__count": self.islands, "islands__shares": "speed",
            "outer__every_steps": EVERY, "config__hidden_size": WIDTH, "config__intermediate_size": 2 * WIDTH,
        }  # fmt: skip


class Sited(Unequal):
    """The stage servers of a shape: those of each of several islands are at a site of their own."""

    def __init__(self, shape: Shape, *how: Any) -> None:
        super().__init__(*how)
        self._shape = shape

    def start_server(self, number: int, *flags: str, module: str = "") -> Process:
        site = f"site-{self._shape.island(number // self._shape.stages)}"
        return super().start_server(number, *flags, *(("--site", site) if self._shape.islands > 1 else ()))


SHAPES = (
    Shape(2, (1.0, 1.0), 12, 0.0),
    Shape(2, (1.0, 2.0, 4.0), 28, 0.5),
    Shape(4, (1.0, 1.0), 12, 0.25, 0.02),
    Shape(3, (1.0, 2.0, 4.0), 28, 0.0, 0.02),
    Shape(2, (1.0, 2.0, 4.0), 28, 0.25, 0.1),
    Shape(4, (1.0, 1.0), 12, 0.5, 0.1),
    Shape(2, (1.0, 1.0, 0.5, 0.5), 16, 0.0, 0.1, islands=2),
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
    if shape.islands > 1:
        rules = replace(rules, warm_up=EVERY, measured=2 * EVERY)
    peers, places = [], []
    for island, stage in product(range(shape.islands), range(shape.stages)):
        own = [replica for replica in range(len(shape.speeds)) if shape.island(replica) == island]
        names = [f"peer-{stage}-{replica}" for replica in own]
        places.append(tuple(names))
        peers += [
            PoolPeer(name, "cpu", 0, f"{island}", shape.speeds[replica], LOOPBACK_BITS_PER_S, LOOPBACK_BITS_PER_S)
            for name, replica in zip(names, own, strict=True)
        ]
    bits_per_s = BETWEEN_BITS_PER_S if shape.islands > 1 else LINK_BITS_PER_S
    near, far = PoolLink(0.0, LOOPBACK_BITS_PER_S), PoolLink(delay_s, bits_per_s)
    are_near = shape.islands > 1 or not shape.round_trip_s
    links = {(a.name, b.name): near if are_near and a.site == b.site else far for a in peers for b in peers}
    pool = PeerPool(tuple(peers), links, by_peer=True)
    plan = Plan(spec.split, tuple(places), 2, shape.late_microbatches)
    load = workload(CutBound(pool, island_spec(spec)), spec)
    work, apply_s = (2.0 * compute_s,) * shape.stages, (STEP_S,) * shape.stages
    load = replace(load, work=work, apply_s=apply_s, reach_s=shape.round_trip_s / 4.0)
    return [Play(pool, plan, load, rules, seed).run() for seed in range(SEEDS)]


def measure(shape: Shape, compute_s: float, steps: int) -> tuple[JobSpec, float, float, float]:
    """The spec and the tokens/s of real processes, the delay of their links, and how busy the processors were."""
    options = argparse.Namespace(stages=shape.stages, speeds=shape.speeds, compute=compute_s)
    with _hosts(shape) as (hosts, at), tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        with Sited(shape, Path(name), options, hosts, at) as trial:
            trial.add_servers(shape.stages * len(shape.speeds))
            job = trial.job(
                shape.stages, STEPS, config__num_hidden_layers=shape.stages,
                training__global_batch_sequences=2 * shape.microbatches, training__learning_rate=1e-4,
                pipeline__overlap=shape.late_microbatches, pipeline__sync_steps=0,
                checkpoint__every_steps=0, checkpoint__every_s=0.0, **shape.changes(),
            )  # fmt: skip
            first, last = PlayRules().warm_up, PlayRules().warm_up + steps
            if shape.islands > 1:  # from one exchange to the next but one; each is a row more
                first, last, steps = EVERY + 1, 3 * (EVERY + 1), 2 * EVERY
            until_steps(trial, job, first)
            psutil.cpu_percent()
            commits_s = until_steps(trial, job, last)
            busy = psutil.cpu_percent() / 100.0
            seconds = commits_s[last - 1] - commits_s[first - 1]
            tokens = 2 * shape.microbatches * job.spec.data.sequence_length
            links = [link for peer in trial.peers() for link in peer.links]
            receipts_s = [link.receipt_s for link in links if link.receipt_s > shape.round_trip_s]
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
                delay_s, bits_per_s = shape.round_trip_s / (2.0 if other else 4.0), LINK_BITS_PER_S if other else 0.0
                if other and shape.islands > 1:
                    a, b = (shape.island((host - 1) // shape.stages) for host in (one, other))
                    delay_s, bits_per_s = (0.0, 0.0) if a == b else (delay_s, BETWEEN_BITS_PER_S)
                relay.between(one, other, delay_s=delay_s, bytes_per_s=bits_per_s / 8.0)
        relay.move_here(0)
        yield relay.hosts, [relay.at(host) for host in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", type=lambda text: [int(number) for number in text.split(",")], default=range(len(SHAPES))
    )
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
