"""What a swarm is compared with, each in processes of its own: `swarm train-local` and Schedule1F1B over gloo.

    python -m benchmarks.measured.baselines local SPEC.json TOKENS TOKEN_DTYPE THREADS
    python -m benchmarks.measured.baselines 1f1b  SPEC.json TOKENS TOKEN_DTYPE THREADS RANK RENDEZVOUS REPLICAS

A process says "ready", then trains the whole job anew for each line on its stdin and answers with one line of JSON:
when each step ended, in seconds since the epoch and in processor seconds of this process, and the loss of the last one
(null where it is not known). So importing torch is paid once, and the ways can take turns.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from swarm.data.batches import Batches, TokenData
from swarm.job.spec import JobSpec, spec_from_json
from swarm.model.families import build
from swarm.model.runtime import configure
from swarm.reference.trainer import StepReport, train_local

CPU = torch.device("cpu")


@dataclass(slots=True)
class Trained:
    """When each step ended, by two clocks, and the last loss in nats per token."""

    times_unix_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    loss: float | None = None

    def step_ended(self) -> None:
        self.times_unix_s.append(time.time())
        self.cpu_s.append(time.process_time())


def main() -> None:
    way, spec_path, tokens, token_dtype, threads, *rest = sys.argv[1:]
    spec = spec_from_json(Path(spec_path).read_text())
    configure(CPU, threads=int(threads), reproducible=False)
    data = TokenData.open([Path(tokens)], token_dtype)
    batches = Batches(data, spec.training, spec.data.sequence_length, spec.data.shuffle, spec.training.seed)
    grid = _Grid.join(spec, *rest) if way == "1f1b" else None
    print("ready", flush=True)
    for _ in sys.stdin:
        trained = _train_local(spec, batches) if grid is None else _train_1f1b(spec, batches, grid)
        print(json.dumps(asdict(trained)), flush=True)


def _train_local(spec: JobSpec, batches: Batches) -> Trained:
    trained = Trained()

    def on_step(report: StepReport) -> None:
        trained.step_ended()
        trained.loss = report.loss

    train_local(spec, batches, on_step=on_step)
    return trained


# Schedule1F1B --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Grid:
    """Rank = replica * stages + stage: a pipeline is a row, the replicas of a stage are a column."""

    stage: int
    replica: int
    replicas: int
    row: dist.ProcessGroup
    column: dist.ProcessGroup

    @classmethod
    def join(cls, spec: JobSpec, rank: str, rendezvous: str, replicas: str) -> _Grid:
        stages, count = len(_split(spec)), int(replicas)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=stages * count)
        # Every process makes every group, in one order.
        rows = [dist.new_group([r * stages + s for s in range(stages)]) for r in range(count)]
        columns = [dist.new_group([r * stages + s for r in range(count)]) for s in range(stages)]
        replica, stage = divmod(int(rank), stages)
        return cls(stage, replica, count, rows[replica], columns[stage])


class _Autocast(nn.Module):
    """The stage under the job's autocast, as `swarm.model.stage` runs it."""

    def __init__(self, module: nn.Module, dtype: str) -> None:
        super().__init__()
        self.module = module
        self._enabled = dtype == "bfloat16"

    def forward(self, tokens_or_hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._enabled):
            output: Tensor = self.module(tokens_or_hidden)
            return output


def _train_1f1b(spec: JobSpec, batches: Batches, grid: _Grid) -> Trained:
    """The same layers, data, loss, clipping and AdamW as the job; microbatches are dealt to the rows in turn."""
    training, stages = spec.training, len(_split(spec))
    module = build(spec, grid.stage, CPU)
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=training.learning_rate,
        betas=training.betas,
        eps=training.eps,
        weight_decay=training.weight_decay,
    )
    tokens_per_step = batches.tokens_of(0)

    def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        total = nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction="sum")
        return total / tokens_per_step

    stage = PipelineStage(_Autocast(module, spec.model.dtype), grid.stage, stages, CPU, group=grid.row)
    schedule = Schedule1F1B(stage, training.microbatches // grid.replicas, loss_fn=loss_of, scale_grads=False)
    first, last = grid.stage == 0, grid.stage == stages - 1
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
        optimizer.step()
        optimizer.zero_grad()
        trained.step_ended()
        if last:
            loss = torch.stack(losses).sum()
            if grid.replicas > 1:
                dist.all_reduce(loss, group=grid.column)
            trained.loss = float(loss)
    return trained


def _share(batches: Batches, step: int, indices: range) -> tuple[Tensor, Tensor]:
    """One row's microbatches of a step, one after the other: tokens and targets int64 [sequences, T]."""
    pairs = [batches.microbatch(step, index) for index in indices]
    tokens, targets = (torch.cat([torch.from_numpy(array) for array in arrays]) for arrays in zip(*pairs, strict=True))
    return tokens.long(), targets.long()


def _average(module: nn.Module, grid: _Grid) -> None:
    """Add the gradients of a stage's replicas in one flat all-reduce, as DDP would with one bucket."""
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
    squared = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]).square()
    dist.all_reduce(squared, group=grid.row)
    nn.utils.clip_grads_with_norm_(module.parameters(), norm_max, squared.sqrt())


def _split(spec: JobSpec) -> tuple[int, ...]:
    assert spec.pipeline.split != "auto", "the caller resolves the spec"
    return spec.pipeline.split


if __name__ == "__main__":
    main()
