"""A swarm on one GPU: does it give the bits of one process, and how fast is it beside plain torch?

    python -m benchmarks.measured.gpu [--device cuda] [--stages 2 4] [--layers 16] [--width 2048] [--steps 5] ...

Its parts come in the order of what they tell for their time, and each prints its results as they come, also into
`--out`. A part that fails is named and ends by itself only; the exit code is 1 then.

    machine     versions, the device, a large bfloat16 matrix product
    codecs      the GPU decodes each codec to the bits of the host
    streams     1 GiB to the device and back, alone and beside matrix products: do they overlap?
    stage       one stage in this process: milliseconds of each piece of its work
    joiner      a second one takes over its state, half of it from before a commit: the digest must be equal
    bits        a small Llama, trained in reproducible mode by stage servers that share the GPU and by `train-local` on
                it, in float32: the sha256 of the weights must be equal
    speed       a Llama of about 1 B parameters, for the first number of `--stages`:
                  torch       one process: the same layers, bfloat16 autocast, torch.optim.AdamW (fused), no checks
                  swarm       a scheduler and as many stage servers, `--dtype`, boundary tensors in bfloat16
                  torch 1F1B  torch.distributed.pipelining with a process per stage; tensors over gloo
    dtypes      `bits` in the other dtypes, and with int8 between stages
    stages      `speed` for the other numbers of `--stages`

All stages share the device, so the swarm can at best be as fast as torch; the ratio says what being a swarm costs.
Processes take turns on a GPU; with `--mps` the driver's service lets them compute at once. Utilisation counts the
model's own operations (6 per multiply-add of a forward, nothing for recomputation) and is a share of what the device
reaches in a large bfloat16 matrix product, measured here, or of `--peak-tflops`.

`--quick` runs all parts in tiny shapes, on any device. Without the device it says so and ends with 3, the exit code of
an invalid configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.measured.ways import Rivals, Swarm, Timed, changed, job_of, timed
from benchmarks.processes import Fleet
from swarm.data.batches import Batches, TokenData
from swarm.data.shards import TokenManifest
from swarm.errors import InvalidConfig
from swarm.job.partition import flops_per_token
from swarm.job.spec import JobSpec
from swarm.model import codec
from swarm.model.families import build, parameter_shapes
from swarm.model.runtime import (
    choose_device,
    configure,
    describe_device,
    free_bytes,
    is_gpu,
    pinned,
    received,
    release_memory,
    send_ahead,
    send_back,
    synchronise,
    to_host,
    total_bytes,
)
from swarm.model.stage import Stage
from swarm.reference.trainer import train_local
from swarm.text import size
from swarm.types import Microbatch

# With 16 layers of width 2048 this is a Llama of 0.95 B parameters.
CONFIG = {"num_attention_heads": 16, "intermediate_size": 5632, "vocab_size": 32_000, "tie_word_embeddings": False}
# The small job of the bitwise check. Odd sizes: no tensor ends where a vector register does.
SMALL = {"layers": 4, "width": 72, "sequence": 50, "microbatch": 2, "microbatches": 6, "steps": 4, "dtype": "float32"}
QUICK = SMALL | {"steps": 3, "warmup": 1, "stages": [2, 4], "threads": 1, "dtype": "float32"}
PRODUCT_SIDE, QUICK_SIDE = 8192, 256
COPIED_BYTES, QUICK_BYTES = 1 << 30, 1 << 20
DTYPES = ("float32", "bfloat16", "bfloat16_parameters")


@dataclass(frozen=True, slots=True)
class Speed:
    """One way's tokens and model operations per second."""

    way: str
    tokens_per_s: float
    flops_per_s: float

    @classmethod
    def of(cls, way: str, found: Timed, spec: JobSpec) -> Speed:
        return cls(way, found.tokens_per_s, found.tokens_per_s * model_flops(spec))

    def __str__(self) -> str:
        return f"{self.way}: {self.tokens_per_s:,.0f} tokens/s, {self.flops_per_s / 1e12:.2f} TFLOP/s"


Lines: TypeAlias = Iterator[str]


def main() -> None:
    options = _options()
    try:
        device = choose_device(options.device)
        if not (is_gpu(device) or options.quick):
            raise InvalidConfig(f'device "{options.device}" is no GPU', hint="add --quick: it shows that all parts run")
    except InvalidConfig as error:
        print(f"error[{error.code}]: {error.message}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA begins; reproducible mode needs it
    with contextlib.ExitStack() as stack:
        if options.mps:
            stack.enter_context(_mps())
        out = None if options.out is None else stack.enter_context(options.out.open("w", buffering=1))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-gpu-")))
        failed = run_parts(parts(options, device, folder), [sys.stdout] if out is None else [sys.stdout, out])
    sys.exit(1 if failed else 0)


def run_parts(named: Mapping[str, Lines], files: Sequence[TextIO]) -> list[str]:
    """Print the lines of each part as they come; gives the parts that failed."""
    failed = []

    def tell(line: str) -> None:
        for file in files:
            print(line, file=file, flush=True)

    for name, lines in named.items():
        started_s = time.perf_counter()
        try:
            for line in lines:
                tell(f"{name:8s} {line}")
        except Exception:  # the other parts still tell something
            failed.append(name)
            tell(traceback.format_exc())
        tell(f"{name:8s} {'FAILED' if name in failed else 'ended'} after {time.perf_counter() - started_s:.0f} s")
    return failed


def parts(options: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, Lines]:
    """All parts by name, in order; a part begins when its first line is asked for."""
    first, *others = options.stages
    speeds: list[Speed] = []
    return {
        "machine": _machine(options, device),
        "codecs": _codecs(device),
        "streams": _streams(options, device),
        "stage": _stage(_cut(options, first), device, folder / "stage"),
        "joiner": _joiner(_cut(options, first), device, folder / "joiner"),
        "bits": _same_bits(_cut(options, first), device, [("float32", "none")]),
        "speed": _speeds(options, [1, first], device, folder / "speed", speeds),
        "dtypes": _same_bits(
            _cut(options, first), device, [*((dtype, "none") for dtype in DTYPES[1:]), ("float32", "int8")]
        ),
        "stages": _speeds(options, others, device, folder / "stages", speeds),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="of pipelines that are compared")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--microbatch", type=int, default=8, help="sequences per microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--threads", type=int, default=4, help="torch threads of each process")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the device; 0: measure a matrix product")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="model.dtype of the swarm that is timed")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, whose speeds say nothing")
    parser.add_argument("--mps", action="store_true", help="start the driver's service for processes that share a GPU")
    parser.add_argument("--out", type=Path, help="write the lines to this file too")
    parser.set_defaults(replicas=1, compression="bfloat16", overlap=0)
    options = parser.parse_args()
    return argparse.Namespace(**vars(options) | QUICK) if options.quick else options


def _cut(options: argparse.Namespace, stages: int) -> argparse.Namespace:
    """The options for so many stages."""
    return argparse.Namespace(**vars(options) | {"stages": stages})


# Counting ---------------------------------------------------------------------------------------------------------


def model_flops(spec: JobSpec) -> float:
    """Floating-point operations per token: two for each multiply-add, in the forward and twice in the backward."""
    layer, head = flops_per_token(spec)
    return 6.0 * (spec.layers * layer + head)


def parameters(spec: JobSpec) -> int:
    """Parameters of the whole model."""
    return sum(math.prod(shape) for shape in parameter_shapes(spec).values())


def verdict(ours: str, theirs: str) -> str:
    return "the same bits" if ours == theirs else "OTHER BITS"


def table(speeds: Sequence[Speed], peak_flops_per_s: float, count: int) -> Table:
    """All ways beside the first."""
    title = f"Llama of {count / 1e9:.2f} B parameters; 100 % are {peak_flops_per_s / 1e12:.0f} TFLOP/s"
    made = Table(title=title)
    for heading in ("way", "tokens/s", "TFLOP/s", "utilisation", "of the first"):
        made.add_column(heading, justify="left" if heading == "way" else "right")
    for speed in speeds:
        shares = (speed.flops_per_s / peak_flops_per_s, speed.tokens_per_s / speeds[0].tokens_per_s)
        numbers = (f"{speed.tokens_per_s:,.0f}", f"{speed.flops_per_s / 1e12:.1f}", *map("{:.1%}".format, shares))
        made.add_row(speed.way, *numbers)
    return made


def _whole(spec: JobSpec) -> JobSpec:
    """The same model as one stage."""
    return spec.having("pipeline", stages=1, split=(spec.layers,))


# Measuring --------------------------------------------------------------------------------------------------------


def _machine(options: argparse.Namespace, device: torch.device) -> Lines:
    yield f"{describe_device(device)}; Python {platform.python_version()}, torch {torch.__version__}"
    yield f"{size(free_bytes(device))} of {size(total_bytes(device))} are free"
    yield f"a bfloat16 matrix product reaches {_peak(options, device) / 1e12:.1f} TFLOP/s"


def _codecs(device: torch.device) -> Lines:
    other = decoded_otherwise(device)
    yield f"decoded otherwise than on the host: {', '.join(other) or 'none'}"
    if other:
        raise AssertionError("the device decodes to other bits than the host")


def _streams(options: argparse.Namespace, device: torch.device) -> Lines:
    """Seconds of copies in both directions, alone and beside matrix products of about their time."""
    copied = QUICK_BYTES if options.quick else COPIED_BYTES
    here = pinned(torch.zeros(copied // 4), device)
    there, a = here.to(device), torch.ones(_side(options), _side(options), device=device, dtype=torch.bfloat16)
    works: dict[str, Callable[[], object]] = {
        "to the device": lambda: received(send_ahead(here, device)),
        "to the host": lambda: to_host(send_back(there)),
    }
    for name, copy in works.items():
        alone_s = _seconds(copy, device)
        products = max(1, math.ceil(alone_s / _seconds(lambda: a @ a, device)))

        def compute(count: int = products) -> None:
            for _ in range(count):
                a @ a

        def both(copy: Callable[[], object] = copy, compute: Callable[[], None] = compute) -> None:
            compute()
            copy()

        computing_s, both_s = _seconds(compute, device), _seconds(both, device)
        yield (
            f"{size(copied)} {name}: {alone_s * 1e3:.1f} ms ({copied / alone_s / 1e9:.1f} GB/s); products "
            f"{computing_s * 1e3:.1f} ms; behind these, {both_s * 1e3:.1f} ms"
        )


def _stage(options: argparse.Namespace, device: torch.device, folder: Path) -> Lines:
    """Milliseconds of each piece of work of the last of some stages, in both modes and with the host's optimizer."""
    spec, _ = job_of(options, _made(folder), config={} if options.quick else CONFIG)
    for mode, place in (("reproducible", "device"), ("ordinary", "device"), ("ordinary", "host")):
        configure(device, threads=options.threads, reproducible=mode == "reproducible")
        training = {"reproducible": mode == "reproducible", "optimizer_on": place}
        found = _pieces(changed(spec, training=training), options.stages - 1, device)
        pieces = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in found.items())
        yield f"{mode}, optimizer on the {place}: {pieces}"
        release_memory(device)


def _pieces(spec: JobSpec, last: int, device: torch.device) -> dict[str, float]:
    """Seconds of each piece of work of a stage; the first microbatch and its sums warm up."""
    stage, microbatch = Stage(spec, last, device), Microbatch(0, 0, 0)
    x = torch.randn(stage.boundary_shape(), device=device)
    targets = torch.zeros(stage.boundary_shape()[:2], dtype=torch.int64)

    def forward() -> object:
        return stage.forward(microbatch, 0, portion=0, x=x, targets=targets)

    forward()
    stage.backward(microbatch)
    there = {unit: stage.expect(unit, torch.zeros(layout.elements)) for unit, layout in stage.units.items()}
    works: dict[str, Callable[[], object]] = {
        "forward": forward,
        "backward": lambda: stage.backward(microbatch),
        "forward again": forward,
        "dx": lambda: stage.backward(microbatch, keep=True),
        "weights": lambda: stage.weigh(microbatch),
        "part": lambda: [stage.part(0, unit) for unit in stage.units],
        "part, there": lambda: to_host(*(stage.part(0, unit) for unit in stage.units)),
        "capture": lambda: stage.capture(optimizer=True),
        "digest": stage.digest,
        "apply": lambda: stage.apply(0, there, learning_rate=1e-3, scale=1.0, skip=False),
    }
    return {name: _seconds(work, device, rounds=1) for name, work in works.items()}


def _joiner(options: argparse.Namespace, device: torch.device, folder: Path) -> Lines:
    """Milliseconds of each piece of joining; every other parameter comes from before a commit, which is replayed."""
    spec, _ = job_of(options, _made(folder), config={} if options.quick else CONFIG, training={"reproducible": True})
    configure(device, threads=options.threads, reproducible=True)
    donor, joiner = (Stage(spec, options.stages - 1, device) for _ in range(2))
    names = [name for name, _ in donor.parameter_sizes()]
    means = {unit: torch.full((layout.elements,), 1e-3) for unit, layout in donor.units.items()}
    parts, given = {1: names[::2], 2: names[1::2]}, dict[int, bytes]()  # by version
    commit: dict[str, Any] = {"learning_rate": 1e-3, "scale": 1.0, "skip": False}
    donor.apply(0, means, **commit)  # else the first half would be what the joiner was built with
    works: dict[str, Callable[[], object]] = {
        "snapshot of a half": lambda: given.update({1: donor.snapshot(parts[1])}),
        "apply": lambda: donor.apply(1, means, **commit),
        "of the other half": lambda: given.update({2: donor.snapshot(parts[2])}),
        "absorb": lambda: [joiner.absorb(parts[version], version, memoryview(given[version])) for version in parts],
        "replay": lambda: joiner.replay(1, parts[1], donor.places.gradients_of(means), **commit),
    }
    yield ", ".join(f"{name} {_seconds(work, device, rounds=1) * 1e3:.1f} ms" for name, work in works.items())
    ours, theirs = joiner.settle(2), donor.digest()
    yield f"its state {ours[:16]}, the donor's {theirs[:16]}: {verdict(ours, theirs)}"
    if ours != theirs:
        raise AssertionError("the joiner's state is not the donor's")


def _same_bits(options: argparse.Namespace, device: torch.device, ways: Sequence[tuple[str, str]]) -> Lines:
    differ = False
    for dtype, compression in ways:
        ours, theirs = _bits(options, device, dtype, compression)
        differ = differ or ours != theirs
        what = f"{dtype}, compression {compression}"
        yield f"{what}: swarm {ours[:16]}, one process {theirs[:16]}: {verdict(ours, theirs)}"
    if differ:
        raise AssertionError("the weights are not the weights of one process")


def _speeds(
    options: argparse.Namespace, stages: Sequence[int], device: torch.device, folder: Path, speeds: list[Speed]
) -> Lines:
    """Each way as it ends, then all that were measured so far; 1 stage is plain torch."""
    spec, manifest = job_of(_cut(options, 1), _made(folder), config={} if options.quick else CONFIG)
    for count in stages:
        if count == 1:
            ways = iter([("torch, bfloat16 autocast", _plain_torch(spec, manifest, device, options.warmup))])
            release_memory(device)
        else:
            ways = side_by_side(_cut(options, count), folder, spec, manifest, device)
        for way, found in ways:
            speeds.append(Speed.of(way if count == 1 else f"{way}, {count} stages", found, spec))
            yield str(speeds[-1])
    console = Console(width=100, file=StringIO())
    console.print(table(speeds, _peak(options, device), parameters(spec)))
    yield f"\n{console.file.getvalue()}"  # type: ignore[attr-defined]  # as it was made


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _seconds(work: Callable[[], object], device: torch.device, rounds: int = 3) -> float:
    """Seconds until the device has done it, the best of some rounds."""
    best_s = float("inf")
    for _ in range(rounds):
        synchronise(device)
        started_s = time.perf_counter()
        work()
        synchronise(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s


@contextlib.contextmanager
def _mps() -> Iterator[None]:
    """NVIDIA's service through which processes compute on one GPU at once, while this runs."""
    control = "nvidia-cuda-mps-control"
    subprocess.run([control, "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run([control], input="quit\n", text=True, check=False)


def decoded_otherwise(device: torch.device) -> list[str]:
    """The codecs whose payloads the device decodes to other bits than the host."""
    tensor = torch.randn(3 * codec.INT8_BLOCK + 77, generator=torch.Generator().manual_seed(0))
    other = []
    for name in codec.CODECS:
        payload = codec.encode_there(tensor, name)
        near, there = (codec.decode_there(data, (tensor.numel(),), name) for data in (payload, payload.to(device)))
        if not torch.equal(near, there.cpu()):
            other.append(name)
    return other


def _bits(options: argparse.Namespace, device: torch.device, dtype: str, compression: str) -> tuple[str, str]:
    """sha256 of the weights that stage servers and one process end with; with a codec that has the same cuts."""
    small = argparse.Namespace(**vars(options) | SMALL | {"dtype": dtype, "compression": compression, "warmup": 1})
    with tempfile.TemporaryDirectory(prefix="swarm-gpu-") as name:
        spec, manifest = job_of(small, Path(name), training={"reproducible": True})
        ours = _swarm(small, Path(name), spec, manifest, device).weights_sha256
        configure(device, threads=options.threads, reproducible=True)
        one = _whole(spec) if compression == "none" else spec
        theirs = train_local(one, _batches(spec, manifest), device=device).sha256
    return ours, theirs


def side_by_side(
    options: argparse.Namespace, folder: Path, spec: JobSpec, manifest: TokenManifest, device: torch.device
) -> Iterator[tuple[str, Timed]]:
    """A swarm and torch's 1F1B, both with `options.stages` processes that share the device, one after the other."""
    here = folder / f"{options.stages}-stages"
    here.mkdir()
    cut = changed(spec, pipeline={"stages": options.stages, "split": "auto"})
    autocast = changed(cut, model={"dtype": "bfloat16"})
    (here / "spec.json").write_text(autocast.model_dump_json())
    yield f"swarm, {options.dtype}", _swarm(options, here, cut, manifest, device)
    with Fleet(here) as fleet:
        ranks = Rivals(("1f1b",), fleet, here, (autocast, manifest), options, device=str(device))
        ranks.wait_ready()
        theirs, _ = ranks.train("1f1b", options.warmup)
    yield "torch 1F1B, bfloat16 autocast", theirs


def _swarm(
    options: argparse.Namespace, folder: Path, spec: JobSpec, manifest: TokenManifest, device: torch.device
) -> Timed:
    with contextlib.ExitStack() as stack:
        swarm = Swarm(stack.enter_context(Fleet(folder)), folder, options, device=str(device))
        stack.enter_context(swarm.connect(spec, manifest))
        return swarm.train(options.warmup)[0]


def _plain_torch(spec: JobSpec, manifest: TokenManifest, device: torch.device, warmup: int) -> Timed:
    """The same layers, data and loss in one process, as one would write it without a swarm."""
    configure(device, threads=None, reproducible=False)
    training, batches = spec.training, _batches(spec, manifest)
    module = build(_whole(spec), 0, device)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=training.learning_rate, betas=training.betas, eps=training.eps, fused=True
    )
    ended_s, loss = [], 0.0
    for step in range(training.steps):
        total = torch.zeros((), device=device)
        for index in range(training.microbatches):
            tokens, targets = (torch.from_numpy(each).to(device).long() for each in batches.microbatch(step, index))
            with torch.autocast(device.type, torch.bfloat16):
                logits = module(tokens)
            each = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)
            (each / training.microbatches).backward()
            total += each.detach() / training.microbatches
        if training.grad_clip_norm:
            nn.utils.clip_grad_norm_(module.parameters(), training.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        synchronise(device)
        ended_s.append(time.time())
        loss = float(total)
    return timed(ended_s, warmup, training.global_batch_sequences * spec.data.sequence_length, 0.0, loss)


def _batches(spec: JobSpec, manifest: TokenManifest) -> Batches:
    data = TokenData.open([shard.path for shard in manifest.shards], manifest.token_dtype)
    return Batches(data, spec.training, spec.data.sequence_length, spec.data.shuffle, spec.training.seed)


def _peak(options: argparse.Namespace, device: torch.device) -> float:
    """Floating-point operations per second of a large bfloat16 matrix product; the best of a few."""
    if options.peak_tflops:
        return float(options.peak_tflops) * 1e12
    a, b = (torch.randn(_side(options), _side(options), device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * _side(options) ** 3 / _seconds(lambda: a @ b, device, rounds=20)


def _side(options: argparse.Namespace) -> int:
    return QUICK_SIDE if options.quick else PRODUCT_SIDE


if __name__ == "__main__":
    main()
