"""A model of a few numbers whose gradient counts microbatches; the production stage computes with it as with any model.

Each stage has one parameter of three sections. The gradient of microbatch (t, m) is

    weight   that of the numbers that pass through: different for every (t, m) and every version of the weights
    count    1 at m: the sum of a step must be all ones
    when     t + 1 at m: a contribution of another step is visible

In a tied model the first and the last stage hold one more parameter each, the two uses of one weight; their gradients
count as well. Every boundary tensor begins with its (t, m), in both directions, so a mixed-up tensor spoils the count.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import swarm.model.state as state_module
import swarm.model.weights as weights_module
from scheduler.storage.job_record import JobTokens
from swarm.data.batches import Batches, TokenData
from swarm.job.families import FAMILIES, HEAD
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.model.families import stored_name
from swarm.model.later import PutOff
from swarm.model.stage import Stage
from tests.simulation.engine.history import Applied, Backwarded, Built, Fetched, Forwarded, SumsDropped, Weighed

NUMBERS = 4  # that pass through
WIDTH = 2 + NUMBERS  # of boundary tensors: t and m before them
LENGTH = 8  # tokens of a sample, all equal to its number
VOCABULARY = 1024
WRONG = 1000.0  # counted for a tensor that belongs to another microbatch

Watch = Callable[[object], None]


def counting_spec(
    *,
    stages: int,
    steps: int,
    microbatches: int,
    overlap: int | str = "all",
    tied: bool = False,
    routing: str = "least_completion",
    optimizer: str = "adamw",
    no_progress_s: float = 600.0,
    averaging_timeout_s: float = 20.0,
    checkpoint_every: int = 500,
    **sections: dict[str, object],
) -> JobSpec:
    """A resolved job for the counting model."""
    values: dict[str, Any] = {
        "name": "sim",
        "model": {
            "config": {
                "num_hidden_layers": stages,
                "hidden_size": WIDTH,
                "intermediate_size": 8,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "tie_word_embeddings": tied,
            },
            "dtype": "float32",
        },
        "data": {"source": "unused.txt", "sequence_length": LENGTH, "shuffle": False},
        "training": {
            "steps": steps,
            "global_batch_sequences": microbatches,
            "microbatch_sequences": 1,
            "optimizer": optimizer,
            "warmup_steps": 1,
            "learning_rate": 1e-2,
            "reproducible": True,
            "fixed_point_bits": 24,
        },
        "pipeline": {"stages": stages, "compression": "none", "overlap": overlap, "routing": routing},
        "averaging": {"timeout_s": averaging_timeout_s},
        "checkpoint": {"every_steps": checkpoint_every},
        "limits": {"no_progress_s": no_progress_s},
    }
    for section, keys in sections.items():
        values.setdefault(section, {}).update(keys)
    return resolve(JobSpec.model_validate(values), Basis(VOCABULARY, stages=stages))


def write_samples(root: Path, samples: int) -> JobTokens:
    """A token shard in a scheduler's data folder in which sample number n is LENGTH times the token n."""
    assert samples < VOCABULARY
    content = (np.arange(samples * LENGTH + 1) // LENGTH).astype("<u2").tobytes()
    sha256 = hashlib.sha256(content).hexdigest()
    (root / "shards").mkdir(parents=True, exist_ok=True)
    (root / "shards" / f"{sha256}.bin").write_bytes(content)
    return JobTokens((sha256,), "uint16", VOCABULARY, 1.0)


def batches_of(root: Path, tokens: JobTokens, spec: JobSpec) -> Batches:
    """The data of the job, for the one-process reference."""
    data = TokenData.open([root / "shards" / f"{tokens.shards[0]}.bin"], tokens.token_dtype)
    return Batches(data, spec.training, LENGTH, shuffle=False, seed=spec.training.seed)


class _Counted(torch.autograd.Function):
    """y = tanh(x + weight), behind the two numbers t and m; the gradients count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, *uses: Tensor) -> Tensor:
        y = x.clone()
        y[..., 2:] = torch.tanh(x[..., 2:] + numbers[:NUMBERS])
        ctx.save_for_backward(y)
        ctx.microbatches, ctx.uses = (numbers.numel() - NUMBERS) // 2, len(uses)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        (y,) = ctx.saved_tensors
        step, index = y[0, 0, :2].int().tolist()
        one = 1.0 if g[0, 0, :2].int().tolist() == [step, index] else WRONG
        dx = g.clone()
        dx[..., 2:] *= 1 - y[..., 2:] ** 2
        gradient = torch.zeros(NUMBERS + 2 * ctx.microbatches)
        gradient[:NUMBERS] = dx[..., 2:].sum(dim=(0, 1))
        gradient[NUMBERS + index] = one
        gradient[NUMBERS + ctx.microbatches + index] = one * (step + 1)
        uses = [torch.zeros(ctx.microbatches) for _ in range(ctx.uses)]
        for use in uses:
            use[index] = one
        return dx, gradient, *uses


class _Loss(torch.autograd.Function):
    """Logits from the numbers that passed through all stages; the gradient begins with its t and m."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(y, table)
        return y[..., 2:].sum(dim=-1, keepdim=True) * table

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        y, table = ctx.saved_tensors
        dx = y.clone()
        dx[..., 2:] = (g * table).sum()
        return dx, None


class CountingModule(nn.Module):
    """One stage of the counting model."""

    def __init__(self, spec: JobSpec, stage: int) -> None:
        super().__init__()
        split = spec.pipeline.split
        assert split != "auto"
        self._first, self._last = stage == 0, stage == len(split) - 1
        self._microbatches = spec.training.microbatches
        self.put_off, self.later = PutOff(), frozenset[str]()
        family = FAMILIES[spec.model.family]
        start = torch.zeros(NUMBERS + 2 * self._microbatches)
        start[:NUMBERS] = torch.linspace(-0.5, 0.5, NUMBERS) * (stage + 1)
        # In a list, since an attribute would be registered under its name a second time.
        self._used = [self._add(f"{family.trunk}.{family.layers}.{stage}.numbers", nn.Parameter(start))]
        if spec.tied:
            for held, name in ((self._first, family.embedding_name), (self._last, HEAD)):
                if held:
                    self._used.append(self._add(name, nn.Parameter(torch.zeros(self._microbatches))))
        self.register_buffer("table", torch.sin(torch.arange(VOCABULARY, dtype=torch.float32)), persistent=False)

    def forward(self, source: Tensor, *_: object) -> Tensor:
        x = self._embed(int(source[0, 0])) if self._first else source
        y = _Counted.apply(x, *self._used)
        return _Loss.apply(y, self.table) if self._last else y

    def _embed(self, sample: int) -> Tensor:
        numbers = [*divmod(sample, self._microbatches), *(math.sin(sample * k) for k in range(1, NUMBERS + 1))]
        return torch.tensor(numbers, dtype=torch.float32).expand(1, LENGTH, WIDTH).contiguous()

    def _add(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        module: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, parameter)
        return parameter


class CountingStage(Stage):
    """The production stage around the counting model."""

    def __init__(self, spec: JobSpec, stage: int, *rest: Any, **options: Any) -> None:
        with _counting_modules():
            super().__init__(spec, stage, *rest, **options)


def _counting_module(
    spec: JobSpec, stage: int, _device: torch.device, weights: Mapping[str, Tensor] | None = None
) -> CountingModule:
    module = CountingModule(spec, stage)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if weights:
                parameter.copy_(weights[stored_name(spec, name)])
    return module


@contextmanager
def _counting_modules() -> Any:
    """Replace only the modules that a stage computes with; synchronous, and undone at once."""
    real = weights_module.build
    weights_module.build = _counting_module  # type: ignore[assignment]
    try:
        yield
    finally:
        weights_module.build = real


@contextmanager
def counting_files() -> Iterator[None]:
    """Read checkpoints of the counting model as such, not as the Llama that their config describes."""
    real = state_module.parameter_shapes
    state_module.parameter_shapes = _counting_shapes  # type: ignore[assignment]
    try:
        yield
    finally:
        state_module.parameter_shapes = real


def _counting_shapes(spec: JobSpec, stage: int | None = None) -> dict[str, tuple[int, ...]]:
    split = spec.pipeline.split
    assert split != "auto"
    stages = range(len(split)) if stage is None else [stage]
    return {
        stored_name(spec, name): tuple(parameter.shape)
        for stage in stages
        for name, parameter in CountingModule(spec, stage).named_parameters()
    }


def watched(base: type[Stage], watch: Watch) -> type[Stage]:
    """A class of stage that reports its calls to `watch`."""

    class Watched(base):  # type: ignore[valid-type,misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            watch(Built(self.stage, self.version, self.digest()))

        def forward(self, microbatch: Any, version: int, **options: Any) -> Any:
            x, tokens = options.get("x"), options.get("tokens")
            source = hash_of(x) if x is not None else str(tokens.flatten().tolist())
            y, loss = super().forward(microbatch, version, **options)
            output = hash_of(y) if y is not None else repr(loss)
            watch(Forwarded(self.stage, microbatch, version, source, output))
            return y, loss

        def backward(self, microbatch: Any, g: Tensor | None = None, *, accumulate: bool = True, **options: Any) -> Any:
            source = hash_of(g) if g is not None else "loss"
            dx, finite = super().backward(microbatch, g, accumulate=accumulate, **options)
            output = hash_of(dx) if dx is not None else "end"
            watch(Backwarded(self.stage, microbatch, accumulate and finite, source, output))
            return dx, finite

        def weigh(self, microbatch: Any) -> bool:
            finite: bool = super().weigh(microbatch)
            watch(Weighed(self.stage, microbatch, finite))
            return finite

        def void(self, step: int) -> None:
            super().void(step)
            watch(SumsDropped(self.stage, step))

        def settle(self, version: int) -> str:
            digest: str = super().settle(version)
            watch(Fetched(self.stage, version, digest))
            return digest

        def apply(self, step: int, means: Any, **options: Any) -> None:
            held = {unit: mean.numpy().tobytes() for unit, mean in means.items()}
            super().apply(step, means, **options)
            watch(
                Applied(
                    self.stage,
                    step,
                    held,
                    options["learning_rate"],
                    options["scale"],
                    options["skip"],
                    self.version,
                    self.digest(),
                )
            )

    return Watched


def hash_of(tensor: Tensor) -> str:
    """A short name of a tensor's bytes."""
    return hashlib.blake2b(tensor.detach().contiguous().numpy().tobytes(), digest_size=6).hexdigest()
