"""What `averaging.compression` brings over slow links, and what it costs in loss at equal tokens.

    python -m benchmarks.learning.averaging_codecs [--link 20:20] [--steps 120] [--seeds 1]

A swarm of two stages with two replicas each trains the small Llama of `benchmarks.learning.convergence` to the end,
once with each codec: none, bfloat16, int8. They take turns, seed by seed. Each process is at a host of its own: a
network namespace behind links of so many Mbit/s each way and such a round-trip time. That needs root.

"Seconds" are the median time of a step after the first tenth. "Loss" is the mean of the last tenth, in nats per byte.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from itertools import pairwise
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.learning.over_link import STAGES, Seed, options_of, seeds_over_link
from benchmarks.measured.ways import Course, Swarm, changed
from benchmarks.processes import Fleet

REPLICAS = 2
CODECS = ("none", "bfloat16", "int8")


def main() -> None:
    options = options_of(__doc__ or "", link=(20.0, 20.0), seeds=1, steps=120)
    console = Console(stderr=options.output == "json", width=120)
    load = os.getloadavg()[0]
    found: dict[str, list[tuple[float, float]]] = {codec: [] for codec in CODECS}
    with seeds_over_link(options, 1 + STAGES * REPLICAS, limits={"min_replicas": REPLICAS}) as seeds:
        for seed in seeds:
            for codec, course in _courses(seed).items():
                found[codec].append((step_s(course), course.loss_at(1.0)))
                console.print(seed.number, codec, found[codec][-1], highlight=False)
    if options.output == "json":
        print(json.dumps({"options": vars(options), "load": load, "codecs": found}, indent=1))
    else:
        console.print(_table(found))


def _courses(seed: Seed) -> dict[str, Course]:
    """Each codec's training."""
    with Fleet(seed.folder) as fleet:
        swarm = Swarm(fleet, seed.folder, Namespace(stages=STAGES, replicas=REPLICAS, threads=1), hosts=seed.hosts)
        with swarm.connect(seed.spec, seed.manifest):
            specs = {codec: changed(seed.spec, averaging={"compression": codec}) for codec in seed.order(*CODECS)}
            return {codec: swarm.course(1, spec)[2] for codec, spec in specs.items()}


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
        shown = (f"{median(run[at] for run in ones):.3f}" for at in (0, 1))
        table.add_row(codec, next(shown), f"{seconds:.2f}", next(shown), f"{loss:+.2%}")
    return table


if __name__ == "__main__":
    main()
