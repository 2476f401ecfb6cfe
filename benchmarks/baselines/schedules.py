"""What a swarm is compared with, in processes of its own: `swarm train-local`, and schedules of torch over gloo.

    python -m benchmarks.baselines.schedules local SPEC.json TOKENS TOKEN_DTYPE THREADS DEVICE
    python -m benchmarks.baselines.schedules ranks SPEC.json TOKENS TOKEN_DTYPE THREADS DEVICE RANK RENDEZVOUS REPLICAS
        HALVES [PASS_S STEP_S]

A process says "ready". Then each line on its stdin is a way, of which it trains the whole job anew. It answers with one
line of JSON: when each step ended, in seconds since the epoch and in processor seconds of this process, and the losses
(none where they are not known). So importing torch is paid once, and the ways can take turns.

The schedules are those of torch.distributed.pipelining. `interleaved` and `zbv` have two stages on each rank: HALVES is
the same job cut into twice as many.

    gpipe, 1f1b     rank r has stage r
    interleaved     rank r of n has stages r and n + r
    zbv             rank r of n has stages r and 2 n - 1 - r

All ranks compute on DEVICE. If that is a GPU, boundary tensors still travel over gloo and so through the host: NCCL
refuses two ranks on one GPU.

With PASS_S and STEP_S computations take given times: a forward through all layers of a rank PASS_S, a backward as long,
of which zbv has the half for inputs and the half for weights, and an optimizer step STEP_S.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.measured.modelled import takes
from swarm.data.batches import Batches, TokenData
from swarm.job.schedule import learning_rate
from swarm.job.spec import JobSpec, spec_from_json
from swarm.model.families import build
from swarm.model.runtime import configure, synchronise
from swarm.reference.trainer import StepReport, train_local

CPU = torch.device("cpu")
HALVED = ("interleaved", "zbv")

_Seconds = tuple[float, float]  # of a pass, and of an optimizer step


@dataclass(slots=True)
class Trained:
    """When each step ended, by two clocks, and the losses in nats per token."""

    times_unix_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step_ended(self) -> None:
        self.times_unix_s.append(time.time())
        self.cpu_s.append(time.process_time())


def main() -> None:
    way, spec_path, tokens, token_dtype, threads, name, *rest = sys.argv[1:]
    spec = spec_from_json(Path(spec_path).read_text())
    device = torch.device(name)
    configure(device, threads=int(threads), reproducible=False)
    data = TokenData.open([Path(tokens)], token_dtype)
    batches = Batches(data, spec.training, spec.data.sequence_length, spec.data.shuffle, spec.training.seed)
    if way == "local":
        train: Callable[[str], Trained] = lambda _: _train_local(spec, batches, device)  # noqa: E731
    else:
        rank, rendezvous, replicas, halves_path, *given = rest
        modelled = (float(given[0]), float(given[1])) if given else None
        halves = spec_from_json(Path(halves_path).read_text())
        grid = _Grid.join(spec, rank, rendezvous, replicas, device)
        train = lambda way: _train_ranked(way, halves if way in HALVED else spec, batches, grid, modelled)  # noqa: E731
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(train(line.strip()))), flush=True)


def _train_local(spec: JobSpec, batches: Batches, device: torch.device) -> Trained:
    trained = Trained()

    def on_step(report: StepReport) -> None:
        trained.step_ended()
        trained.losses.append(report.loss)

    train_local(spec, batches, device=device, on_step=on_step)
    return trained


# torch.distributed.pipelining -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Grid:
    """Rank = replica * width + column: a pipeline is a row, the replicas of its ranks are columns."""

    at: int
    width: int
    replica: int
    replicas: int
    row: dist.ProcessGroup
    column: dist.ProcessGroup
    device: torch.device

    @classmethod
    def join(cls, spec: JobSpec, rank: str, rendezvous: str, replicas: str, device: torch.device) -> _Grid:
        width, count = len(_split(spec)), int(replicas)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=width * count)
        # Every process makes every group, in one order.
        rows = [dist.new_group([r * width + s for s in range(width)]) for r in range(count)]
        columns = [dist.new_group([r * width + s for r in range(count)]) for s in range(width)]
        replica, at = divmod(int(rank), width)
        return cls(at, width, replica, count, rows[replica], columns[at], device)

    def stages(self, way: str) -> tuple[int, ...]:
        """The stages that this rank has."""
        second = {"interleaved": self.width + self.at, "zbv": 2 * self.width - 1 - self.at}
        return (self.at, second[way]) if way in second else (self.at,)


class _There(nn.Module):
    """The stage on its device, under the job's autocast, as `swarm.model.stage` runs it; what is sent is on the CPU."""

    def __init__(self, module: nn.Module, dtype: str, device: torch.device, *, is_last: bool) -> None:
        super().__init__()
        self.module = module
        self._enabled = dtype == "bfloat16"
        self._device, self._is_last = device, is_last

    def forward(self, tokens_or_hidden: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._enabled):
            output: Tensor = self.module(tokens_or_hidden.to(self._device))
            return output if self._is_last else output.to(CPU)


def _schedule_of(way: str, stages: list[PipelineStage], microbatches: int, loss_of: Any) -> Any:
    """Gradients are left as they add up: the loss is divided by the tokens already."""
    match way:
        case "gpipe":
            return ScheduleGPipe(stages[0], microbatches, loss_fn=loss_of, scale_grads=False)
        case "1f1b":
            return Schedule1F1B(stages[0], microbatches, loss_fn=loss_of, scale_grads=False)
        case "interleaved":
            return ScheduleInterleaved1F1B(stages, microbatches, loss_fn=loss_of, scale_grads=False)
        case "zbv":
            return ScheduleZBVZeroBubble(stages, microbatches, loss_fn=loss_of, scale_grads=False)
    raise AssertionError(way)


def _model(way: str, stages: Sequence[PipelineStage], optimizer: torch.optim.Optimizer, seconds: _Seconds) -> None:
    """Let the computations of a rank take the given times."""
    pass_s, step_s = seconds
    takes(optimizer, "step", step_s)
    for stage in stages:
        each_s = pass_s / len(stages)
        takes(stage, "forward_one_chunk", each_s)
        takes(stage, "backward_one_chunk", each_s / 2.0 if way == "zbv" else each_s)
        if way == "zbv":
            takes(stage, "backward_weight_one_chunk", each_s / 2.0)


def _train_ranked(way: str, spec: JobSpec, batches: Batches, grid: _Grid, modelled: _Seconds | None) -> Trained:
    """The same layers, data, loss, clipping and AdamW as the job; microbatches are dealt to the rows in turn."""
    training, count = spec.training, len(_split(spec))
    mine = grid.stages(way)
    module = nn.ModuleList(build(spec, stage, grid.device) for stage in mine)
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=training.learning_rate,
        betas=training.betas,
        eps=training.eps,
        weight_decay=training.weight_decay,
    )
    tokens_per_step = batches.tokens_of(0)

    def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        targets = targets_BT.to(logits_BTV.device).flatten()
        total = nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), targets, reduction="sum")
        return total / tokens_per_step

    def there(one: nn.Module, stage: int) -> nn.Module:
        return _There(one, spec.model.dtype, grid.device, is_last=stage == count - 1)

    stages = [
        PipelineStage(there(one, stage), stage, count, CPU, group=grid.row)
        for one, stage in zip(module, mine, strict=True)
    ]
    if modelled is not None:
        _model(way, stages, optimizer, modelled)
    schedule = _schedule_of(way, stages, training.microbatches // grid.replicas, loss_of)
    first, last = 0 in mine, count - 1 in mine
    trained = Trained()
    for step in range(training.steps):
        tokens, targets = _share(batches, step, range(grid.replica, training.microbatches, grid.replicas))
        losses: list[Tensor] = []
        schedule.step(
            *((tokens,) if first else ()),
            target=targets if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        _average(module, grid)
        _clip(module, training.grad_clip_norm, grid)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        optimizer.step()
        optimizer.zero_grad()
        synchronise(grid.device)
        trained.step_ended()
        if last:
            loss = torch.stack(losses).sum().detach().cpu()
            if grid.replicas > 1:
                dist.all_reduce(loss, group=grid.column)
            trained.losses.append(float(loss))
    return trained


def _share(batches: Batches, step: int, indices: range) -> tuple[Tensor, Tensor]:
    """One row's microbatches of a step, one after the other: tokens and targets int64 [sequences, T]."""
    pairs = [batches.microbatch(step, index) for index in indices]
    tokens, targets = (torch.cat([torch.from_numpy(array) for array in arrays]) for arrays in zip(*pairs, strict=True))
    return tokens.long(), targets.long()


def _average(module: nn.Module, grid: _Grid) -> None:
    """Add the gradients of a rank's replicas in one flat all-reduce, as DDP would with one bucket."""
    if grid.replicas == 1:
        return
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=grid.column)
    for gradient, summed in zip(
        gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(summed.view_as(gradient))


def _clip(module: nn.Module, norm_max: float, grid: _Grid) -> None:
    """Clip by the norm over all stages."""
    if not norm_max:
        return
    squared = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]).square().cpu()
    dist.all_reduce(squared, group=grid.row)
    nn.utils.clip_grads_with_norm_(module.parameters(), norm_max, squared.sqrt())


def _split(spec: JobSpec) -> tuple[int, ...]:
    assert spec.pipeline.split != "auto", "the caller resolves the spec"
    return spec.pipeline.split


if __name__ == "__main__":
    main()
