"""How much memory a stage server takes for a job, beside what the job's tensors come to.

    python -m benchmarks.measured.memory [--replicas 1] [--layers 8] [--width 512] [--sequence 256] [--steps 3] ...

A scheduler and stages x replicas stage servers, as real processes on loopback, train one job. Of each stage server the
resident memory is read while it is idle, then its peak until the last commit but one, and its peak with the checkpoint
that ends the job. What is more than idle is compared with the sum of what the job cannot do without, by
swarm/job/footprint.py: weights in all their versions, the optimizer's state, the sums of the steps that may be open,
the graphs of the microbatches in flight, outputs that are held and inputs that wait. The aim is at most 1.3 times that,
or 1.55 times where parameters take as much as graphs.

The sum leaves out gradients as backward gives them, averaging, what Python and torch load when they first compute, and
what the allocator keeps; with `--replicas` also the averaged gradients of past commits, which are kept for
replicas that miss one. By default each stage server offers so little memory (`--offer`, in times of the estimate) that
only the two newest commits are kept; the more it offers, the more it keeps.

The peak is the kernel's, for which the memory of pages that are shared with other processes counts too. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measured.ways import LOSS_TOLERANCE, Swarm, job_of
from benchmarks.processes import Fleet
from swarm.job.footprint import Footprint, stage_footprint
from swarm.job.spec import JobSpec
from tests.support.peak import NOW, PEAK, resident, set_back

MIB = 1 << 20
PARTS = ("weights", "optimizer", "sums", "graphs", "inputs", "outputs", "outer")
SETTLES_S = 1.0  # what was read while a process began is given back within this


@dataclass(frozen=True, slots=True)
class Taken:
    """Resident bytes of one stage server."""

    stage: int
    idle: int
    training: int  # the most until the last commit but one
    saving: int  # the most until the job had ended
    footprint: Footprint

    @property
    def needed(self) -> int:
        """What the job cannot do without."""
        return needed(self.footprint)


def needed(footprint: Footprint) -> int:
    parts = asdict(footprint)
    return sum(int(parts[name]) for name in PARTS)


def ratio(peak: int, idle: int, needed_bytes: int) -> float:
    return (peak - idle) / needed_bytes


def measure(options: argparse.Namespace, folder: Path) -> list[Taken]:
    config, training = {"vocab_size": options.vocabulary}, {"reproducible": options.reproducible}
    spec, manifest = job_of(options, folder, config=config, training=training)
    offered = [str(round(options.offer * footprint.total_bytes)) for footprint in footprints(spec, 1)]
    with contextlib.ExitStack() as stack:
        swarm = Swarm(stack.enter_context(Fleet(folder)), folder, options, offers=offered)
        stack.enter_context(swarm.connect(spec, manifest))
        time.sleep(SETTLES_S)
        idle = [resident(pid, NOW) for pid in swarm.pids]
        for pid in swarm.pids:
            set_back(pid)
        training: list[int] = []

        def look(step: int) -> None:
            if step < spec.training.steps:
                training[:] = [resident(pid, PEAK) for pid in swarm.pids]

        swarm.course(options.warmup, look=look)
        saving = [resident(pid, PEAK) for pid in swarm.pids]
    known = footprints(spec, options.replicas)
    return [
        Taken(number % options.stages, *read, known[number % options.stages])
        for number, read in enumerate(zip(idle, training, saving, strict=True))
    ]


def footprints(spec: JobSpec, replicas: int) -> list[Footprint]:
    """What each stage needs."""
    split = spec.pipeline.split
    assert split != "auto"
    stages = len(split)
    return [stage_footprint(spec, layers, stage, stages, replicas=replicas) for stage, layers in enumerate(split)]


def table(taken: Sequence[Taken]) -> Table:
    shown = Table(title="resident MiB", caption="ratio: of peak less idle to `needed`")
    read = ("needed", "estimate", "idle", "training", "ratio", "with save", "ratio", "of estimate")
    for name in ("stage", *PARTS, *read):
        shown.add_column(name, justify="right")
    for server in taken:
        parts = asdict(server.footprint)
        shown.add_row(
            str(server.stage),
            *(_mib(parts[name]) for name in PARTS),
            _mib(server.needed), _mib(server.footprint.total_bytes), _mib(server.idle),
            _mib(server.training), f"{ratio(server.training, server.idle, server.needed):.2f}",
            _mib(server.saving), f"{ratio(server.saving, server.idle, server.needed):.2f}",
            f"{ratio(server.saving, server.idle, server.footprint.total_bytes):.2f}",
        )  # fmt: skip
    return shown


def _shown(server: Taken) -> dict[str, object]:
    ratios = {name: ratio(getattr(server, name), server.idle, server.needed) for name in ("training", "saving")}
    return asdict(server) | {f"{name}_ratio": value for name, value in ratios.items()}


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="stage servers per stage")
    parser.add_argument("--steps", type=int, default=3, help="behind those of --warmup")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument(
        "--runs", type=int, default=1, help="how often all of it is measured, as peaks differ by up to a quarter"
    )
    parser.add_argument("--dtype", choices=tuple(LOSS_TOLERANCE), default="float32")
    parser.add_argument("--compression", choices=("none", "bfloat16", "float16", "int8"), default="none")
    parser.add_argument("--overlap", type=int, default=0, help="microbatches of a step that use older weights")
    parser.add_argument("--reproducible", action="store_true", help="sums in float64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--microbatch", type=int, default=4, help="sequences per microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument("--offer", type=float, default=1.0, help="memory on offer, in times of the estimate")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    runs = []
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="swarm-memory-") as name:
            runs.append(measure(options, Path(name)))
    if options.output == "json":
        print(
            json.dumps(
                {"options": vars(options), "runs": [[_shown(server) for server in taken] for taken in runs]}, indent=1
            )
        )
    else:
        Console(width=140).print(*map(table, runs))


if __name__ == "__main__":
    main()
