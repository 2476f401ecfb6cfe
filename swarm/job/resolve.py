"""Every "auto" of a job file becomes a value here, once: `resolve` gives the spec that is stored with the job.

    model.family                     the family of the model that model.id names, else the default
    islands.count                    one for each site that can serve an island alone (placement.py), or 2 with gaia
    training.microbatch_sequences    a divisor of the batch that keeps microbatches many and small
    pipeline.stages, split           as many as are fastest by what was measured (scheduler/planning/stages.py), else
                                     two peers for a stage; cut so that all stages cost the same (partition.py),
                                     or so that the memory on offer holds them (memory_split.py)
    model.narrow.every               as few narrow places as that number of stages allows
    pipeline.overlap                 as many late microbatches as the pipeline would idle for (overlap.py)
    pipeline.sync_steps              the warm-up
    pipeline.recut                   at a stall, if stages and split are "auto" and there are no islands
    model.recompute, training.optimizer_on
                                     off and on the device, unless memory is short
    islands.shares                   by speed, but equal where the same bits are asked for
    outer.overlap_steps              as many steps as an exchange takes, where that was measured (overlap.py)
    outer.*                          by averaging.mode

A client resolves with the tokenizer alone, for its checks; the scheduler with all that is known of its stage servers.
Three stay open, because they follow what is measured while the job runs: pipeline.max_in_flight unless memory is short,
pipeline.compression and data.format, which is of each file.

Where memory is short a job does without what costs least, in this order:

    smaller microbatches ──▶ no overlap of steps ──▶ fewer in flight ──▶ recompute ──▶ optimizer on the host

Only what the job file leaves at "auto" changes, and the first that fits is taken. Smaller microbatches cost little, one
for each stage in flight still keeps the pipeline full, recomputing costs a third of the computation, and an optimizer
on the host holds up each step.

Decisions: docs/decisions/017, 105, 140.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil, floor
from typing import Any, TypeAlias

from swarm.errors import InvalidConfig, SwarmError
from swarm.job.families import DEFAULT
from swarm.job.footprint import StageSizes, fewest_in_flight, model_costs
from swarm.job.islands import island_spec, most_islands
from swarm.job.memory_split import ModelCosts, check_possible, fit, is_possible, needs, stage_counts
from swarm.job.model_config import filled_config
from swarm.job.optimizers import FACTS
from swarm.job.overlap import UNMEASURED, FleetSpeed, Overlap, hidden_steps, late_microbatches
from swarm.job.partition import BOUNDARY_BYTES, balanced_split, microbatch_tokens, stage_flops, with_places
from swarm.job.placement import Candidate, place, sites_for_islands, stages_for
from swarm.job.spec import LOWERED, JobSpec, parse_job
from swarm.limits import ISLANDS_IN_SWARM_MAX, STAGE_LAYERS_MAX, STAGES_MAX
from swarm.text import counted
from swarm.types import Memory, PeerId

END_OF_TEXT = 256  # token id of the byte tokenizer's end of text

# "auto" microbatches: at least this many per step, so that a pipeline has work for its stages whatever their number
# (the size must not depend on the number of stages: another shape gives other bits), of at most this many tokens.
AUTO_MICROBATCHES = 16
AUTO_MICROBATCH_TOKENS = 8192
# What a Route may carry as token ids and targets of 4 bytes each (swarm.rpc refuses longer messages).
MICROBATCH_BYTES_MAX = 4 << 20
MIXING = 0.5  # where islands train on during an exchange: all that they train meanwhile would be lost with 0
# What "auto" stands for in [outer], by averaging.mode; periods and codes are ours but for streaming's period.
_AUTO: dict[str, dict[str, Any]] = {
    "diloco": {"every_steps": 50, "fragments": 1, "overlap_steps": 0, "mixing": 0.0, "compression": "bfloat16"},
    "streaming": {"every_steps": 100, "overlap_steps": 1, "mixing": MIXING, "compression": "fp4"},
    "gaia": {
        "every_steps": 2, "fragments": 1, "overlap_steps": 1, "mixing": 0.0, "compression": "none", "threshold": 0.01,
    },
}  # fmt: skip
# Learning rate and momentum of the outer step: those that were best, or as good, in runs of 3 to 500 exchanges
# (docs/islands.md), and those of the papers (swarm/job/outer.py), for a job that sets only one of the two.
_MEASURED = {"diloco": (1.0, 0.5), "streaming": (0.7, 0.5), "gaia": (1.0, 0.0)}
_PUBLISHED = {"diloco": (0.7, 0.9), "streaming": (0.4, 0.9), "gaia": (1.0, 0.0)}
PATIENCE, PATIENCE_STEPS = 0.05, 1.5  # of a period, and steps: for how long the least of an exchange is waited for
LAYERS_PER_FRAGMENT = 3  # of streaming, as in its paper
PROPOSAL_BYTES = {"none": 4.0, "bfloat16": 2.0, "int8": 1.02, "fp4": 0.52}  # of a parameter, by outer.compression
Chooser: TypeAlias = Callable[[int], tuple[JobSpec, str]]
# By the number of what is tried, the number of stages, whether for idle peers, with bare ends; None: memory holds none.
_Cuts: TypeAlias = dict[tuple[int, int, bool, bool], tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Basis:
    """What is known where a job is resolved: its tokenizer, and the stage servers, where a scheduler knows some."""

    vocabulary_size: int
    end_of_text: int = END_OF_TEXT  # -1: unknown
    stages: int = 0  # if the job leaves them open; 0: two peers for each
    idle: Sequence[Memory] = ()  # what the peers offer that may serve the job now
    present: Sequence[Memory] = ()  # and all that are here, whatever they do
    lasting: Sequence[Candidate] = ()  # those that stay, with their sites
    speed: FleetSpeed = UNMEASURED


def resolve(spec: JobSpec, basis: Basis) -> JobSpec:
    """The spec with every "auto" replaced but those that follow measurements, and the model's config filled.

    Resolving a resolved spec changes nothing. InvalidConfig if the model's config has an unknown field, or one that
    contradicts another, the data or the tokenizer; OutOfMemory if no peer that is present could hold the smallest
    parts.
    """
    return choose(spec, basis)[0]


def choose(spec: JobSpec, basis: Basis) -> tuple[JobSpec, str]:
    """The resolved spec, and for people what memory and links have changed in it, each behind a "; "."""
    return _chosen(spec, basis, {})


def chooser(spec: JobSpec, basis: Basis) -> Chooser:
    """`choose` for any number of stages; a cut that several numbers try is tried once."""
    assert not spec.has_outer_steps, "the peers that serve an island follow from its stages"
    cuts: _Cuts = {}
    return lambda stages: _chosen(spec, replace(basis, stages=stages), cuts)


def _chosen(spec: JobSpec, basis: Basis, cuts: _Cuts) -> tuple[JobSpec, str]:
    if spec.pipeline.recut == "auto":
        is_open = spec.pipeline.stages == spec.pipeline.split == "auto" and not spec.has_outer_steps
        spec = spec.having("pipeline", recut="stall" if is_open else "off")
    resolved, lighter = _fitted(*_for_sites(spec, basis), cuts)
    links = ""
    if spec.pipeline.overlap == "auto" and not resolved.has_outer_steps:
        links = auto_overlap(resolved, resolved.split, basis).links_text()
    hidden = ""
    known = _exchange_and_step_s(resolved, resolved.split, basis) if spec.outer.overlap_steps == "auto" else None
    if known is not None and resolved.outer.overlap_steps:
        hidden = (
            f"outer.overlap_steps = {resolved.outer.overlap_steps}, since an exchange takes {known[0]:.3g} s and a "
            f"step {known[1]:.3g} s by what was measured, which costs up to 1 % of the loss"
        )
    return resolved, "".join(f"; {text}" for text in (lighter, links, hidden) if text)


def _filled(spec: JobSpec, basis: Basis) -> JobSpec:
    """The spec resolved as if all peers held all that it takes."""
    spec = _with_family(spec)
    values = spec.model_dump()
    values["model"]["config"] = filled_config(spec, basis.vocabulary_size, basis.end_of_text)
    if spec.training.microbatch_sequences == "auto":
        values["training"]["microbatch_sequences"] = auto_microbatch(
            spec.training.global_batch_sequences // spec.island_count, spec.data.sequence_length
        )
    if spec.model.recompute == "auto":
        values["model"]["recompute"] = False
    if spec.training.optimizer_on == "auto":
        values["training"]["optimizer_on"] = "device"
    values["islands"]["count"] = spec.island_count
    if spec.islands.shares == "auto":
        values["islands"]["shares"] = "speed" if _by_speed(spec) else "equal"
    values["outer"] = _outer(spec)
    default = min(basis.stages or stages_for(len(basis.idle)), spec.stages_max, STAGES_MAX)
    stages = default if spec.pipeline.stages == "auto" else spec.pipeline.stages
    whole = with_places(parse_job(values), stages)
    values["model"]["narrow"] = whole.model.narrow.model_dump()
    filled = island_spec(whole)
    split = balanced_split(filled, stages) if spec.pipeline.split == "auto" else spec.pipeline.split
    if max(split) > STAGE_LAYERS_MAX:
        raise InvalidConfig(
            f"a stage of {max(split)} layers has more than {STAGE_LAYERS_MAX}", hint="raise pipeline.stages"
        )
    values["pipeline"] |= {"split": split, "stages": len(split)}
    if spec.outer.overlap_steps == "auto" and (known := _exchange_and_step_s(whole, split, basis)):
        values["outer"] = _outer(spec, hidden_steps(*known, values["outer"]["every_steps"]))
    if spec.pipeline.overlap == "auto":
        # Islands do without: what late microbatches gain and cost there was not weighed (docs/islands.md).
        chosen = Overlap(0) if spec.has_outer_steps else auto_overlap(filled, split, basis)
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
    return spec.having("model", family=family, init="random")


def auto_microbatch(global_batch_sequences: int, sequence_length: int) -> int:
    """The largest divisor of the global batch that keeps microbatches many and small enough; at least 1."""
    largest = min(global_batch_sequences // AUTO_MICROBATCHES, AUTO_MICROBATCH_TOKENS // sequence_length, 4096)
    return max((size for size in range(1, largest + 1) if global_batch_sequences % size == 0), default=1)


def auto_overlap(spec: JobSpec, split: Sequence[int], basis: Basis) -> Overlap:
    """The number of microbatches of a step that should use weights one step old, with this cut and these stage servers.

    `spec` needs a microbatch size and a filled model.config. None for an optimizer that bears no delay.
    """
    training, stages, speed = spec.training, len(split), basis.speed
    if not FACTS[training.optimizer].bears_delay or (training.optimizer == "adamw" and not training.lookahead):
        return Overlap(0)
    boundary = microbatch_tokens(spec) * spec.boundary_width
    return late_microbatches(
        stages,
        max(spec.limits.min_replicas, len(basis.idle) // stages),
        training.microbatches,
        speed.travel_s(boundary * BOUNDARY_BYTES[spec.pipeline.compression]),
        speed.compute_s(microbatch_tokens(spec) * max(stage_flops(spec, split))),
        speed.receipt_s,
    )


def _exchange_and_step_s(spec: JobSpec, split: Sequence[int], basis: Basis) -> tuple[float, float] | None:
    """Seconds that an exchange of a filled spec takes, and a step of an island; None if that was not measured, or if
    nothing may follow from it."""
    outer, speed, mode = spec.outer, basis.speed, spec.averaging.mode
    if mode in ("allreduce", "gaia") or spec.training.reproducible or spec.checkpoint.resume_from:
        return None
    step_s = speed.compute_s(microbatch_tokens(spec) * max(stage_flops(spec, split)))
    if spec.island_count == 1 or not (speed.between_bytes_per_s and step_s):
        return None
    assert outer.fragments != "auto", "it is filled"
    most = max(StageSizes(spec).parameters_of(split))
    sent = most * PROPOSAL_BYTES[outer.compression] * (spec.island_count - 1) / outer.fragments
    replicas = max(spec.limits.min_replicas, len(basis.idle) // (len(split) * spec.island_count))
    steps = spec.training.microbatches / (spec.island_count * replicas)
    return speed.receipt_s + sent / speed.between_bytes_per_s, step_s * steps


def _outer(spec: JobSpec, overlap_steps: int | None = None) -> dict[str, Any]:
    """The values of [outer] with every "auto" replaced; as they are if the job has no outer step.

    `overlap_steps`: that follows from measurements, if there are any.
    """
    values = spec.outer.model_dump()
    if not spec.has_outer_steps:
        return values
    chosen = {"fragments": ceil(spec.layers / LAYERS_PER_FRAGMENT), "threshold": 0.0} | _AUTO[spec.averaging.mode]
    every = chosen["every_steps"] if values["every_steps"] == "auto" else values["every_steps"]
    both = values["learning_rate"] == values["momentum"] == "auto"
    chosen["learning_rate"], chosen["momentum"] = (_MEASURED if both else _PUBLISHED)[spec.averaging.mode]
    room = (every - 1) // (1 if values["fragments"] == "auto" else values["fragments"])
    chosen["patience"] = min(1.0, max(PATIENCE, PATIENCE_STEPS / every)) if _by_speed(spec) else "none"
    chosen["overlap_steps"] = min(chosen["overlap_steps"] if overlap_steps is None else overlap_steps, room)
    overlaps = chosen["overlap_steps"] if values["overlap_steps"] == "auto" else values["overlap_steps"]
    if overlaps and spec.averaging.mode != "gaia":
        chosen["mixing"] = MIXING
    filled = {key: chosen[key] if value == "auto" else value for key, value in values.items()}
    if values["fragments"] == "auto" and filled["overlap_steps"]:  # as many as can be exchanged one after the other
        filled["fragments"] = max(1, min(filled["fragments"], (every - 1) // filled["overlap_steps"]))
    return filled


def _by_speed(spec: JobSpec) -> bool:
    """Whether leases follow speed, as chance may then have a say in the weights."""
    is_free = spec.island_count > 1 and not spec.training.reproducible
    return is_free if spec.islands.shares == "auto" else spec.islands.shares == "speed"


def _for_sites(spec: JobSpec, basis: Basis) -> tuple[JobSpec, Basis]:
    """The spec with an island for each site that can serve one alone, if it leaves that open, and the basis with the
    peers that the cut must suit: of one of these sites, or all."""
    if spec.islands.count != "auto" or not spec.has_outer_steps:
        return spec, basis
    least = max(spec.islands.min, most_islands(spec, 2) if spec.averaging.mode == "gaia" else 1)  # it is for several

    def needs_for(count: int, site: Sequence[Candidate], peers: int) -> tuple[Memory, ...]:
        memory = [peer.offer for peer in site]
        alone = replace(basis, idle=memory, present=memory)
        try:
            resolved, _ = _fitted(_with_islands(spec, max(count, least)), alone, {})
        except SwarmError:
            return ()
        return needs(model_costs(resolved), resolved.split, peers)

    def most(count: int) -> int:
        return most_islands(spec, min(count, ISLANDS_IN_SWARM_MAX))

    found = sites_for_islands(basis.lasting, most, needs_for, spec.limits.min_replicas)
    if found is None:
        return (_with_islands(spec, least) if least > 1 else spec), basis
    count, site = found
    return _with_islands(spec, max(count, least)), replace(basis, idle=[peer.offer for peer in site])


def _with_islands(spec: JobSpec, count: int) -> JobSpec:
    return spec.having("islands", count=count)


def _fitted(spec: JobSpec, basis: Basis, cuts: _Cuts) -> tuple[JobSpec, str]:
    """The spec resolved so that the memory of the idle peers holds it, and for people what it does without for that.

    Where they cannot hold it, it waits for those that work now. `cuts`: known from other `basis.stages`. OutOfMemory.
    """
    plain = _filled(spec, basis)
    if not basis.idle and not basis.present:
        return plain, ""
    fixed, min_replicas = spec.pipeline.stages != "auto", spec.limits.min_replicas
    default = len(plain.split)
    tries = list(choices(spec, plain))

    @cache
    def filled(number: int) -> JobSpec:
        return _filled(tries[number][0], basis) if number else plain

    def opened(whole: JobSpec) -> JobSpec:
        """The spec with the cut and the narrow places as open as in the job file."""
        return whole.having("pipeline", split=spec.pipeline.split).having("model", narrow=spec.model.narrow)

    @cache
    def costs(number: int) -> ModelCosts:
        """The same for any `basis.stages`: whether steps overlap does not follow from it."""
        return model_costs(opened(filled(number)), fewest=tries[number][1])

    def cut(number: int, stages: int, memories: Sequence[Memory], bare_ends: bool) -> tuple[int, ...] | None:
        key = number, stages, memories is basis.idle, bare_ends
        if key not in cuts:
            cuts[key] = fit(costs(number), memories, stages, min_replicas, bare_ends=bare_ends)
        return cuts[key]

    def fitted(number: int, memories: Sequence[Memory], bare_ends: bool) -> JobSpec | None:
        """The spec with a cut that fits the memory of the idle peers."""
        (chosen, fewest), split, most = tries[number], spec.pipeline.split, len(memories) // min_replicas
        if split == "auto":
            counts = [default] if fixed else stage_counts(spec.stages_max + 2 * bare_ends, default, most)
            found = next(filter(None, (cut(number, stages, memories, bare_ends) for stages in counts)), None)
            if found is None:
                return None
            split = found
        elif not _holds(memories, needs(costs(number), split, len(memories)), min_replicas):
            return None
        few = {"max_in_flight": fewest_in_flight(len(split), len(memories))} if fewest else {}
        shaped = chosen.having("pipeline", split=split, stages=len(split), **few)
        return _filled(opened(filled(number)).model_copy(update={"pipeline": shaped.pipeline}), basis)

    fleets = (basis.idle,) if sorted(basis.idle) == sorted(basis.present) else (basis.idle, basis.present)
    may_be_bare = spec.model.narrow.kind == "none"  # no place is narrow beside the embedding or the head
    for memories, bare_ends in product(fleets, (False, True)[: 1 + may_be_bare]):
        for number in range(len(tries)):  # most often the first fits
            if (final := fitted(number, memories, bare_ends)) is not None:
                return final, choice_text(final, plain)
    if spec.pipeline.split != "auto":
        return plain, ""
    possible = [default] if fixed else range(1, min(spec.stages_max + 2 * may_be_bare, STAGES_MAX) + 1)
    least = len(tries) - 1
    ways = [(text, model_costs(opened(after)), possible) for text, after in lighter(filled(least))]
    if fixed and default < spec.stages_max:
        ways.append((f"pipeline.stages = {spec.stages_max}", ways[-1][1] if ways else costs(least), [spec.stages_max]))
    check_possible(costs(least), basis.present, possible, ways)
    return next(
        (filled(number), choice_text(filled(number), plain))
        for number in range(len(tries))
        if is_possible(costs(number), basis.present, possible)
    )


def _holds(offers: Sequence[Memory], takes: Sequence[Memory], min_replicas: int) -> bool:
    """Whether machines with these memories hold these stages."""
    peers = [Candidate(PeerId(str(number)), offer=offer) for number, offer in enumerate(offers)]
    return place(peers, len(takes), min_replicas, takes).plan is not None


def choices(spec: JobSpec, plain: JobSpec) -> Iterator[tuple[JobSpec, bool]]:
    """What may be tried in turn, lighter and lighter; `plain` is `spec` with every "auto" resolved.

    The first is what `plain` does. With the flag only the fewest microbatches are in flight.
    """
    size, batch = plain.training.microbatch_sequences, plain.training.global_batch_sequences // plain.island_count
    assert size != "auto", "resolve it first"
    sizes = [size]
    while spec.training.microbatch_sequences == "auto" and sizes[-1] > 1:
        sizes.append(max(less for less in range(1, sizes[-1] // 2 + 1) if batch % less == 0))
    place, recompute, overlap = spec.training.optimizer_on, spec.model.recompute, spec.pipeline.overlap
    for where, again, fewest, late, each in product(
        ("device", "host") if place == "auto" else (place,),
        (False, True) if recompute == "auto" else (recompute,),
        (False, True) if spec.pipeline.max_in_flight == "auto" else (False,),
        ("auto", 0) if overlap == "auto" else (overlap,),
        sizes,
    ):
        less = spec.having("training", microbatch_sequences=each, optimizer_on=where)
        less = less.having("model", recompute=again).having("pipeline", overlap=late)
        yield less, fewest


def choice_text(spec: JobSpec, plain: JobSpec, why: str = "to fit the memory on offer") -> str:
    """What `spec` does otherwise than `plain` to save memory, for people; empty if nothing. Both are resolved."""
    said = []
    size = spec.training.microbatch_sequences
    if size != plain.training.microbatch_sequences:
        assert size != "auto", "resolve it first"
        said.append(f"microbatches of {counted(size, 'sequence')}")
    if plain.overlap and not spec.overlap:
        said.append("steps do not overlap")
    flight = spec.pipeline.max_in_flight
    if flight != "auto" and flight != plain.pipeline.max_in_flight:
        said.append(f"at most {counted(flight, 'microbatch')} in flight")
    if spec.model.recompute and not plain.model.recompute:
        said.append("forward is computed again for backward")
    if spec.training.optimizer_on == "host" != plain.training.optimizer_on:
        said.append("the optimizer runs on the hosts")
    return f"{why}: {', '.join(said)}" if said else ""


def lighter(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """What would make the stages of a resolved job smaller, and is not set yet, best first.

    Each setting comes with the spec that has it and all before it.
    """
    ways: tuple[tuple[str, str, object], ...] = (
        ("training", "microbatch_sequences", 1),
        ("model", "recompute", True),
        ("pipeline", "overlap", 0),
        ("training", "optimizer_on", "host"),
        ("model", "dtype", LOWERED),
        ("pipeline", "max_in_flight", 1),
    )
    for section, key, value in ways:
        if getattr(getattr(spec, section), key) != value:
            spec = spec.having(section, **{key: value})
            yield f"{section}.{key} = {json.dumps(value)}", spec
