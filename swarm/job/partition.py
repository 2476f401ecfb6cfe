"""Where the model is cut, and what its stages compute.

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
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.job.families import FAMILIES
from swarm.job.islands import outer_text
from swarm.job.spec import JobSpec
from swarm.text import counted
from swarm.types import TIED_UNIT, UnitName

PLACES_SHOWN = 8  # in a line for people
# Of an element of a boundary tensor, by pipeline.compression; with "auto" at most.
BOUNDARY_BYTES = {"auto": 4.0, "none": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.02}


def balanced_split(spec: JobSpec, stages: int) -> tuple[int, ...]:
    """Layers per stage, at least one each, so that the costliest stage costs as little as possible.

    All layers cost the same, so giving each in turn to the stage that would stay cheapest is optimal. With narrow
    places the layers between two of them stay together. `spec` needs a filled model.config. Ties go to the earlier
    stage.
    """
    layer, head = flops_per_token(spec)
    group = spec.layer_group
    layer *= group
    split = [1] * stages
    costs = [(2 * layer + (head if stage == stages - 1 else 0), stage) for stage in range(stages)]  # with one more
    heapq.heapify(costs)
    for _ in range(spec.layers // group - stages):
        cost, stage = costs[0]
        split[stage] += 1
        heapq.heapreplace(costs, (cost + layer, stage))
    return tuple(groups * group for groups in split)


def with_places(spec: JobSpec, stages: int) -> JobSpec:
    """The spec with as few narrow places as allow so many stages, and the cut that it names, if it leaves them open."""
    narrow, layers, split = spec.model.narrow, spec.layers, spec.pipeline.split
    if narrow.kind == "none" or narrow.every != "auto":
        return spec
    together = math.gcd(layers, *(() if split == "auto" else split))
    every = max(every for every in range(1, layers) if together % every == 0 and stages * every <= layers)
    return spec.having("model", narrow=narrow.model_copy(update={"every": every}))


def flops_per_token(spec: JobSpec) -> tuple[int, int]:
    """Multiply-adds per token of a decoder layer and of the head, forward; a sliding window counts as a full one.

    Narrow places are not counted: one costs less than a tenth of a layer.
    """
    config, widths = spec.model.config, layer_widths(spec)
    scores = widths.sizes["q"] * spec.data.sequence_length  # twice, over half of the positions (causal)
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
    """Sizes of one decoder layer: those that its matrices name (`families.Matrix`), and of a head."""

    sizes: Mapping[str, int]
    head: int
    matrices: int  # elements of them all


def layer_widths(spec: JobSpec) -> LayerWidths:
    """The sizes of the model's decoder layers; `spec` needs a filled model.config."""
    config, family = spec.model.config, FAMILIES[spec.model.family]
    width, heads = config["hidden_size"], config["num_attention_heads"]
    # A config.json says null where the library derives a field.
    head = config.get("head_dim") or family.head_dim or width // heads
    pairs = config.get("num_key_value_heads") or heads
    inner = config.get("n_inner") or config.get("intermediate_size") or 4 * width
    sizes = {"d": width, "q": heads * head, "k": pairs * head, "a": 3 * width, "i": inner}
    return LayerWidths(sizes, head, sum(sizes[matrix.out] * sizes[matrix.into] for matrix in family.matrices))


def shape_text(spec: JobSpec) -> str:
    """The chosen shape of a resolved job and its reason, in one line for people."""
    split, microbatches = spec.split, spec.training.microbatches
    shape = f"{counted(len(split), 'stage')} of {' + '.join(map(str, split))} layers{_places_text(spec)}"
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


def _places_text(spec: JobSpec) -> str:
    """Where the model is narrow, and what that saves at a cut, for people; empty if nowhere."""
    if not spec.places:
        return ""
    narrow, places = spec.model.narrow, [str(place) for place in spec.places]
    shown = places if len(places) <= PLACES_SHOWN else [*places[: PLACES_SHOWN - 2], "…", places[-1]]
    element = BOUNDARY_BYTES[spec.pipeline.compression]
    thin, wide = (round(width * element) for width in (spec.boundary_width, spec.model.config["hidden_size"]))
    return (
        f"; {narrow.kind} to 1/{narrow.factor} behind layer{'s' * (len(places) > 1)} {', '.join(shown)}: "
        f"{thin:,} bytes per token and way instead of {wide:,}"
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
