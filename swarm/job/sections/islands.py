"""The sections [islands], [averaging] and [outer] of a job file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from swarm.job.sections.base import Section
from swarm.limits import ISLANDS_MAX, LAYERS_MAX

if TYPE_CHECKING:
    from swarm.job.spec import JobSpec

Auto: TypeAlias = Literal["auto"]

EXCHANGES_MAX = 200_000  # of a job: they are counted one by one
# [outer] fragments, overlap_steps and mixing of a job that is not cut into fragments, before and after it is resolved.
_WHOLE_MODEL_AT_ONCE = (("auto", "auto", "auto"), (1, 0, 0.0))


class IslandsSection(Section):
    """How many complete pipelines train the job, each by itself between two exchanges ([outer])."""

    count: Auto | Annotated[int, Field(ge=1, le=ISLANDS_MAX)] = "auto"  # one for each site of the swarm; else 1
    min: Annotated[int, Field(ge=1, le=ISLANDS_MAX)] = 1  # with fewer at work the job stalls
    shares: Literal["equal", "speed"] = "equal"  # of a step's batch (swarm/job/shares.py)


class AveragingSection(Section):
    """How replicas of a stage agree on one gradient, and islands on one model."""

    # allreduce: one island, every step; the others: an outer step now and then (swarm/job/outer.py).
    mode: Literal["allreduce", "diloco", "streaming", "async_dn"] = "allreduce"

    # How the sums of replicas become one gradient; centered_clip: those that stray are cut (swarm/model/robust.py).
    aggregate: Literal["mean", "centered_clip"] = "mean"
    # Of gradients between replicas; what is left out is added to the next step's.
    compression: Literal["none", "bfloat16", "int8"] = "none"
    timeout_s: Annotated[float, Field(ge=1, le=3600)] = 60.0


class OuterSection(Section):
    """The exchange between islands; "auto" depends on averaging.mode (swarm/job/islands.py)."""

    every_steps: Auto | Annotated[int, Field(ge=1, le=10**6)] = "auto"  # inner steps between two exchanges
    learning_rate: Auto | Annotated[float, Field(gt=0, le=10)] = "auto"
    momentum: Auto | Annotated[float, Field(ge=0, lt=1)] = "auto"
    fragments: Auto | Annotated[int, Field(ge=1, le=LAYERS_MAX)] = "auto"  # streaming only, as the next two
    overlap_steps: Auto | Annotated[int, Field(ge=0, le=1000)] = "auto"  # inner steps while a fragment is exchanged
    mixing: Auto | Annotated[float, Field(ge=0, lt=1)] = "auto"  # the share of its weights that an island keeps
    compression: Auto | Literal["none", "bfloat16", "int8", "fp4"] = "auto"  # of what islands propose
    buffer: Auto | Annotated[int, Field(ge=1, le=4096)] = "auto"  # async_dn only: proposals between two momentum steps


def check_islands(spec: JobSpec) -> None:
    """ValueError if the three sections do not fit each other, or the batch."""
    mode, outer, count = spec.averaging.mode, spec.outer, spec.island_count
    if spec.islands.count != "auto" and spec.islands.min > count:
        raise ValueError(f"islands.min = {spec.islands.min} is more than islands.count = {count}")
    if not spec.has_outer_steps:
        if count > 1:
            raise ValueError(f'islands.count = {count} needs averaging.mode = "diloco" or "streaming"')
        if spec.islands.shares != "equal":
            raise ValueError(f'islands.shares = "speed" needs averaging.mode = "diloco", not "{mode}"')
        if outer != OuterSection():
            raise ValueError(f'[outer] does nothing with averaging.mode = "{mode}": remove it, or set another mode')
        return
    batch, size = spec.training.global_batch_sequences, spec.training.microbatch_sequences
    if batch % count or (size != "auto" and batch // count % size):
        to = "" if batch % count else f" into shares of whole microbatches of {size}"
        raise ValueError(f"islands.count = {count} does not divide training.global_batch_sequences = {batch}{to}")
    if mode != "streaming" and (outer.fragments, outer.overlap_steps, outer.mixing) not in _WHOLE_MODEL_AT_ONCE:
        raise ValueError(
            f'averaging.mode = "{mode}" merges the whole model at once: remove outer.fragments, outer.overlap_steps '
            'and outer.mixing, or set averaging.mode = "streaming"'
        )
    if mode != "diloco" and spec.islands.shares != "equal":
        raise ValueError(f'islands.shares = "speed" needs averaging.mode = "diloco", not "{mode}"')
    if mode != "async_dn" and outer.buffer not in ("auto", 1):
        raise ValueError(f'outer.buffer does nothing with averaging.mode = "{mode}": remove it')
    every, fragments, overlap = outer.every_steps, outer.fragments, outer.overlap_steps
    if "auto" not in (every, fragments, overlap) and overlap * fragments >= every:  # type: ignore[operator]  # numbers
        raise ValueError(
            f"outer.overlap_steps = {overlap} is too long for {fragments} fragments in {every} steps: "
            "lower it, lower outer.fragments or raise outer.every_steps"
        )
    if "auto" not in (every, fragments) and (exchanges := spec.training.steps // every * fragments) > EXCHANGES_MAX:  # type: ignore[operator]
        raise ValueError(f"a job makes {EXCHANGES_MAX} exchanges at most, not {exchanges}: raise outer.every_steps")
