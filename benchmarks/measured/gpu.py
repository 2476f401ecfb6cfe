"""A swarm on one CUDA GPU: are its bits those of one process, and how fast is it beside plain torch?

    python -m benchmarks.measured.gpu [--device cuda] [--stages 2 4] [--layers 16] [--width 2048] [--steps 5] ...

First the GPU must decode each codec to the bits of the host. Then a small Llama is trained in reproducible mode, by
real stage servers that share the GPU and by `train-local` on it; the sha256 of the weights must be equal. Then a Llama
of about 1 B parameters is trained in these ways, one after the other, on the same tokens:

    torch       one process: the same layers, bfloat16 autocast, torch.optim.AdamW (fused), no stages, no checks
    torch 1F1B  torch.distributed.pipelining with a process per stage, for each of `--stages`; tensors over gloo
    swarm       a scheduler and as many stage servers, `--dtype`, boundary tensors in bfloat16

All stages share the device, so the swarm can at best be as fast as torch; the ratio says what being a swarm costs.
Utilisation counts the model's own operations (6 per multiply-add of a forward, nothing for recomputation) and is a
share of what the device reaches in a large bfloat16 matrix product, measured here, or of `--peak-tflops`.

Without the device it says so and ends with 3, the exit code of an invalid configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from swarm.model.runtime import choose_device, configure, describe_device, release_memory, synchronise
from swarm.reference.trainer import train_local

# With 16 layers of width 2048 this is a Llama of 0.95 B parameters.
CONFIG = {"num_attention_heads": 16, "intermediate_size": 5632, "vocab_size": 32_000, "tie_word_embeddings": False}
# The small job of the bitwise check. Odd sizes: no tensor ends where a vector register does.
SMALL = {"layers": 4, "width": 72, "sequence": 50, "microbatch": 2, "microbatches": 6, "steps": 4, "dtype": "float32"}
PRODUCT_SIDE = 8192
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


def main() -> None:
    options = _options()
    try:
        device = choose_device(options.device)
        if device.type != "cuda":
            raise InvalidConfig(f'device "{options.device}" is no CUDA GPU', hint="this benchmark is for one")
    except InvalidConfig as error:
        print(f"error[{error.code}]: {error.message}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA begins; reproducible mode needs it
    console = Console()
    console.print(describe_device(device))
    if other := decoded_otherwise(device):
        sys.exit(f"error: the device decodes {', '.join(other)} to other bits than the host")
    for dtype, compression in (*((dtype, "none") for dtype in DTYPES), ("float32", "int8")):
        ours, theirs = _bits(_cut(options, options.stages[0]), device, dtype, compression)
        what = f"{dtype}, compression {compression}"
        console.print(f"{what}: swarm {ours[:16]}, one process {theirs[:16]}: {verdict(ours, theirs)}")
        if ours != theirs:
            sys.exit("error: the weights differ from those of one process")
    with tempfile.TemporaryDirectory(prefix="swarm-gpu-") as name:
        spec, manifest = job_of(_cut(options, 1), Path(name), config=CONFIG)
        peak = options.peak_tflops * 1e12 or _fastest_product(device)
        speeds = [Speed.of("torch, bfloat16 autocast", _plain_torch(spec, manifest, device, options.warmup), spec)]
        console.print(speeds[-1])
        release_memory(device)
        for stages in options.stages:
            for way, found in side_by_side(_cut(options, stages), Path(name), spec, manifest, device):
                speeds.append(Speed.of(f"{way}, {stages} stages", found, spec))
                console.print(speeds[-1])
    console.print(table(speeds, peak, parameters(spec)))


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
    parser.set_defaults(replicas=1, compression="bfloat16", overlap=0)
    return parser.parse_args()


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
        numbers = (f"{speed.tokens_per_s:,.0f}", f"{speed.flops_per_s / 1e12:.1f}", *(f"{one:.1%}" for one in shares))
        made.add_row(speed.way, *numbers)
    return made


def _whole(spec: JobSpec) -> JobSpec:
    """The same model as one stage."""
    return spec.having("pipeline", stages=1, split=(spec.layers,))


# Measuring --------------------------------------------------------------------------------------------------------


def decoded_otherwise(device: torch.device) -> list[str]:
    """The codecs whose payloads the device decodes to other bits than the host."""
    tensor = torch.randn(3 * codec.INT8_BLOCK + 77, generator=torch.Generator().manual_seed(0))
    other = []
    for name in codec.CODECS:
        payload = codec.encode_there(tensor, name)
        near, there = (codec.decode_there(one, (tensor.numel(),), name) for one in (payload, payload.to(device)))
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


def _fastest_product(device: torch.device) -> float:
    """Floating-point operations per second of a large bfloat16 matrix product; the best of a few."""
    a, b = (torch.randn(PRODUCT_SIDE, PRODUCT_SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    best_s = float("inf")
    for _ in range(20):
        synchronise(device)
        started_s = time.perf_counter()
        a @ b
        synchronise(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2.0 * PRODUCT_SIDE**3 / best_s


if __name__ == "__main__":
    main()
