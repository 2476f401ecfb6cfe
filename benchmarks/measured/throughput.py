"""Tokens per second of a swarm on this machine, beside what it stands in for, in one run.

    python -m benchmarks.measured.throughput [--stages 2] [--replicas 1] [--steps 3] [--rounds 5] [--dtype float32] ...
    python -m benchmarks.measured.throughput --ways swarm,int8,1f1b,loopback --link 100:20
    python -m benchmarks.measured.throughput --ways swarm,insecure --link 1000:1 --replicas 2
    python -m benchmarks.measured.throughput --ways overlap,1f1b,zbv --width 64 --layers 4 --sequence 512 --compute 0.04

Ways to train the same model on the same tokens, from the same weights, with as many threads per process:

    local         `swarm train-local`: one process, no network
    swarm         a scheduler and stages x replicas stage servers, as real processes
    overlap       the same, with as much of a step late as `pipeline.overlap = "auto"` chooses, and the lookahead that
                  it asks for; the ways without overlap step with plain AdamW, as torch's do
    int8          the same, and boundary tensors in int8
    maxout4, maxout16, anchor8
                  as int8, of a model with narrow places of this kind and factor where its stages end
    gpipe, 1f1b, interleaved, zbv
                  torch.distributed.pipelining's schedules over gloo, stages x replicas processes; the last two with two
                  stages on each
    loopback      as overlap, on loopback while the others are behind a link
    insecure      as swarm, with --insecure: without TLS and passes
    whole         as swarm, but no stage server splits a backward
    wholelap      as overlap, likewise

All processes are started first and wait. Then the ways take turns, every round in another order, so that a noisy
machine disturbs all alike: compare ratios within a round, not tokens/s of different runs. Speed is counted from commit
to commit after the warm-up steps; starting, loading and saving are left out. The losses of ways that compute the same
must agree, or they did not do the same work.

`--link MBIT:MS` puts the scheduler and every stage server, or rank, at a host of its own: a network namespace behind
links of so many Mbit/s each way and such a round-trip time. That needs root. A job before all rounds lets the scheduler
measure the links, and it then chooses how much of a step is late, as for every job but the first one on a machine.

`--compute S` lets a forward through the layers of a process, and a backward, take S seconds each in all ways but local:
what the computation itself leaves of them is slept. So no process waits for a processor, as if each had a machine of
its own.

The second table says where the swarm's time went: device seconds and processor seconds of each of its processes.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.measured.modelled import Modelled
from benchmarks.measured.ways import (
    LOSS_TOLERANCE,
    RANKED,
    RIVALS,
    Rivals,
    Spent,
    Swarm,
    Timed,
    job_of,
    narrowed,
    overlapping,
    seconds_of,
)
from benchmarks.processes import Fleet, Hosts, hosts_behind
from swarm.job.spec import JobSpec, parse_job
from tests.chaos.relay import why_not

NARROW = (("maxout", 4), ("maxout", 16), ("anchor", 8))
SWARMS: dict[str, Callable[[JobSpec], JobSpec]] = {
    "swarm": lambda spec: spec,
    "overlap": overlapping,
    "int8": partial(overlapping, compression="int8"),
    **{f"{kind}{factor}": partial(narrowed, kind=kind, factor=factor) for kind, factor in NARROW},
    "loopback": overlapping,
    "insecure": lambda spec: spec,
    "whole": lambda spec: spec,
    "wholelap": overlapping,
}
OVERLAPPING = ("overlap", "int8", *(f"{kind}{factor}" for kind, factor in NARROW), "loopback", "wholelap")
WHOLE = ("whole", "wholelap")  # they share processes
APART = ("loopback", "insecure", *WHOLE)  # with processes of their own
WAYS = ("local", *SWARMS, *RANKED)
DEFAULT = ("local", "swarm", "1f1b")


@dataclass(slots=True)
class Round:
    """All ways once; `spent` is of the way "swarm"."""

    ways: dict[str, Timed] = field(default_factory=dict)
    spent: list[Spent] = field(default_factory=list)

    def ratio(self, way: str, other: str) -> float:
        """One way's speed as a multiple of the other's."""
        return self.ways[way].tokens_per_s / self.ways[other].tokens_per_s


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C: nothing is left behind
    console = Console(stderr=options.output == "json", width=120)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        rounds = _measure(options, Path(name), console)
    if options.output == "json":
        found = {"options": vars(options), "load": load, "rounds": [asdict(round_) for round_ in rounds]}
        print(json.dumps(found, indent=1))
    else:
        console.print(_speeds(rounds, options.ways))
        if rounds[0].spent:
            console.print(_times(rounds, options.steps))
    same = [way for way in options.ways if way in ("swarm", "insecure", *RIVALS)]
    alike = same if options.overlap == 0 else [way for way in same if way in RIVALS]
    if fault := disagreement(rounds, LOSS_TOLERANCE[options.dtype], alike):
        sys.exit(f"error: {fault}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ways", type=_names, default=DEFAULT, help=f"some of {','.join(WAYS)}")
    parser.add_argument("--link", type=link_of, metavar="MBIT:MS", help="Mbit/s and round-trip time between processes")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="stage servers per stage")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each way and round")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=tuple(LOSS_TOLERANCE), default="float32")
    codecs = ("auto", "none", "bfloat16", "float16", "int8")
    parser.add_argument("--compression", choices=codecs, default="none", help="swarm only")
    parser.add_argument(
        "--overlap",
        type=int,
        default=0,
        help="microbatches of a step that use weights one step old, in the way `swarm`; its loss is then not compared",
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--microbatch", type=int, default=4, help="sequences per microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of a forward, and a backward; 0: its own")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if options.stages < 2:
        parser.error("--stages must be at least 2: with one there is no pipeline to compare")
    if options.microbatches % options.replicas:
        parser.error("--replicas must divide --microbatches: 1f1b deals them out evenly")
    if min(options.steps, options.warmup, options.rounds) < 1:
        parser.error("--steps, --warmup and --rounds must be at least 1")
    if options.compute and "local" in options.ways:
        parser.error("--compute: the way local computes all stages by itself")
    if options.layers < 2 * options.stages and set(options.ways) & set(RANKED):
        parser.error("--layers must be at least twice --stages: some schedules have two stages on each rank")
    if "loopback" in options.ways and options.link is None:
        parser.error("the way loopback stands beside a link: add --link")
    if options.link is not None and (lack := why_not()):
        parser.error(f"--link: {lack}")
    return options


def _names(text: str) -> tuple[str, ...]:
    ways = tuple(text.split(","))
    if unknown := [way for way in ways if way not in WAYS]:
        raise argparse.ArgumentTypeError(f"no such way: {', '.join(unknown)}; there are {', '.join(WAYS)}")
    return ways


def link_of(text: str) -> tuple[float, float]:
    mbit, _, ms = text.partition(":")
    try:
        return float(mbit), float(ms)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MBIT:MS, for example 100:20") from None


def _measure(options: argparse.Namespace, folder: Path, console: Console) -> list[Round]:
    job = spec, manifest = job_of(options, folder)
    specs = {way: job_for(spec) for way, job_for in SWARMS.items() if way in options.ways}
    with contextlib.ExitStack() as stack, console.status("starting processes") as status:
        hosts = Hosts()
        if options.link is not None:
            mbit, ms = options.link
            hosts = stack.enter_context(hosts_behind(1 + options.stages * options.replicas, mbit, ms / 1e3))
        modelled = Modelled(options.compute) if options.compute else None
        fleet = stack.enter_context(Fleet(folder))
        swarms: dict[str, Swarm] = {}
        if own := [way for way in options.ways if way in SWARMS and way not in APART]:
            swarms = dict.fromkeys(own, Swarm(fleet, folder, options, hosts=hosts, modelled=modelled))
        for way in [way for way in APART if way in options.ways]:
            if way in WHOLE and (shared := [swarms[other] for other in WHOLE if other in swarms]):
                swarms[way] = shared[0]
                continue
            (folder / way).mkdir()
            apart = stack.enter_context(Fleet(folder / way))
            at = Hosts() if way == "loopback" else hosts
            insecure = way == "insecure"
            compute = modelled if way not in WHOLE else replace(modelled or Modelled(0.0, 0.0), whole=True)
            swarms[way] = Swarm(apart, folder / way, options, hosts=at, insecure=insecure, modelled=compute)
        rivals = Rivals([way for way in options.ways if way in RIVALS], fleet, folder, job, options, hosts, modelled)
        for swarm in dict.fromkeys(swarms.values()):
            stack.enter_context(swarm.connect(spec, manifest))
        rivals.wait_ready()
        if options.link is not None:
            specs |= {way: left_to_scheduler(one) for way, one in specs.items() if way in OVERLAPPING}
            for swarm in dict.fromkeys(swarms.values()):
                status.update("a job that measures the links")
                swarm.train(options.warmup)
        rounds = []
        for number in range(options.rounds):
            rounds.append(Round())
            first = number % len(options.ways)
            for way in (*options.ways[first:], *options.ways[:first]):
                status.update(f"round {number + 1} of {options.rounds}: {way}")
                if way in swarms:
                    rounds[-1].ways[way], spent = swarms[way].train(options.warmup, specs[way])
                    rounds[-1].spent = spent if way == "swarm" else rounds[-1].spent
                else:
                    rounds[-1].ways[way], _ = rivals.train(way, options.warmup)
    return rounds


def left_to_scheduler(spec: JobSpec) -> JobSpec:
    """The job whose scheduler chooses how many microbatches are late, by what jobs before have measured."""
    return parse_job(spec.model_dump() | {"pipeline": spec.model_dump()["pipeline"] | {"overlap": "auto"}})


# Tables ---------------------------------------------------------------------------------------------------------------


def _speeds(rounds: Sequence[Round], ways: Sequence[str]) -> Table:
    """A row for each way: tokens per second, and beside each way that is no swarm, or none with certificates."""
    others = [way for way in ways if way not in SWARMS or way == "insecure"]
    table = Table(title="tokens/s, medians", caption="of another way: above 1, the way of the row is faster")
    headings = ("way", "tokens/s", "least to most", "late", "cpu-s per step")
    for heading in (*headings, *(f"of {other}" for other in others)):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for way in ways:
        speeds = [round_.ways[way].tokens_per_s for round_ in rounds]
        cpu_s = median(round_.ways[way].cpu_s_per_step for round_ in rounds)
        ratios = (f"{median(round_.ratio(way, other) for round_ in rounds):.2f}" for other in others)
        late = "/".join(str(number) for number in sorted({round_.ways[way].overlap for round_ in rounds}))
        told = (f"{median(speeds):.0f}", f"{min(speeds):.0f} to {max(speeds):.0f}", late, f"{cpu_s:.2f}")
        table.add_row(way, *told, *ratios)
    return table


def _times(rounds: Sequence[Round], steps: int) -> Table:
    table = Table(title="where the swarm's time went, ms per step", caption="medians; device = forward + backward")
    for heading in ("process", "wall", "forward", "backward", "averaging", "device busy", "processor"):
        table.add_column(heading, justify="right")
    for place, process in enumerate(spent.process for spent in rounds[0].spent):
        each = [round_.spent[place] for round_ in rounds]
        wall, cpu, forward, backward, averaging = (
            median(values) * 1e3 / steps for values in zip(*map(seconds_of, each), strict=True)
        )
        busy = median((spent.forward_s + spent.backward_s) / spent.wall_s for spent in each)
        device = (f"{forward:.0f}", f"{backward:.0f}", f"{averaging:.1f}", f"{busy:.0%}")
        table.add_row(process, f"{wall:.0f}", *(device if forward else ("",) * 4), f"{cpu:.0f}")
    return table


def disagreement(rounds: Sequence[Round], tolerance: float, alike: Sequence[str] = DEFAULT) -> str:
    """What is wrong with the losses of the ways that must be alike; empty if nothing."""
    for number, one in enumerate(rounds, 1):
        losses = {way: found.loss for way, found in one.ways.items() if way in alike}
        first = next(iter(losses.values()), 0.0)
        if not all(math.isclose(loss, first, rel_tol=tolerance) for loss in losses.values()):
            return f"round {number}: the ways trained differently, last losses {losses}"
    return ""


if __name__ == "__main__":
    main()
