"""How much of their summed speed unequal replicas keep, and what a joiner costs the others: real processes.

    python -m benchmarks.measured.unequal_processes [--speeds 1,2,4] [--stages 2] [--overlap 0.5] [--steps 8]
    python -m benchmarks.measured.unequal_processes --links 100:5,50:20,20:40
    python -m benchmarks.measured.unequal_processes --speeds 1,1,1,0.1 --stages 3
    python -m benchmarks.measured.unequal_processes --speeds 1,1,1 --join

A scheduler and a stage server of each speed in every stage, all real processes on loopback. Their computations take
given times (modelled_stage_server.py): a forward and a backward `--compute` seconds each at speed 1. So these are
efficiencies of the protocol and not of accelerators.

"Kept" is the committed microbatches per second of each measured step, against the sum of a stage's speeds. `--overlap`
is the share of a step that uses weights one step old. `--links` puts the scheduler and each stage server at a host of
its own: a network namespace, where the replicas of each stage are behind links of so many Mbit/s each way and such a
round-trip time, one after the other. That needs root.

With `--join` a stage server of speed 1 starts after the measured steps and goes where the scheduler sends it. "Join" is
the speed from its start until it serves, at commits, as a share of the speed before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.measured.churn_processes import GRACE_S, STEPS
from benchmarks.measured.throughput import link_of
from benchmarks.retained import WARM_UP_STEPS
from tests.chaos.relay import Relay, why_not
from tests.chaos.trial import Broken, Job, Trial
from tests.support.processes import Process

STEP_S = 0.01  # of an optimizer step
LOOK_S = 0.25
JOIN_S_MAX = 120.0
PROGRAM = "benchmarks.measured.modelled_stage_server"


class Unequal(Trial):
    """A trial in which stage server k is of stage k mod S, and slower or faster than others."""

    def __init__(self, folder: Path, options: argparse.Namespace, hosts: Sequence[str], at: Sequence[Sequence[str]]):
        super().__init__(folder, "0", grace_s=GRACE_S)
        self._options = options
        if hosts:
            self.scheduler_host, self.server_hosts, self.before_servers = hosts[0], hosts[1:], at[1:]

    def start_server(self, number: int, *flags: str, module: str = "") -> Process:
        options, replica = self._options, number // self._options.stages
        is_joiner = replica == len(options.speeds)
        speed = 1.0 if is_joiner else options.speeds[replica]
        pinned = () if is_joiner else ("--stage", str(number % options.stages))
        program = f"{PROGRAM} --compute {options.compute / speed:g} --step {STEP_S:g}"
        return super().start_server(number, *pinned, *flags, module=program)

    def __exit__(self, *why: object) -> None:
        for process in self.servers.values():
            if process.child.poll() is None:
                process.kill()  # all at once; there is nothing to be saved
        super().__exit__(*why)


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C: nothing is left behind
    load = os.getloadavg()[0]
    kept: list[float] = []
    joins: list[float] = []
    with _hosts(options) as (hosts, at):
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
                with Unequal(Path(name), options, hosts, at) as trial:
                    shares, join = _play(trial, options)
            kept += shares
            joins += [] if join is None else [join]
    if options.output == "json":
        print(json.dumps({"options": vars(options), "load": load, "kept": kept, "joins": joins}, indent=1))
    else:
        told = [" ".join(f"{share:.3f}" for share in shares) or "-" for shares in (kept, joins)]
        print(f"kept: {told[0]}; join: {told[1]}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--speeds", type=lambda text: [*map(float, text.split(","))], default=[1.0, 2.0, 4.0])
    parser.add_argument("--links", type=lambda text: [*map(link_of, text.split(","))], default=[])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--overlap", type=float, default=0.5, help="share of a step that uses weights one step old")
    parser.add_argument("--microbatches", type=int, default=0, help="of a step; 8 for each unit of speed by default")
    parser.add_argument("--steps", type=int, default=8, help="measured ones")
    parser.add_argument("--runs", type=int, default=1, help="each with new processes")
    parser.add_argument("--compute", type=float, default=0.25, help="seconds of a forward, and of a backward")
    parser.add_argument("--join", action="store_true", help="let another stage server join at the end")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    options.microbatches = options.microbatches or round(8 * sum(options.speeds))
    if options.links and len(options.links) != len(options.speeds):
        parser.error("--links: one for each of --speeds")
    if options.links and options.join:
        parser.error("--links: a joiner has none")
    if options.links and (lack := why_not()):
        parser.error(f"--links: {lack}")
    return options


@contextlib.contextmanager
def _hosts(options: argparse.Namespace) -> Iterator[tuple[Sequence[str], Sequence[Sequence[str]]]]:
    """The scheduler's host and one for each stage server, and how to run there; nothing without links."""
    if not options.links:
        yield (), ()
        return
    count = 1 + options.stages * len(options.speeds)
    with Relay(count, seed=0) as relay:
        links = [(math.inf, 0.0), *(link for link in options.links for _ in range(options.stages))]
        for place in range(count):
            for other in range(place):
                mbit = min(links[place][0], links[other][0])
                delay_s = (links[place][1] + links[other][1]) / 2e3  # one way: half of both round trips
                relay.between(place, other, delay_s=delay_s, bytes_per_s=mbit * 1e6 / 8.0)
        relay.move_here(0)
        yield relay.hosts, [relay.at(host) for host in range(count)]


def _play(trial: Unequal, options: argparse.Namespace) -> tuple[list[float], float | None]:
    """What each measured step kept, and the speed while another joined as a share of that before."""
    _tell(f"{options.stages * len(options.speeds)} stage servers start")
    trial.add_servers(options.stages * len(options.speeds))
    job = trial.job(
        options.stages,
        STEPS,
        training__global_batch_sequences=2 * options.microbatches,
        training__learning_rate=1e-4,
        pipeline__overlap=round(options.overlap * options.microbatches),
        pipeline__sync_steps=0,
        checkpoint__every_steps=0,
        checkpoint__every_s=0.0,
    )
    psutil.cpu_percent()
    commits_s = until_steps(trial, job, WARM_UP_STEPS + options.steps)
    _tell(f"the processors were busy for {psutil.cpu_percent():.0f} %")
    measured_s = commits_s[WARM_UP_STEPS - 1 :]
    full = sum(options.speeds) / (2.0 * options.compute)
    kept = [options.microbatches / (later - earlier) / full for earlier, later in pairwise(measured_s)]
    if not options.join:
        return kept, None
    before = (len(measured_s) - 1) / (measured_s[-1] - measured_s[0])
    started = len(commits_s)
    joiner = trial.start_server(len(trial.servers))
    peer = joiner.wait_ready()["peer"]
    trial.servers[peer] = joiner
    trial.until(f"{peer} serves", lambda: trial.state_of(peer) == "serving", JOIN_S_MAX)
    commits_s = until_steps(trial, job, len(trial.rows(job)) + 1)
    meanwhile_s = commits_s[started - 1 :]
    return kept, (len(meanwhile_s) - 1) / (meanwhile_s[-1] - meanwhile_s[0]) / before


def until_steps(trial: Unequal, job: Job, steps: int) -> list[float]:
    """When each step was committed, as soon as there are so many."""
    while True:
        commits_s = [row.committed_unix_s for row in trial.rows(job)]
        if len(commits_s) >= steps:
            return commits_s
        view = trial.view(job)
        if view.state in ("failed", "cancelled", "stalled"):
            raise Broken(f"the job is {view.state}: {view.reason}")
        time.sleep(LOOK_S)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
