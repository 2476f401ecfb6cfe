"""Compiled decoder layers (`model.compile`): torch.compile around each, done before a stage takes work.

Compiling takes minutes, and no microbatch may wait for it: its deadline would pass, and its seconds would stand for the
replica's pace. So a stage first computes zeros, forward and backward, before it takes work. The function that comes
of it serves all layers of a kind and both versions of the weights; evaluation, without a graph, has one of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from swarm.job.spec import JobSpec
from swarm.model.stage import Stage
from swarm.types import Microbatch

_BACKEND: str | Callable[..., object] = "inductor"
_FUNCTIONS_MAX = 3  # of one layer: with a graph, with one for an input that needs no gradient, without a graph
_NO_MICROBATCH = Microbatch(-1, -1, -1)


def compile_layers(stages: Sequence[Stage], spec: JobSpec) -> str:
    """Compile the layers of all stages of this process, and forget what was compiled before.

    Gives "", or why it cannot be done here; the stages then compute as they did. Call it on the compute thread.
    """
    # The compiler is loaded by jobs that ask for it, not by every stage server.
    from torch._dynamo import config, reset  # noqa: PLC0415
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # noqa: PLC0415

    reset()  # another job's shapes
    modules = [buffer.module for stage in stages for buffer in stage.weights.buffers]
    for module in modules:
        module.calls = [torch.compile(layer, backend=_BACKEND, dynamic=False) for layer in module.layers()]
    # Layers that differ in a number, such as GPT-2's divisor of scores, are compiled one by one. By itself torch would
    # leave those after the eighth uncompiled.
    limit = max(config.recompile_limit, _FUNCTIONS_MAX * sum(len(module.calls) for module in modules))
    unlimited = config.patch(
        recompile_limit=limit,
        accumulated_recompile_limit=max(config.accumulated_recompile_limit, limit),
        fail_on_recompile_limit_hit=True,
    )
    try:
        with unlimited, warnings.catch_warnings():
            # The compiler looks at `grad` of all that it is given, boundary tensors between layers included.
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
            for stage in stages:
                _compute_zeros(stage, spec)
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        for module in modules:
            module.calls = module.layers()
        return " ".join([*filter(None, str(error).splitlines())][:2]) or type(error).__name__
    return ""


def _compute_zeros(stage: Stage, spec: JobSpec) -> None:
    """One microbatch of zeros, there and back, and one as in an evaluation; nothing is kept of them."""
    x: Tensor = torch.zeros(stage.boundary_shape())
    ids = torch.zeros(x.shape[:2], dtype=torch.int32)
    stage.forward(_NO_MICROBATCH, stage.version, portion=0, x=x, tokens=ids, targets=ids)
    stage.backward(_NO_MICROBATCH, torch.zeros_like(x), accumulate=False)
    if spec.training.eval_every_steps:
        stage.evaluate(stage.version, x=x, tokens=ids, targets=ids)
