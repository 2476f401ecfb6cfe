"""How soon a swarm over slow links reaches the loss that 1F1B ends with, beside 1F1B over the same links.

    python -m benchmarks.learning.loss_over_link [--link 100:20] [--seeds 3] [--steps 240] [--rate 4e-3]

Both train the small Llama of `benchmarks.learning.convergence` on the same text, from the same first weights, in two
stages. 1F1B is Schedule1F1B of torch.distributed.pipelining over gloo, with AdamW. The swarm has the defaults of a job
file: half late or less, lookahead, bfloat16 between stages. Each process is at a host of its own: a network namespace
behind links of so many Mbit/s each way and such a round-trip time. That needs root.

Seconds count from the end of the first step. A seed fixes first weights and the order of the data.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.learning.over_link import STAGES, Seed, options_of, seeds_over_link
from benchmarks.measured.ways import Course, Rivals, Swarm, changed
from benchmarks.processes import Fleet

GOALS = (0.75, 1.0)  # 1F1B's loss after this share of its steps


def main() -> None:
    options = options_of(__doc__ or "", link=(100.0, 20.0), seeds=3, steps=240)
    console = Console(stderr=options.output == "json", width=120)
    load = os.getloadavg()[0]
    found = []
    with seeds_over_link(options, 1 + STAGES) as seeds:
        for seed in seeds:
            ours, theirs = _both(seed)
            found.append(compared(ours, theirs) | {"seed": seed.number})
            console.print(found[-1], highlight=False)
    if options.output == "json":
        print(json.dumps({"options": vars(options), "load": load, "seeds": found}, indent=1))
    else:
        console.print(_table(found))


def _both(seed: Seed) -> tuple[Course, Course]:
    """The swarm's training and 1F1B's."""
    plain = changed(seed.spec, training={"lookahead": 0.0}, pipeline={"overlap": 0, "compression": "none"})
    (seed.folder / "spec.json").write_text(plain.model_dump_json())
    shape = Namespace(stages=STAGES, replicas=1, threads=1)
    with Fleet(seed.folder) as fleet:
        swarm = Swarm(fleet, seed.folder, shape, hosts=seed.hosts)
        rivals = Rivals(("1f1b",), fleet, seed.folder, (plain, seed.manifest), shape, seed.hosts)
        with swarm.connect(seed.spec, seed.manifest):
            rivals.wait_ready()
            courses: dict[str, Course] = {}
            for way in seed.order("1f1b", "swarm"):
                courses[way] = swarm.course(1)[2] if way == "swarm" else rivals.train("1f1b", 1)[1]
    return courses["swarm"], courses["1f1b"]


def compared(ours: Course, theirs: Course) -> dict[str, Any]:
    """Seconds of both to each goal (None: never), and the losses that they end with."""
    goals = [theirs.loss_at(share) for share in GOALS]
    return {
        "losses": [ours.loss_at(1.0), theirs.loss_at(1.0)],
        "seconds": [[run.seconds_to(goal) for run in (ours, theirs)] for goal in goals],
        "steps_per_s": [(len(run.losses) - 1) / (run.times_unix_s[-1] - run.times_unix_s[0]) for run in (ours, theirs)],
    }


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table("seed", "loss at the end", "of 1F1B", *(f"to its {goal:.0%}, s" for goal in GOALS), "steps/s")
    for seed in found:
        seconds = [" / ".join("never" if s is None else f"{s:.1f}" for s in pair) for pair in seed["seconds"]]
        speeds = " / ".join(f"{speed:.2f}" for speed in seed["steps_per_s"])
        table.add_row(str(seed["seed"]), *(f"{loss:.3f}" for loss in seed["losses"]), *seconds, speeds)
    return table


if __name__ == "__main__":
    main()
