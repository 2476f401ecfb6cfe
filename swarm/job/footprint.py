"""How much memory a stage needs: an estimate from the job spec alone, meant to be a little too high.

    weights      4 bytes x (staleness + 1); with bfloat16_parameters 4 + 2 x (staleness + 1)
    optimizer    0, 4 or 8 bytes; with exact products of Muon also 24 for each element of the largest matrix
    sums         8 if reproducible, else 4, x steps that may be open
    gradients    4 (as backward gives them; 2 with bfloat16_parameters)
                 + averaging: a copy of the sums as they arrive, the mean and its clipped copy; if it is compressed also
                 the part as it is sent, and what was left out of it before and now
    graphs       what backward needs of each microbatch in flight here
    boundaries   outputs held until their step commits, and inputs that wait
    outer        8 with outer steps: outer weights and momentum, in the memory of the host
    log          8: the averaged gradients of the two newest commits, for peers that join

The log grows with what is left: a stage server lets it take a share of the memory that it offers beyond this estimate
(LOG_SHARE in stage_server/ports.py), since more records only save a joiner some transfers. All but graphs and
boundaries are counted per parameter. Graphs were measured: what autograd saves in one decoder layer is, per token,
about 5 D + a (q + 2 kv) + m I elements of 4 bytes (D width, q and kv widths of the attention, I width of the MLP; a and
m per family), with eager attention 2 x heads x T more, with dropout in attention 4 x heads x T. With bfloat16 autocast
it is up to 0.8 of that, and every graph keeps its own copy of the cast weights; with bfloat16_parameters it is up to
0.73, without copies. tests/unit/swarm/job/test_footprint.py compares the estimate with measured graphs. MARGIN covers
the waste of allocators. For a process that kept four graphs of six layers (D 384) and then took a step, the estimate
was 1.44 times the measured peak in float32 and 1.21 times in bfloat16.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from swarm.job.families import FAMILIES
from swarm.job.islands import island_spec
from swarm.job.partition import BOUNDARY_BYTES, balanced_split, layer_widths, microbatch_tokens
from swarm.job.spec import LOWERED, JobSpec
from swarm.text import counted, size

MARGIN = 1.1
SHARES = {"float32": 1.0, "bfloat16": 0.8, LOWERED: 0.75}
EXACT_MUON_BYTES = 24  # for each element of the matrix that steps
STATE_BYTES = {"adamw": 8, "nadamw": 8, "lamb": 8, "muon": 8, "sgd": 0}
# Saved elements per score, where attention drops (fused kernels do not, on every device), and per element of D.
ATTENTION_DROPOUT = 4.0
HIDDEN_DROPOUT = 3.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one stage, by purpose."""

    weights: int
    optimizer: int
    sums: int
    gradients: int
    graphs: int
    boundaries: int
    outer: int
    log: int

    @property
    def total_bytes(self) -> int:
        parts: tuple[int, ...] = astuple(self)
        return math.ceil(MARGIN * sum(parts))


def stage_footprint(spec: JobSpec, layers: int, stage: int, stages: int, *, replicas: int = 1) -> Footprint:
    """The memory of one of `replicas` replicas of stage number `stage` of `stages`, with `layers` decoder layers.

    `spec` needs a filled model.config and a microbatch size; its own split is ignored.
    """
    first, last = stage == 0, stage == stages - 1
    parameters = stage_parameters(spec, layers, first=first, last=last)
    training, staleness = spec.training, spec.pipeline.staleness
    open_steps = 1 + staleness
    sum_bytes = 8 if training.reproducible else 4
    lowered = spec.model.dtype == LOWERED
    leftovers = 12 * open_steps if spec.averaging.compression != "none" else 0
    momentum = 4 if training.optimizer == "sgd" and training.momentum else 0
    window = math.ceil(training.microbatches * open_steps / replicas)
    limit = spec.pipeline.max_in_flight
    in_flight = min(window, 2 * stages if limit == "auto" else math.ceil(limit / replicas))
    outputs = (not first) + (not last)
    boundary = microbatch_tokens(spec) * spec.model.config["hidden_size"]
    held = window * outputs * BOUNDARY_BYTES[spec.pipeline.compression] + in_flight * outputs * 4
    # The last stage goes backward right after forward; before it, all that is in flight may be on its way back.
    graphs = 1 if last else in_flight
    whole = graph_bytes(spec, layers, last=last)
    kept = whole + graphs * boundary * 4 if spec.model.recompute else graphs * whole
    # Exact products of Muon take this much while a matrix steps (swarm/model/exact_muon.py).
    matrix = spec.model.config["hidden_size"] * max(layer_widths(spec).inner, spec.model.config["hidden_size"])
    stepping = EXACT_MUON_BYTES * matrix if training.muon_products == "exact" else 0
    # While a computation runs it also needs the gradients of the widest tensors.
    widest: int = max(spec.model.config["vocab_size"] if last else 0, layer_widths(spec).inner)
    return Footprint(
        weights=(4 + 2 * (1 + staleness) if lowered else 4 * (1 + staleness)) * parameters,
        optimizer=(STATE_BYTES[training.optimizer] + momentum) * parameters + stepping,
        sums=sum_bytes * open_steps * parameters,
        gradients=((2 if lowered else 4) + sum_bytes + 4 + 4 + leftovers) * parameters,
        graphs=kept + 3 * 4 * microbatch_tokens(spec) * widest,
        boundaries=math.ceil(held * boundary),
        outer={"allreduce": 0, "async_dn": 12}.get(spec.averaging.mode, 8) * parameters,
        log=2 * 4 * parameters,
    )


def lighter(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """What would make the stages of a resolved job smaller, and is not set yet, best first.

    Each setting comes with the spec that has it and all before it.
    """
    ways: tuple[tuple[str, str, object], ...] = (
        ("training", "microbatch_sequences", 1),
        ("model", "recompute", True),
        ("pipeline", "overlap", 0),
        ("model", "dtype", LOWERED),
        ("pipeline", "max_in_flight", 1),
    )
    for section, key, value in ways:
        before = getattr(spec, section)
        if getattr(before, key) != value:
            spec = spec.model_copy(update={section: before.model_copy(update={key: value})})
            yield f"{section}.{key} = {json.dumps(value)}", spec


def memory_text(spec: JobSpec) -> str:
    """How much memory the stages of a resolved job take, for people."""
    split, sequences = spec.pipeline.split, spec.training.microbatch_sequences
    assert split != "auto", "resolve the spec first"
    assert sequences != "auto", "resolve the spec first"
    most = size(max(_needs(spec, split)))
    return f"stages take up to {most} of memory, with microbatches of {counted(sequences, 'sequence')}"


def memory_by_stages(spec: JobSpec) -> str:
    """How much memory the largest stage takes, cut into 1, 2, 4 and more stages; `spec` is a resolved job's."""
    counts = [1 << power for power in range(spec.layers.bit_length())]
    needs = [f"{size(max(_needs(spec, balanced_split(spec, count))))} with {count}" for count in counts]
    return f"the largest stage takes about {needs[0]} stage" + "".join(f", {need}" for need in needs[1:])


def _needs(spec: JobSpec, split: Sequence[int]) -> list[int]:
    """Bytes that a stage takes if it has one replica."""
    spec = island_spec(spec)
    return [stage_footprint(spec, layers, stage, len(split)).total_bytes for stage, layers in enumerate(split)]


def flight_room(spec: JobSpec, stage: int, memory_bytes: int) -> int:
    """How many microbatches in flight the memory of a replica holds (0 bytes: not known); at least the estimated ones.

    `spec` is a resolved job's.
    """
    spec = island_spec(spec)
    split = spec.pipeline.split
    assert split != "auto", "resolve the spec first"
    least, most = 2 * len(split), spec.training.microbatches * (1 + spec.pipeline.staleness)

    def fits(count: int) -> bool:
        pipeline = spec.pipeline.model_copy(update={"max_in_flight": count})
        limited = spec.model_copy(update={"pipeline": pipeline})
        return stage_footprint(limited, split[stage], stage, len(split)).total_bytes <= memory_bytes

    if not memory_bytes:
        return max(least, most)
    return max(least, bisect_left(range(1, most + 1), True, key=lambda count: not fits(count)))


def stage_parameters(spec: JobSpec, layers: int, *, first: bool, last: bool) -> int:
    """Parameters of a stage, biases and norms rounded up."""
    config, widths = spec.model.config, layer_widths(spec)
    width: int = config["hidden_size"]
    layer = widths.matrices + 8 * width + 2 * widths.inner
    vocabulary: int = config["vocab_size"]
    positions: int = config["max_position_embeddings"] if FAMILIES[spec.model.family].learns_positions else 0
    embedding = (vocabulary + positions) * width
    head = (vocabulary + 2) * width
    return layers * layer + first * embedding + last * head


def graph_bytes(spec: JobSpec, layers: int, *, last: bool) -> int:
    """Bytes that autograd keeps of one microbatch between forward and backward."""
    config, widths = spec.model.config, layer_widths(spec)
    width: int = config["hidden_size"]
    vocabulary: int = config["vocab_size"]
    tokens = microbatch_tokens(spec)
    family = FAMILIES[spec.model.family]
    saved = 5 * width + family.saved_attention * widths.attention + family.saved_inner * widths.inner
    scores = config["num_attention_heads"] * spec.data.sequence_length
    if any(config.get(key) for key in ("attention_dropout", "attn_pdrop")):
        saved += ATTENTION_DROPOUT * scores
    elif family.attention == "eager":
        saved += 2 * scores
    if any(config.get(key) for key in ("hidden_dropout", "resid_pdrop", "embd_pdrop")):
        saved += HIDDEN_DROPOUT * width
    capped = config.get("final_logit_softcapping") is not None
    head = ((1 + capped) * vocabulary + 4 * width) if last else 0
    elements = tokens * (layers * saved + head)
    dtype = spec.model.dtype
    weights = layers * widths.matrices + (vocabulary * width if last else 0)
    cast_weights = 2 * weights if dtype == "bfloat16" else 0
    lowered_logits = 2 * tokens * vocabulary if last and dtype != "float32" else 0
    return math.ceil(4 * SHARES[dtype] * elements) + cast_weights + lowered_logits
