"""The weights that a microbatch uses, the learning rate along its schedule, and the factor that clips its gradient.

Pure functions, shared by the scheduler and the one-process reference, so that both get the same bits on one machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, Protocol

# Keeps the clip factor finite when a gradient is zero; the same number as in torch.nn.utils.clip_grad_norm_.
CLIP_EPSILON = 1e-6
NOT_FINITE_HINT = "look for NaN in the weights that the job starts from, or lower training.learning_rate"


class ScheduleSettings(Protocol):
    """The learning-rate keys of a job file's [training], as values that a brain reads without the checking library."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def schedule(self) -> Literal["constant", "linear", "cosine"]: ...
    @property
    def steps(self) -> int: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def min_lr_ratio(self) -> float: ...


def version_of(step: int, index: int, *, overlap: int, sync_steps: int) -> int:
    """The version of the weights that microbatch `index` of step `step` is computed with.

    The first `overlap` microbatches of a step use the version before the step's own: they need not wait for the commit
    of the step before, and fill the pipeline while that step drains and is averaged. The first `sync_steps` steps have
    none of these.
    """
    late = index < overlap and step >= sync_steps
    return max(0, step - 1) if late else step


def learning_rate(training: ScheduleSettings, rate_step: int) -> float:
    """The learning rate at place `rate_step` of the schedule (from 0); `Course` says which step uses which place.

    Rises linearly over `warmup_steps` and reaches the full rate in the last of them; then stays, or falls along a line
    or half a cosine towards `min_lr_ratio` of it, which place `steps` would have.
    """
    peak = training.learning_rate
    if rate_step < training.warmup_steps:
        return peak * (rate_step + 1) / training.warmup_steps
    span = max(1, training.steps - training.warmup_steps)
    progress = min(1.0, (rate_step - training.warmup_steps) / span)
    floor = training.min_lr_ratio
    match training.schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1.0 - (1.0 - floor) * progress)
        case "cosine":
            return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def clip(squared_norms: Iterable[float], grad_clip_norm: float) -> tuple[float, float]:
    """The global gradient norm and the factor that brings it to at most `grad_clip_norm` (0 = never clip).

    `squared_norms` has one value per parameter tensor of the whole model, tied parameters once. They are added exactly
    (`math.fsum`), so their order and the cut into stages cannot change a bit. The norm is not finite if a part is not,
    or if their sum leaves float64.
    """
    try:
        norm = math.sqrt(math.fsum(squared_norms))
    except OverflowError:
        norm = math.inf
    if grad_clip_norm == 0.0:
        return norm, 1.0
    return norm, min(1.0, grad_clip_norm / (norm + CLIP_EPSILON))


def not_finite_fault(step: int, in_a_row: int, *, steps: int, most: int) -> str:
    """Why a job fails with `step`, the last of `in_a_row` whose gradients were not finite; empty if it goes on.

    It fails after `most` of them, and when all its steps were such: no weight ever changed.
    """
    if in_a_row == steps:
        of = "the only step" if steps == 1 else f"all {steps} steps"
        return f"the gradients of {of} were not finite: no weight was ever changed"
    if in_a_row >= most:
        return f"the gradients of {in_a_row} steps in a row were not finite (step {step} was the last of them)"
    return ""


def overflow_fault(stage: int, direction: str) -> str:
    """What pipeline.compression did to an output of a stage, and what to do: "forward" is y, "backward" dx."""
    output = "output" if direction == "forward" else "gradient for the stage before"
    told = f'stage {stage}\'s {output} has values beyond 65504, which pipeline.compression = "float16" cannot carry'
    return f"{told}: use bfloat16"


def evaluation_due(version: int, every_steps: int, steps: int) -> bool:
    """Whether weights `version` (steps committed) are evaluated: every `every_steps` (0 = never) and after the last."""
    return every_steps > 0 and version > 0 and (version % every_steps == 0 or version == steps)


def perplexity(loss: float) -> float:
    """exp of a loss in nats per token: among how many equally likely tokens the model hesitates."""
    return math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.nan
