"""How much memory a stage needs: an estimate from the job spec alone, meant to be a little too high.

    on the device
        weights      4 bytes x (staleness + 1); with bfloat16_parameters 2 x (staleness + 1), and 4 with the optimizer
        optimizer    0, 4 or 8 bytes, and 4 for the mean that it takes; with exact products of Muon also 24 for each
                     element of the largest matrix. On the host with training.optimizer_on = "host"
        sums         8 if reproducible, else 4, x steps that may be open
        gradients    4 (as backward gives them; 2 with bfloat16_parameters)
        graphs       what backward needs of each microbatch in flight here
    in the memory of the host
        averaging    a copy of the sums as they arrive, and the clipped mean; if it is compressed also the part as it is
                     sent, and what was left out of it before and now
        inputs       boundary tensors that wait here; a device takes them ahead where it has room
        outputs      boundary tensors, held until their step commits
        outer        12 with outer steps: outer weights, momentum, and the newest mean proposal, for late islands
        log          8: the averaged gradients of the two newest commits, for peers that join

Where the device is the host, as on a CPU, both come out of one memory.

What is left also holds what microbatches keep for gradients of weights that come later (`owed_room`), of one microbatch
for each stage at most. The log grows with what is left: a stage server lets it take a share of the memory that it
offers beyond this estimate (LOG_SHARE in stage_server/ports.py), since more records only save a joiner some transfers.
All but graphs, inputs and outputs are counted per parameter. Graphs were measured: what autograd saves in one decoder
layer is, per token, about 5 D + a (q + 2 kv) + m I elements of 4 bytes (D width, q and kv widths of the attention, I
width of the MLP; a and m per family), with eager attention 2 x heads x T more, with dropout in attention 4 x heads x T.
With bfloat16 autocast it is up to 0.8 of that, and every graph keeps its own copy of the cast weights; with
bfloat16_parameters it is up to 0.73, without copies. tests/unit/swarm/job/test_footprint.py compares the estimate with
measured graphs. MARGIN covers the waste of allocators. What any job loads, 60 to 100 MiB, is not counted, so a stage of
less than 1 GiB may pass its estimate; stages of 2 to 5 GiB took 0.76 to 1.00 of it (docs/benchmarks.md). On one H100
tensors on the device took 0.55 to 0.72 of the estimate for it, and what the allocator kept for them 0.75 to 0.83.

Decision: docs/decisions/017.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from swarm.job.families import FAMILIES
from swarm.job.islands import island_spec
from swarm.job.memory_split import ModelCosts
from swarm.job.optimizers import FACTS
from swarm.job.partition import (
    BOUNDARY_BYTES,
    balanced_split,
    flops_per_token,
    layer_widths,
    microbatch_tokens,
    with_places,
)
from swarm.job.shapes import place_shapes
from swarm.job.spec import LOWERED, JobSpec
from swarm.text import counted, size
from swarm.types import Memory

MARGIN = 1.1
HOST_STEP_S = 2.9e-9  # of AdamW for one parameter on one core, measured; a host with more cores takes less
SHARES = {"float32": 1.0, "bfloat16": 0.8, LOWERED: 0.75}
# Saved elements per score, where attention drops (fused kernels do not, on every device), and per element of D.
ATTENTION_DROPOUT = 4.0
HIDDEN_DROPOUT = 3.0
NARROWED = 2.0  # saved elements per element of D where the hidden state is normed and becomes narrow
OWED_SHARE = 0.8  # of a graph: what a microbatch keeps for gradients of weights that come later


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one stage, by purpose."""

    weights: int
    optimizer: int
    mean: int
    sums: int
    gradients: int
    graphs: int
    inputs: int
    averaging: int
    outputs: int
    outer: int
    log: int
    steps_on_host: bool = False  # optimizer and masters lie in the host's memory
    masters: int = 0  # of `weights`

    @property
    def total_bytes(self) -> int:
        """What a stage takes where the device is the host."""
        on_device = self.weights + self.optimizer + self.mean + self.sums + self.gradients + self.graphs
        return math.ceil(MARGIN * (on_device + self.inputs + self.averaging + self.outputs + self.outer + self.log))

    @property
    def memory(self) -> Memory:
        """What a stage takes of a device, and of its host's memory."""
        on_device = self.weights + self.sums + self.gradients + self.graphs
        on_device += -self.masters if self.steps_on_host else self.optimizer + self.mean
        device_bytes = math.ceil(MARGIN * on_device)
        return Memory(device_bytes, self.total_bytes - device_bytes)


def stage_footprint(spec: JobSpec, layers: int, stage: int, stages: int, *, replicas: int = 1) -> Footprint:
    """The memory of one of `replicas` replicas of stage number `stage` of `stages`, with `layers` decoder layers."""
    return StageSizes(spec).footprint(layers, stage, stages, replicas)


class StageSizes:
    """What a stage of a job takes, for any cut; what all stages have in common is worked out once.

    `spec` needs a filled model.config and a microbatch size; its own split is ignored.
    """

    def __init__(self, spec: JobSpec) -> None:
        config, family, widths = spec.model.config, FAMILIES[spec.model.family], layer_widths(spec)
        width, vocabulary, sizes = int(config["hidden_size"]), int(config["vocab_size"]), widths.sizes
        self._spec, self._tokens, self._vocabulary = spec, microbatch_tokens(spec), vocabulary
        self._inner, self._matrices, self._head_matrix = sizes["i"], widths.matrices, vocabulary * width
        self._layer = widths.matrices + 8 * width + 2 * sizes["i"]
        positions: int = config["max_position_embeddings"] if family.learns_positions else 0
        self._embedding, self._head = (vocabulary + positions) * width, (vocabulary + 2) * width
        self._ends = [sum(map(math.prod, shapes.values())) for shapes in place_shapes(spec)]
        self._group = spec.layer_group if spec.places else 0
        # Elements that autograd keeps of a token.
        saved = 5 * width + family.saved_attention * (sizes["q"] + 2 * sizes["k"]) + family.saved_inner * sizes["i"]
        scores = config["num_attention_heads"] * spec.data.sequence_length
        if any(config.get(key) for key in ("attention_dropout", "attn_pdrop")):
            saved += ATTENTION_DROPOUT * scores
        elif family.attention == "eager":
            saved += 2 * scores
        if any(config.get(key) for key in ("hidden_dropout", "resid_pdrop", "embd_pdrop")):
            saved += HIDDEN_DROPOUT * width
        self._saved = saved
        capped = config.get("final_logit_softcapping") is not None
        self._saved_by_head = (1 + capped) * vocabulary + 4 * width
        # Anchor saves its input alone: with bfloat16_parameters as 2 bytes, of the 3 that SHARES counts.
        alone = 2 / 3 if spec.model.dtype == LOWERED else 1.0
        normed = alone if spec.model.narrow.by_token else NARROWED
        self._saved_by_ends = normed * width + 2 * spec.boundary_width, spec.boundary_width

    def footprint(self, layers: int, stage: int, stages: int, replicas: int = 1, flying: int = 0) -> Footprint:
        """The memory of one of `replicas` replicas of a stage; `flying`: in the place of pipeline.max_in_flight."""
        spec, first, last = self._spec, stage == 0, stage == stages - 1
        parameters = self.parameters(layers, first=first, last=last)
        training, staleness = spec.training, spec.pipeline.staleness
        open_steps = 1 + staleness
        sum_bytes = 8 if training.reproducible else 4
        lowered = spec.model.dtype == LOWERED
        leftovers = 12 * open_steps if spec.averaging.compression != "none" else 0
        momentum = 4 if training.optimizer == "sgd" and training.momentum else 0
        window = math.ceil(training.microbatches * open_steps / replicas)
        limit = flying or spec.pipeline.max_in_flight
        in_flight = min(window, 2 * stages if limit == "auto" else math.ceil(limit / replicas))
        outputs = (not first) + (not last)
        boundary = self._tokens * spec.boundary_width
        held = window * outputs * BOUNDARY_BYTES[spec.pipeline.compression]
        # The last stage goes backward right after forward; before it, all that is in flight may be on its way back.
        graphs = 1 if last else in_flight
        whole = self.graph_bytes(layers, last=last)
        kept = whole + graphs * boundary * 4 if spec.model.recompute else graphs * whole
        # While a computation runs it also needs the gradients of the widest tensors.
        widest = max(self._vocabulary if last else 0, self._inner)
        return Footprint(
            weights=(4 + 2 * (1 + staleness) if lowered else 4 * (1 + staleness)) * parameters,
            optimizer=(FACTS[training.optimizer].state_bytes + momentum) * parameters,
            mean=4 * parameters,
            sums=sum_bytes * open_steps * parameters,
            gradients=(2 if lowered else 4) * parameters,
            graphs=kept + 3 * 4 * self._tokens * widest,
            inputs=in_flight * outputs * 4 * boundary,
            averaging=(sum_bytes + 4 + leftovers) * parameters,
            outputs=math.ceil(held * boundary),
            outer=12 * parameters if spec.has_outer_steps else 0,
            log=2 * 4 * parameters,
            steps_on_host=training.optimizer_on == "host",
            masters=4 * parameters if lowered else 0,
        )

    def parameters_of(self, split: Sequence[int]) -> list[int]:
        """Parameters of each stage of a cut."""
        last = len(split) - 1
        return [self.parameters(n, first=stage == 0, last=stage == last) for stage, n in enumerate(split)]

    def parameters(self, layers: int, *, first: bool, last: bool) -> int:
        """Parameters of a stage, biases and norms rounded up."""
        counts = self._narrow_ends(layers, first=first, last=last)
        ends = sum(count * size for count, size in zip(counts, self._ends, strict=True))
        return layers * self._layer + first * self._embedding + last * self._head + ends

    def _narrow_ends(self, layers: int, *, first: bool, last: bool) -> tuple[int, int]:
        """How many narrow places begin in a stage, and how many end in it."""
        groups = layers // self._group if self._group else 0
        return max(0, groups - last), max(0, groups - first)

    def graph_bytes(self, layers: int, *, last: bool) -> int:
        """Bytes that autograd keeps of one microbatch between forward and backward."""
        tokens, dtype = self._tokens, self._spec.model.dtype
        outs, ins = self._narrow_ends(layers, first=False, last=last)
        narrow = outs * self._saved_by_ends[0] + ins * self._saved_by_ends[1]
        elements = tokens * (layers * self._saved + narrow + last * self._saved_by_head)
        weights = layers * self._matrices + last * self._head_matrix
        cast_weights = 2 * weights if dtype == "bfloat16" else 0
        lowered_logits = 2 * tokens * self._vocabulary if last and dtype != "float32" else 0
        return math.ceil(4 * SHARES[dtype] * elements) + cast_weights + lowered_logits


def stage_needs(spec: JobSpec, split: Sequence[int]) -> list[Memory]:
    """What a stage takes if it has one replica, for each stage of a cut; `spec` is a resolved job's."""
    sizes = StageSizes(island_spec(spec))
    return [sizes.footprint(layers, stage, len(split)).memory for stage, layers in enumerate(split)]


def model_costs(spec: JobSpec, *, fewest: bool = False) -> ModelCosts:
    """The costs of the model of a resolved spec in one island, for any cut; the spec's own split is ignored.

    Its narrow places may be open: then each number of stages has those that it asks for. With `fewest` each replica has
    one microbatch in flight for each stage.
    """
    spec = island_spec(spec)
    layer, head = flops_per_token(spec)

    @cache
    def sizes(stages: int) -> StageSizes:
        return StageSizes(with_places(spec, stages))

    def stage_memory(layers: int, stage: int, stages: int, replicas: int) -> Memory:
        flying = fewest_in_flight(stages, stages * replicas) if fewest else 0
        return sizes(stages).footprint(layers, stage, stages, replicas, flying).memory

    narrow = spec.model.narrow.kind != "none"
    return ModelCosts(
        spec.layers,
        layer,
        head,
        stage_memory,
        bare_embedding=not (spec.tied or narrow),
        bare_head=not narrow,
        group=lambda stages: with_places(spec, stages).layer_group,
    )


def fewest_in_flight(stages: int, peers: int) -> int:
    """As few microbatches as keep each stage of each pipeline at work, where `peers` peers share the stages."""
    return min(4096, stages * max(1, peers // stages))


def memory_text(spec: JobSpec) -> str:
    """How much memory the stages of a resolved job take, for people."""
    sequences = spec.training.microbatch_sequences
    assert sequences != "auto", "resolve the spec first"
    most = _largest(spec, spec.split)
    return (
        f"stages take up to {size(most.total_bytes)} of memory (beside a GPU: {most}), with microbatches of "
        f"{counted(sequences, 'sequence')}"
    )


def memory_by_stages(spec: JobSpec) -> dict[int, Memory]:
    """What the largest stage takes, cut into 1, 2, 4 and more stages; `spec` is a resolved job's."""
    counts = [1 << power for power in range(spec.stages_max.bit_length())]
    return {count: _largest(spec, balanced_split(spec, count)) for count in counts}


def _largest(spec: JobSpec, split: Sequence[int]) -> Memory:
    return max(stage_needs(spec, split), key=lambda need: need.total_bytes)


def host_step_s(spec: JobSpec) -> float:
    """Seconds that the largest stage's optimizer takes of a step on one core of a host; 0 if it runs on the device."""
    split = spec.split
    if spec.training.optimizer_on != "host":
        return 0.0
    return HOST_STEP_S * max(StageSizes(spec).parameters_of(split))


def flight_room(spec: JobSpec, stage: int, offer: Memory) -> int:
    """How many microbatches in flight the memory of a replica holds; at least the estimated ones.

    A device is to have room for their inputs too, which come ahead, and for what is owed. `spec` is a resolved job's.
    """
    spec = island_spec(spec)
    split = spec.split
    least, most = 2 * len(split), spec.training.microbatches * (1 + spec.pipeline.staleness)

    owed = owed_room(spec, split, stage, offer)

    def fits(count: int) -> bool:
        needed = stage_footprint(spec.having("pipeline", max_in_flight=count), split[stage], stage, len(split))
        ahead = needed.inputs if offer.host_bytes else 0
        return offer.holds(_with_owed(spec, split, stage, needed, owed, ahead))

    if not offer.device_bytes:
        return max(least, most)
    return max(least, bisect_left(range(1, most + 1), True, key=lambda count: not fits(count)))


def owed_room(spec: JobSpec, split: Sequence[int], stage: int, offer: Memory) -> int:
    """How many microbatches may owe a replica the gradients of their weights: one for each stage, if memory holds them.

    `spec` is the island's. The first stage, whose dx nobody waits for, and compiled layers owe none.
    """
    if stage == 0 or spec.model.compile:
        return 0
    needed = stage_footprint(spec, split[stage], stage, len(split))
    rooms = range(1, len(split) + 1)
    return bisect_left(rooms, True, key=lambda count: not offer.holds(_with_owed(spec, split, stage, needed, count)))


def _with_owed(spec: JobSpec, split: Sequence[int], stage: int, needed: Footprint, owed: int, ahead: int = 0) -> Memory:
    """`needed`, with inputs that come `ahead`, and what is kept of microbatches that owe gradients of weights.

    The last stage also keeps the gradient of its head: the head's product is not put off.
    """
    head = spec.model.config["vocab_size"] * spec.model.config["hidden_size"] if stage == len(split) - 1 else 0
    graph = StageSizes(spec).graph_bytes(split[stage], last=False)
    kept = OWED_SHARE * graph + (2 if spec.model.dtype == LOWERED else 4) * head
    return Memory(needed.memory.device_bytes + ahead + math.ceil(MARGIN * owed * kept), needed.memory.host_bytes)
