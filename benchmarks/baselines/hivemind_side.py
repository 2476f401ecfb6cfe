"""The processes of hivemind's side of `benchmarks.baselines.hivemind_servers`; they run in an environment of their own.

    python -m benchmarks.baselines.hivemind_side server SPEC.json STAGE THREADS [ADDRESS ...]
    python -m benchmarks.baselines.hivemind_side trainer SPEC.json TOKENS TOKEN_DTYPE THREADS IN_FLIGHT ADDRESS ...

A server holds one stage of the job as an expert, says its addresses as a line of JSON, and ends with its stdin. The
trainer says "ready", then trains all steps for each line on its stdin, and answers with a line of JSON: when each step
ended, and its loss. It sends each microbatch through both experts and back; so many are under way at a time.

The last expert computes the loss, so that no logits travel. A hivemind server steps its optimizer after every backward;
here it steps after the last microbatch of a step, which the trainer waits for.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.moe import ModuleBackend, Server
from hivemind.moe.server import get_experts
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from torch import Tensor, nn

from swarm.data.batches import Batches, TokenData
from swarm.job.spec import JobSpec, spec_from_json
from swarm.model.families import build

HANDLERS = 4  # for each expert, as hivemind recommends
HOST = "/ip4/127.0.0.1/tcp/0"


class _Stage(nn.Module):
    """A stage of the job; the last one gives the summed loss of each sequence."""

    def __init__(self, spec: JobSpec, stage: int) -> None:
        super().__init__()
        self.module = build(spec, stage, torch.device("cpu"))

    def forward(self, x: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        y = self.module(x)
        if targets_BT is None:
            return y
        losses = nn.functional.cross_entropy(y.float().flatten(0, 1), targets_BT.flatten(), reduction="none")
        return losses.view(targets_BT.shape).sum(dim=1)


class _OncePerStep(torch.optim.AdamW):
    """AdamW that steps after the gradients of all microbatches."""

    def __init__(self, module: nn.Module, spec: JobSpec) -> None:
        training = spec.training
        settings = {"betas": training.betas, "eps": training.eps, "weight_decay": training.weight_decay}
        super().__init__(module.parameters(), lr=training.learning_rate, **settings)
        self._microbatches = training.microbatches
        self._came = 0

    def step(self, closure: Any = None) -> None:
        self._came += 1
        if self._came % self._microbatches == 0:
            super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._came % self._microbatches == 0:
            super().zero_grad(set_to_none)


def _serve(spec: JobSpec, stage: int, threads: int, known: list[str]) -> None:
    torch.set_num_threads(threads)
    module = _Stage(spec, stage)
    length, width = spec.data.sequence_length, spec.model.config["hidden_size"]
    tokens = BatchTensorDescriptor(length, dtype=torch.int64)
    hidden = BatchTensorDescriptor(length, width, dtype=torch.float32)
    backend = ModuleBackend(
        name=f"stage.{stage}",
        module=module,
        optimizer=_OncePerStep(module, spec),
        args_schema=(tokens,) if stage == 0 else (hidden, tokens),
        # One microbatch at a time: requests that are computed together would be one backward, and one step of AdamW.
        max_batch_size=spec.training.microbatch_sequences,
    )
    dht = hivemind.DHT(start=True, host_maddrs=[HOST], initial_peers=known)
    server = Server(dht, {f"stage.{stage}": backend}, num_connection_handlers=HANDLERS, device="cpu", start=True)
    print(json.dumps([str(address) for address in dht.get_visible_maddrs()]), flush=True)
    sys.stdin.read()
    server.shutdown()


def _train(spec: JobSpec, batches: Batches, in_flight: int, known: list[str]) -> None:
    dht = hivemind.DHT(start=True, client_mode=True, initial_peers=known)
    stages = [f"stage.{stage}" for stage in range(len(spec.pipeline.split))]
    while None in (experts := get_experts(dht, stages)):
        time.sleep(0.2)
    tokens_per_step = batches.tokens_of(0)

    def there_and_back(step: int, index: int) -> float:
        tokens, targets = (torch.from_numpy(array).long() for array in batches.microbatch(step, index))
        x = experts[0](tokens)
        for expert in experts[1:-1]:
            x = expert(x)
        loss = experts[-1](x, targets).sum() / tokens_per_step
        loss.backward()
        return float(loss.detach())

    print("ready", flush=True)
    with ThreadPoolExecutor(in_flight) as threads:
        for _ in sys.stdin:
            times_unix_s, losses = [], []
            for step in range(spec.training.steps):
                indices = range(spec.training.microbatches)
                losses.append(sum(threads.map(there_and_back, [step] * len(indices), indices)))
                times_unix_s.append(time.time())
            print(json.dumps({"times_unix_s": times_unix_s, "losses": losses}), flush=True)
    dht.shutdown()


def main() -> None:
    role, spec_path, *rest = sys.argv[1:]
    spec = spec_from_json(Path(spec_path).read_text())
    if role == "server":
        stage, threads, *known = rest
        _serve(spec, int(stage), int(threads), known)
        return
    tokens, token_dtype, threads, in_flight, *known = rest
    torch.set_num_threads(int(threads))
    data = TokenData.open([Path(tokens)], token_dtype)
    batches = Batches(data, spec.training, spec.data.sequence_length, spec.data.shuffle, spec.training.seed)
    _train(spec, batches, int(in_flight), known)


if __name__ == "__main__":
    main()
