"""What `averaging.compression` brings over slow links, and what it costs in loss at equal tokens.

    python -m benchmarks.measured.averaging_codecs [--link 20:20] [--steps 120] [--seeds 1]

A swarm of two stages with two replicas each trains the small Llama of `benchmarks.learning.convergence` to the end,
once with each codec: none, bfloat16, int8. They take turns, seed by seed. Each process is at a host of its own: a
network namespace behind links of so many Mbit/s each way and such a round-trip time. That needs root.

"Seconds" are the median time of a step after the first tenth. "Loss" is the mean of the last tenth, in nats per byte.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sysconfig
import tempfile
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.learning.convergence import small_llama
from benchmarks.measured.throughput import link_of
from benchmarks.measured.ways import Course, Fleet, Hosts, Swarm, changed, hosts_behind, prepared
from swarm.job.spec import parse_job
from tests.chaos.relay import why_not

STAGES, REPLICAS = 2, 2
CODECS = ("none", "bfloat16", "int8")


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C: nothing is left behind
    console = Console(stderr=options.output == "json", width=120)
    load = os.getloadavg()[0]
    found: dict[str, list[tuple[float, float]]] = {codec: [] for codec in CODECS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        hosts = stack.enter_context(hosts_behind(1 + STAGES * REPLICAS, options.link[0], options.link[1] / 1e3))
        for seed in range(options.seeds):
            for codec, course in _courses(options, seed, folder, hosts).items():
                found[codec].append((step_s(course), course.loss_at(1.0)))
                console.print(seed, codec, found[codec][-1], highlight=False)
    if options.output == "json":
        print(json.dumps({"options": vars(options), "load": load, "codecs": found}, indent=1))
    else:
        console.print(_table(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--link", type=link_of, default=(20.0, 20.0), metavar="MBIT:MS")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if lack := why_not():
        parser.error(lack)
    return options


def _courses(options: argparse.Namespace, seed: int, folder: Path, hosts: Hosts) -> dict[str, Course]:
    """Each codec's training; which is first depends on the seed."""
    place = folder / f"seed-{seed}"
    place.mkdir()
    source = f"{sysconfig.get_paths()['stdlib']}/[a-d]*.py"
    values = small_llama(seed, options.rate, options.steps, source)
    values |= {"pipeline": {"stages": STAGES}, "limits": {"min_replicas": REPLICAS}}
    spec, manifest = prepared(parse_job(values), STAGES, place)
    with Fleet(place) as fleet:
        swarm = Swarm(fleet, place, Namespace(stages=STAGES, replicas=REPLICAS, threads=1), hosts=hosts)
        with swarm.connect(spec, manifest):
            first = seed % len(CODECS)
            order = (*CODECS[first:], *CODECS[:first])
            return {codec: swarm.course(1, changed(spec, averaging={"compression": codec}))[2] for codec in order}


def step_s(course: Course) -> float:
    """The median time of a step after the first tenth."""
    times_s = course.times_unix_s[len(course.times_unix_s) // 10 :]
    return median(later - earlier for earlier, later in pairwise(times_s))


def _table(found: dict[str, list[tuple[float, float]]]) -> Table:
    table = Table("codec", "seconds", "of none", "loss", "against none")
    for codec, ones in found.items():
        pairs = list(zip(ones, found["none"], strict=True))
        seconds = median(one / none for (one, _), (none, _) in pairs)
        loss = median(one / none - 1 for (_, one), (_, none) in pairs)
        shown = (f"{median(one[at] for one in ones):.3f}" for at in (0, 1))
        table.add_row(codec, next(shown), f"{seconds:.2f}", next(shown), f"{loss:+.2%}")
    return table


if __name__ == "__main__":
    main()
