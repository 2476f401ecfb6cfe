"""What the safety machinery costs while nothing fails: the product beside a copy of it in which it is patched off.

    python -m benchmarks.measured.overhead [--without NAME ...] [--replicas 2] [--steps 4] [--rounds 7] ...

The patches are those of the mutation check (tests/mutations), so what is measured here is what is proven there to be
needed. Both trees train the same job as `python -m benchmarks.measured.throughput` does: a scheduler and stages x
replicas stage servers as real processes on loopback. All are started first; then the trees take turns, in another order
every round. Compare within a round. Processor seconds say more than tokens/s on a machine that has other things to do:
what waits costs none. The losses must agree, or the trees did not do the same work.

`--beside FOLDER` compares with another checkout instead, of an earlier commit for example: was it faster?

`--reproducible` compares reproducible mode with ordinary mode instead, both as they are.

`--parts` times instead what each mechanism does in one step by itself, in this process, as the least processor time of
many tries: no noise of processes, but also nothing of what they do to each other's caches.

Not in it, because it cannot be taken away without another design: the ledger and the cells themselves, averaging before
the commit, the second buffer of weights, the memory of outputs that are held, and the names of sets, by which members
know when a round begins.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import xxhash
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measured.ways import LOSS_TOLERANCE, Swarm, Timed, job_of
from benchmarks.processes import Fleet
from scheduler.brain.outputs import CommitRow
from scheduler.storage.database import Database
from scheduler.storage.job_record import JobRecord, JobTokens
from swarm.model.stage import Stage
from swarm.process.malloc import tune_malloc
from swarm.types import JobId, JobState, Microbatch, Round, UnitName, set_digest
from tests.mutations.catalogue import FOLDER, ROOT, Mutant, apply, copy_tree, read

JOB = JobId("overhead")
MECHANISMS = {
    "frame-checksum-none": "checksums of frames, made and compared",
    "state-digest": "digest of parameters and optimizer state after every commit",
    "mean-digest": "digest of every averaged gradient",
    "range-check": "range and finite check of every gradient",
    "hold-until-commit": "holding outputs until the commit",
    "driver-row-durable": "waiting for the commit row",
    "store-sync": "the commit row's fsync",
    "store-epoch": "the epoch in every write",
    "cell-input-once": "inputs once",
    "ledger-count-once": "contributions once",
}


def main() -> None:
    options = _options()
    console = Console(stderr=options.output == "json")
    if options.parts:
        console.print(_parts_table(options, parts(options)))
        return
    mutants = (
        [] if options.beside or options.reproducible else [read(FOLDER / f"{name}.patch") for name in options.without]
    )
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="swarm-overhead-") as name:
        rounds = _measure(options, mutants, Path(name), console)
    if options.output == "json":
        print(json.dumps({"load": load, "rounds": [_shares(*round_) for round_ in rounds]}, indent=1))
    else:
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
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="compare with this checkout as it is, unpatched")
    parser.add_argument("--reproducible", action="store_true", help="compare reproducible mode with ordinary mode")
    parser.add_argument("--parts", action="store_true", help="what each mechanism costs by itself")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2, help="stage servers per stage")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each tree and round")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=tuple(LOSS_TOLERANCE), default="float32")
    parser.add_argument("--compression", choices=("none", "bfloat16", "float16", "int8"), default="none")
    parser.add_argument("--overlap", type=int, default=0, help="microbatches of a step that use older weights")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--microbatch", type=int, default=4, help="sequences per microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    return parser.parse_args()


def _measure(
    options: argparse.Namespace, mutants: Sequence[Mutant], folder: Path, console: Console
) -> list[tuple[Timed, Timed]]:
    """(product, without) of every round."""
    trees = [ROOT, options.beside or (ROOT if options.reproducible else folder / "without")]
    if mutants:
        copy_tree(trees[1])
        for mutant in mutants:
            if fault := apply(mutant, trees[1]):
                sys.exit(f"error: {mutant.name} does not apply: {fault}")
    with contextlib.ExitStack() as stack, console.status("starting processes") as status:
        swarms, jobs = [], []
        for number, (tree, name) in enumerate(zip(trees, ("product-data", "other-data"), strict=True)):
            place = folder / name
            place.mkdir()
            jobs.append(job_of(options, place, training={"reproducible": options.reproducible and not number}))
            swarms.append(Swarm(stack.enter_context(Fleet(place, tree)), place, options))
        for swarm, job in zip(swarms, jobs, strict=True):
            stack.enter_context(swarm.connect(*job))
        rounds = []
        for number in range(options.rounds):
            status.update(f"round {number + 1} of {options.rounds}")
            order = (0, 1) if number % 2 == 0 else (1, 0)
            timed = {place: swarms[place].train(options.warmup)[0] for place in order}
            rounds.append((timed[0], timed[1]))
    return rounds


@dataclass(frozen=True, slots=True)
class Part:
    """Processor seconds of one step, all processes together; without `is_safety`: of the training itself."""

    name: str
    seconds: float
    is_safety: bool = True


def parts(options: argparse.Namespace) -> list[Part]:
    """What one step of the job takes, by what is done in it."""
    with tempfile.TemporaryDirectory(prefix="swarm-overhead-") as name:
        spec, _ = job_of(options, Path(name))
        row_s = _row_s(Path(name))
    torch.set_num_threads(options.threads)
    tune_malloc()  # as a stage server does
    stages = [Stage(spec, stage, torch.device("cpu")) for stage in range(options.stages)]
    microbatch = Microbatch(0, 0, 0)
    shape = (options.microbatch, options.sequence)
    tokens = torch.randint(0, 257, shape, generator=torch.Generator().manual_seed(0))
    computing_s = checking_s = 0.0

    def forward(stage: Stage, x: Tensor | None) -> Tensor | None:
        return stage.forward(microbatch, 0, portion=0, x=x, tokens=tokens, targets=tokens)[0]

    def there_and_back(stage: Stage, x: Tensor | None, g: Tensor | None, accumulate: bool = True) -> Tensor | None:
        forward(stage, x)
        return stage.backward(microbatch, g, accumulate=accumulate)[0]

    inputs: list[Tensor | None] = [None]
    for stage in stages:
        inputs.append(forward(stage, inputs[-1]))
    g = None
    for stage, x in zip(reversed(stages), reversed(inputs[:-1]), strict=True):
        gradients = {name: torch.randn_like(parameter) for name, parameter in stage.module.named_parameters()}
        check_s = _least_s(partial(stage._acceptable, gradients))
        checking_s += check_s * options.microbatches
        computing_s += (_least_s(partial(there_and_back, stage, x, g)) - check_s) * options.microbatches
        g = there_and_back(stage, x, g, accumulate=False)
    count, replicas = options.microbatches, options.replicas
    boundary = memoryview(bytes(4 * options.microbatch * options.sequence * options.width))
    frames_s = _checksum_s(boundary) * 2 * (options.stages - 1) * count  # y and dx
    elements = [layout.elements for stage in stages for layout in stage.units.values()]
    # Each of r replicas sends r - 1 parts of 1/r and its mean to r - 1 others.
    frames_s += sum(_checksum_s(memoryview(bytes(4 * size))) * 2 * (replicas - 1) for size in elements)
    checksum_s = 2 * frames_s  # made by the sender, compared by the receiver
    stepping_s = replicas * sum(_step_s(stage) for stage in stages)
    state_s = replicas * sum(_least_s(stage.digest) for stage in stages)
    means = [torch.zeros(size).numpy().data for size in elements]
    mean_s = replicas * sum(_least_s(partial(xxhash.xxh3_128_hexdigest, mean)) for mean in means)
    names_s = (1 + replicas) * options.stages * _least_s(lambda: set_digest(range(count)))
    return [
        Part("forward and backward", computing_s, is_safety=False),
        Part("optimizer", stepping_s - state_s, is_safety=False),
        Part("range and finite checks", checking_s),
        Part("checksums of frames", checksum_s),
        Part("digests of state", state_s),
        Part("digests of means", mean_s),
        Part("names of sets", names_s),
        Part("commit row (wall)", row_s),
    ]


def _least_s(work: Callable[[], object], tries: int = 15) -> float:
    best_s = math.inf
    for _ in range(tries):
        started_s = time.thread_time()
        work()
        best_s = min(best_s, time.thread_time() - started_s)
    return best_s


def _checksum_s(payload: memoryview) -> float:
    return _least_s(lambda: xxhash.xxh3_64_intdigest(payload, 1))


def _step_s(stage: Stage) -> float:
    """Applying a step, with the digest that comes with it."""
    best_s = math.inf
    for step in range(5):
        means = {unit: torch.ones(layout.elements) for unit, layout in stage.units.items()}
        started_s = time.thread_time()
        stage.apply(step, means, learning_rate=1e-4, scale=1.0, skip=False)
        stage.digest()
        best_s = min(best_s, time.thread_time() - started_s)
    return best_s


def _row_s(folder: Path) -> float:
    """Making one commit row durable: the median, on this machine's disk; the only part that is no processor time."""

    async def main() -> float:
        store = await Database.open(f"sqlite:///{folder}/rows.db", None)
        await store.put_job(
            JobRecord(JOB, "overhead", JobState.RUNNING, "", 0.0, 0.0, "{}", JobTokens(("a",), "uint16", 257, 1.0))
        )
        times_s = []
        for step in range(30):
            row = CommitRow(0, step, {UnitName("stage-0"): Round(1, step)}, 1.0, 1.0, 1.0, 0.1, False, 64)
            started_s = time.monotonic()
            await store.put_commit(JOB, row, 0.0)
            times_s.append(time.monotonic() - started_s)
        await store.close()
        return median(times_s)

    return asyncio.run(main())


def _parts_table(options: argparse.Namespace, found: Sequence[Part]) -> Table:
    training_s = sum(part.seconds for part in found if not part.is_safety)
    table = Table(title="one step, processor milliseconds of all processes", caption="share: of the training itself")
    for heading in ("part", "ms", "share"):
        table.add_column(heading, justify="right" if heading != "part" else "left")
    for part in found:
        table.add_row(part.name, f"{part.seconds * 1e3:.2f}", f"{part.seconds / training_s:.2%}")
    table.add_section()
    safety_s = sum(part.seconds for part in found if part.is_safety)
    table.add_row("safety together", f"{safety_s * 1e3:.2f}", f"{safety_s / training_s:.2%}")
    return table


def overhead(product: float, without: float) -> float:
    """How much more the product needs, as a share."""
    return product / without - 1


def _shares(product: Timed, without: Timed) -> dict[str, float]:
    """How much more time and processor time a step of the product takes, as shares."""
    return {
        "step": overhead(product.step_s, without.step_s),
        "processors": overhead(product.cpu_s_per_step, without.cpu_s_per_step),
    }


def _table(rounds: Sequence[tuple[Timed, Timed]]) -> Table:
    table = Table(title="the product beside the other", caption="overhead: how much more the product needs")
    for heading in ("round", "step s", "other", "overhead", "cpu-s per step", "other", "overhead"):
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
