"""What the safety machinery costs while nothing fails: the product beside a copy of it in which it is patched off.

    python -m benchmarks.overhead [--without NAME ...] [--replicas 2] [--steps 4] [--rounds 7] ...

The patches are those of the mutation check (tests/mutations), so what is measured here is what is proven there to be
needed. Both trees train the same job as `python -m benchmarks.throughput` does: a scheduler and stages x replicas stage
servers as real processes on loopback. All are started first; then the trees take turns, in another order every round.
Compare within a round. Processor seconds say more than tokens/s on a machine that has other things to do: what waits
costs none. The losses must agree, or the trees did not do the same work.

Not in it, because it cannot be taken away without another design: the ledger and the cells themselves, averaging before
the commit, the second buffer of weights, and the memory of outputs that are held.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.throughput import LOSS_TOLERANCE, Fleet, Swarm, Timed, job_of
from tests.mutations.catalogue import FOLDER, ROOT, Mutant, apply, copy_tree, read

MECHANISMS = {
    "frame-checksum-none": "checksums of frames, made and compared",
    "state-digest": "digest of parameters and optimizer state after every commit",
    "mean-digest": "digest of every averaged gradient",
    "range-check": "range and finite check of every gradient",
    "set-digest": "names of the sets that a round sums",
    "hold-until-commit": "holding outputs until the commit",
    "driver-row-durable": "waiting for the commit row",
    "store-sync": "the commit row's fsync",
    "store-epoch": "the epoch in every write",
    "cell-input-once": "inputs once",
    "ledger-count-once": "contributions once",
}


def main() -> None:
    options = _options()
    console = Console()
    mutants = [read(FOLDER / f"{name}.patch") for name in options.without]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="swarm-overhead-") as name:
        rounds = _measure(options, mutants, Path(name), console)
    console.print(_table(rounds))
    for mutant in mutants:
        console.print(f"off: {mutant.name}, {MECHANISMS.get(mutant.name, mutant.mechanism)}")
    console.print(f"load before and after: {load:.1f}, {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    for number, (product, without) in enumerate(rounds, 1):
        if not math.isclose(product.loss, without.loss, rel_tol=LOSS_TOLERANCE[options.dtype]):
            sys.exit(f"error: round {number}: the trees trained differently: {product.loss} and {without.loss}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = sorted(path.stem for path in FOLDER.glob("*.patch"))
    parser.add_argument("--without", nargs="+", metavar="NAME", choices=names, default=list(MECHANISMS))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2, help="stage servers per stage")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each tree and round")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=tuple(LOSS_TOLERANCE), default="float32")
    parser.add_argument("--compression", choices=("none", "bfloat16", "float16", "int8"), default="none")
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--microbatch", type=int, default=4, help="sequences per microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    return parser.parse_args()


def _measure(
    options: argparse.Namespace, mutants: Sequence[Mutant], folder: Path, console: Console
) -> list[tuple[Timed, Timed]]:
    """(product, without) of every round."""
    trees = [ROOT, folder / "without"]
    copy_tree(trees[1])
    for mutant in mutants:
        if fault := apply(mutant, trees[1]):
            sys.exit(f"error: {mutant.name} does not apply: {fault}")
    spec, manifest = job_of(options, folder)
    with contextlib.ExitStack() as stack, console.status("starting processes") as status:
        swarms = []
        for tree, place in zip(trees, (folder / "product-data", folder / "without-data"), strict=True):
            place.mkdir()
            swarms.append(Swarm(stack.enter_context(Fleet(place, tree)), place, options))
        for swarm in swarms:
            stack.enter_context(swarm.connect(spec, manifest))
        rounds = []
        for number in range(options.rounds):
            status.update(f"round {number + 1} of {options.rounds}")
            order = (0, 1) if number % 2 == 0 else (1, 0)
            timed = {place: swarms[place].train(options.warmup)[0] for place in order}
            rounds.append((timed[0], timed[1]))
    return rounds


def overhead(product: float, without: float) -> float:
    """How much more the product needs, as a share."""
    return product / without - 1


def _table(rounds: Sequence[tuple[Timed, Timed]]) -> Table:
    table = Table(title="the product beside the copy without", caption="overhead: how much more the product needs")
    for heading in ("round", "step s", "without", "overhead", "cpu-s per step", "without", "overhead"):
        table.add_column(heading, justify="right")
    rows = [(p.step_s, w.step_s, p.cpu_s_per_step, w.cpu_s_per_step) for p, w in rounds]
    for number, row in enumerate(rows, 1):
        table.add_row(str(number), *_cells(row, overhead(row[0], row[1]), overhead(row[2], row[3])))
    table.add_section()
    middle = [median(values) for values in zip(*rows, strict=True)]
    step, cpu = (median(overhead(row[at], row[at + 1]) for row in rows) for at in (0, 2))
    table.add_row("median", *_cells(middle, step, cpu))
    return table


def _cells(row: Sequence[float], step: float, cpu: float) -> tuple[str, ...]:
    return (f"{row[0]:.3f}", f"{row[1]:.3f}", f"{step:+.1%}", f"{row[2]:.3f}", f"{row[3]:.3f}", f"{cpu:+.1%}")


if __name__ == "__main__":
    main()
