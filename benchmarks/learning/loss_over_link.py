"""How soon a swarm over slow links reaches the loss that 1F1B ends with, beside 1F1B over the same links.

    python -m benchmarks.learning.loss_over_link [--link 100:20] [--seeds 3] [--steps 240] [--rate 4e-3]

Both train the small Llama of `benchmarks.learning.convergence` on the same text, from the same first weights, in two
stages. 1F1B is Schedule1F1B of torch.distributed.pipelining over gloo, with AdamW. The swarm has the defaults of a job
file: half late or less, lookahead, bfloat16 between stages. Each process is at a host of its own: a network namespace
behind links of so many Mbit/s each way and such a round-trip time. That needs root.

Seconds count from the end of the first step. A seed fixes first weights and the order of the data.
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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.learning.convergence import small_llama
from benchmarks.measured.throughput import link_of
from benchmarks.measured.ways import Course, Fleet, Hosts, Rivals, Swarm, changed, hosts_behind, prepared
from swarm.job.spec import parse_job
from tests.chaos.relay import why_not

STAGES = 2
GOALS = (0.75, 1.0)  # 1F1B's loss after this share of its steps


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C: nothing is left behind
    console = Console(stderr=options.output == "json", width=120)
    load, mbit_ms = os.getloadavg()[0], options.link
    found = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        hosts = stack.enter_context(hosts_behind(1 + STAGES, mbit_ms[0], mbit_ms[1] / 1e3))
        for seed in range(options.seeds):
            ours, theirs = _both(options, seed, folder, hosts)
            found.append(compared(ours, theirs) | {"seed": seed})
            console.print(found[-1], highlight=False)
    if options.output == "json":
        print(json.dumps({"options": vars(options), "load": load, "seeds": found}, indent=1))
    else:
        console.print(_table(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--link", type=link_of, default=(100.0, 20.0), metavar="MBIT:MS")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if lack := why_not():
        parser.error(lack)
    return options


def _both(options: argparse.Namespace, seed: int, folder: Path, hosts: Hosts) -> tuple[Course, Course]:
    """The swarm's training and 1F1B's, one after the other; which is first depends on the seed."""
    place = folder / f"seed-{seed}"
    place.mkdir()
    source = f"{sysconfig.get_paths()['stdlib']}/[a-d]*.py"
    values = small_llama(seed, options.rate, options.steps, source) | {"pipeline": {"stages": STAGES}}
    spec, manifest = prepared(parse_job(values), STAGES, place)
    plain = changed(spec, training={"lookahead": 0.0}, pipeline={"overlap": 0, "compression": "none"})
    (place / "spec.json").write_text(plain.model_dump_json())
    shape = Namespace(stages=STAGES, replicas=1, threads=1)
    with Fleet(place) as fleet:
        swarm = Swarm(fleet, place, shape, hosts=hosts)
        rivals = Rivals(("1f1b",), fleet, place, (plain, manifest), shape, hosts)
        with swarm.connect(spec, manifest):
            rivals.wait_ready()
            courses: dict[str, Course] = {}
            for way in ("swarm", "1f1b") if seed % 2 else ("1f1b", "swarm"):
                courses[way] = swarm.course(1)[2] if way == "swarm" else rivals.train("1f1b", 1)[1]
    return courses["swarm"], courses["1f1b"]


def compared(ours: Course, theirs: Course) -> dict[str, Any]:
    """Seconds of both to each goal (None: never), and the losses that they end with."""
    goals = [theirs.loss_at(share) for share in GOALS]
    return {
        "losses": [ours.loss_at(1.0), theirs.loss_at(1.0)],
        "seconds": [[one.seconds_to(goal) for one in (ours, theirs)] for goal in goals],
        "steps_per_s": [(len(one.losses) - 1) / (one.times_unix_s[-1] - one.times_unix_s[0]) for one in (ours, theirs)],
    }


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table("seed", "loss at the end", "of 1F1B", *(f"to its {goal:.0%}, s" for goal in GOALS), "steps/s")
    for one in found:
        seconds = [" / ".join("never" if s is None else f"{s:.1f}" for s in pair) for pair in one["seconds"]]
        speeds = " / ".join(f"{speed:.2f}" for speed in one["steps_per_s"])
        table.add_row(str(one["seed"]), *(f"{loss:.3f}" for loss in one["losses"]), *seconds, speeds)
    return table


if __name__ == "__main__":
    main()
