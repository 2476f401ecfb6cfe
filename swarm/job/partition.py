"""Where the model is cut: every "auto" of a job becomes a number, once, at submit.

    stage:      0            1                   S-1
            embedding
            layers       layers     ...      layers
                                             norm, head, loss

A stage's cost is counted in multiply-adds per token. The embedding costs nothing (it is a look-up), the head costs
vocabulary x width, so the last stage gets fewer layers when the vocabulary is large. No torch here: the client and the
scheduler resolve specs too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from swarm.errors import InvalidConfig
from swarm.job.families import DEFAULT, FAMILIES
from swarm.job.islands import island_spec, outer_text, resolved_outer
from swarm.job.model_config import filled_config
from swarm.job.optimizers import FACTS
from swarm.job.overlap import UNMEASURED, FleetSpeed, Overlap, late_microbatches
from swarm.job.spec import JobSpec, parse_job
from swarm.limits import STAGE_LAYERS_MAX, STAGES_MAX
from swarm.text import counted
from swarm.types import TIED_UNIT, UnitName

END_OF_TEXT = 256  # token id of the byte tokenizer's end of text

# "auto" microbatches: at least this many per step, so that a pipeline has work for its stages whatever their number
# (the size must not depend on the number of stages: another shape gives other bits), of at most this many tokens.
AUTO_MICROBATCHES = 16
AUTO_MICROBATCH_TOKENS = 8192
# What a Route may carry as token ids and targets of 4 bytes each (swarm.rpc refuses longer messages).
MICROBATCH_BYTES_MAX = 4 << 20
# Of an element of a boundary tensor, by pipeline.compression; with "auto" at most.
BOUNDARY_BYTES = {"auto": 4.0, "none": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.02}


def resolve(
    spec: JobSpec,
    *,
    vocabulary_size: int,
    stages_if_auto: int,
    end_of_text: int = END_OF_TEXT,
    peers: int = 0,
    speed: FleetSpeed = UNMEASURED,
) -> JobSpec:
    """The spec with every "auto" but pipeline.max_in_flight replaced and the model's config filled and checked.

    `vocabulary_size` and `end_of_text` (-1: unknown) are the tokenizer's; `peers` is how many stage servers are at
    hand, and `speed` what was measured of them. Resolving a resolved spec changes nothing.
    Raises InvalidConfig if the config has an unknown field, or one that contradicts another, the data or the tokenizer.
    """
    spec = _with_family(spec)
    values = spec.model_dump()
    values["model"]["config"] = filled_config(spec, vocabulary_size, end_of_text)
    if spec.training.microbatch_sequences == "auto":
        values["training"]["microbatch_sequences"] = auto_microbatch(
            spec.training.global_batch_sequences // spec.island_count, spec.data.sequence_length
        )
    if spec.model.recompute == "auto":
        values["model"]["recompute"] = False
    if spec.training.optimizer_on == "auto":
        values["training"]["optimizer_on"] = "device"
    values["islands"]["count"] = spec.island_count
    values["outer"] = resolved_outer(spec)
    whole = parse_job(values)
    filled = island_spec(whole)
    if spec.pipeline.split != "auto":
        split = spec.pipeline.split
    else:
        stages = spec.pipeline.stages
        split = balanced_split(filled, min(stages_if_auto, spec.layers, STAGES_MAX) if stages == "auto" else stages)
    if max(split) > STAGE_LAYERS_MAX:
        raise InvalidConfig(
            f"a stage of {max(split)} layers has more than {STAGE_LAYERS_MAX}", hint="raise pipeline.stages"
        )
    values["pipeline"] |= {"split": split, "stages": len(split)}
    if spec.pipeline.overlap == "auto":
        # Islands do without: what late microbatches gain and cost there was not weighed (docs/islands.md).
        chosen = Overlap(0) if spec.has_outer_steps else auto_overlap(filled, split, peers, speed)
        values["pipeline"]["overlap"] = chosen.microbatches
    elif isinstance(spec.pipeline.overlap, float):
        each = whole.training.microbatches // whole.island_count
        values["pipeline"]["overlap"] = floor(spec.pipeline.overlap * each + 0.5)
    if spec.pipeline.sync_steps == "auto":
        values["pipeline"]["sync_steps"] = spec.training.warmup_steps
    resolved = parse_job(values)
    most = MICROBATCH_BYTES_MAX // (4 if len(split) > 1 else 8)
    if microbatch_tokens(resolved) > most:
        size = resolved.training.microbatch_sequences
        raise InvalidConfig(
            f"a microbatch of {size} sequences "
            f"of {counted(resolved.data.sequence_length, 'token')} is more than {most} tokens",
            hint="lower training.microbatch_sequences or data.sequence_length",
        )
    microbatches = island_spec(resolved).training.microbatches
    if island_spec(resolved).overlap > microbatches:
        raise InvalidConfig(
            f"pipeline.overlap = {resolved.overlap} is more than the {counted(microbatches, 'microbatch')} of a step",
            hint='lower pipeline.overlap, or set it to "auto"',
        )
    return resolved


def _with_family(spec: JobSpec) -> JobSpec:
    """The spec with its family named; a model without an id starts from random weights."""
    model = spec.model
    if model.id:
        if model.family == "auto":
            raise InvalidConfig(f'model.id = "{model.id}" was not looked up: its config.json decides the family')
        return spec
    family = DEFAULT if model.family == "auto" else model.family
    return spec.model_copy(update={"model": model.model_copy(update={"family": family, "init": "random"})})


def balanced_split(spec: JobSpec, stages: int) -> tuple[int, ...]:
    """Layers per stage, at least one each, so that the costliest stage costs as little as possible.

    All layers cost the same, so giving each in turn to the stage that would stay cheapest is optimal. `spec` needs a
    filled model.config. Ties go to the earlier stage.
    """
    layer, head = flops_per_token(spec)
    split = [1] * stages
    costs = [(2 * layer + (head if stage == stages - 1 else 0), stage) for stage in range(stages)]  # with one more
    heapq.heapify(costs)
    for _ in range(spec.layers - stages):
        cost, stage = costs[0]
        split[stage] += 1
        heapq.heapreplace(costs, (cost + layer, stage))
    return tuple(split)


def flops_per_token(spec: JobSpec) -> tuple[int, int]:
    """Multiply-adds per token of a decoder layer and of the head, forward; a sliding window counts as a full one."""
    config, widths = spec.model.config, layer_widths(spec)
    scores = widths.queries * spec.data.sequence_length  # twice, over half of the positions (causal)
    return widths.matrices + scores, config["hidden_size"] * config["vocab_size"]


def stage_flops(spec: JobSpec, split: Sequence[int]) -> list[int]:
    """Multiply-adds per token of each stage of a cut, forward."""
    layer, head = flops_per_token(spec)
    return [layers * layer + (head if stage == len(split) - 1 else 0) for stage, layers in enumerate(split)]


def microbatch_tokens(spec: JobSpec) -> int:
    """Tokens of a microbatch; `spec` needs its size."""
    size = spec.training.microbatch_sequences
    assert size != "auto", "resolve the spec first"
    return size * spec.data.sequence_length


@dataclass(frozen=True, slots=True)
class LayerWidths:
    """Sizes of one decoder layer: elements of its matrices, and the widths of its results per token."""

    matrices: int
    queries: int
    attention: int  # queries, keys and values
    inner: int  # of the MLP


def layer_widths(spec: JobSpec) -> LayerWidths:
    """The sizes of the model's decoder layers; `spec` needs a filled model.config."""
    config = spec.model.config
    width, heads = config["hidden_size"], config["num_attention_heads"]
    family = FAMILIES[spec.model.family]
    # A config.json says null where the library derives a field.
    head_width = config.get("head_dim") or family.head_dim or width // heads
    pairs = config.get("num_key_value_heads") or heads
    inner = config.get("n_inner") or config.get("intermediate_size") or 4 * width
    return LayerWidths(
        matrices=2 * width * head_width * (heads + pairs) + family.mlp_matrices * width * inner,
        queries=heads * head_width,
        attention=head_width * (heads + 2 * pairs),
        inner=inner,
    )


def auto_microbatch(global_batch_sequences: int, sequence_length: int) -> int:
    """The largest divisor of the global batch that keeps microbatches many and small enough; at least 1."""
    largest = min(global_batch_sequences // AUTO_MICROBATCHES, AUTO_MICROBATCH_TOKENS // sequence_length, 4096)
    return max((size for size in range(1, largest + 1) if global_batch_sequences % size == 0), default=1)


def auto_overlap(spec: JobSpec, split: Sequence[int], peers: int, speed: FleetSpeed) -> Overlap:
    """The number of microbatches of a step that should use weights one step old, with this cut and these stage servers.

    `spec` needs a microbatch size and a filled model.config. None for an optimizer that bears no delay.
    """
    training, stages = spec.training, len(split)
    if not FACTS[training.optimizer].bears_delay or (training.optimizer == "adamw" and not training.lookahead):
        return Overlap(0)
    boundary = microbatch_tokens(spec) * spec.model.config["hidden_size"]
    return late_microbatches(
        stages,
        max(spec.limits.min_replicas, peers // stages),
        training.microbatches,
        speed.travel_s(boundary * BOUNDARY_BYTES[spec.pipeline.compression]),
        speed.compute_s(microbatch_tokens(spec) * max(stage_flops(spec, split))),
        speed.receipt_s,
    )


def shape_text(spec: JobSpec) -> str:
    """The chosen shape of a resolved job and its reason, in one line for people."""
    split, microbatches = spec.pipeline.split, spec.training.microbatches
    assert split != "auto", "resolve the spec first"
    shape = f"{counted(len(split), 'stage')} of {' + '.join(map(str, split))} layers"
    if exchanges := outer_text(spec):
        shape += f"; {exchanges}"
    if not spec.overlap:
        return f"{shape}; steps do not overlap"
    first = f"; the first {spec.sync_steps} steps do not overlap" if spec.sync_steps > 1 else ""
    first = "; the first step does not overlap" if spec.sync_steps == 1 else first
    return (
        f"{shape}; {spec.late_microbatches} of {counted(microbatches, 'microbatch')} overlap the step before, "
        f"to keep the pipeline busy while it is averaged{first}"
    )


def recut_text(before: JobSpec, wanted: JobSpec, after: JobSpec) -> str:
    """How a job goes on that is cut otherwise, for people; `wanted` is `after` unresolved. Empty if nothing changes."""
    if shape_text(before) == shape_text(after):
        return ""
    kept = before.overlap == after.overlap != 0 and wanted.pipeline.overlap != "auto"
    hint = ", as with the cut before; --set pipeline.overlap=auto chooses anew" if kept else ""
    return f"; {shape_text(after)}{hint}"


def unit_names(stages: int, tied: bool) -> dict[UnitName, tuple[int, ...]]:
    """The units that are averaged, with the stages whose replicas are members; tied embedding and head are one unit."""
    units: dict[UnitName, tuple[int, ...]] = {UnitName(f"stage-{stage}"): (stage,) for stage in range(stages)}
    if tied:
        units[TIED_UNIT] = (0,) if stages == 1 else (0, stages - 1)
    return units
