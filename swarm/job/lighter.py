"""What a job does without where memory is short, in the order of what that costs.

    smaller microbatches ──▶ no overlap of steps ──▶ fewer in flight ──▶ recompute ──▶ optimizer on the host

Only what the job file leaves at "auto" changes, and the first that fits is taken. Smaller microbatches cost little, one
for each stage in flight still keeps the pipeline full, recomputing costs a third of the computation, and an optimizer
on the host holds up each step. Where all fits, nothing changes. Decision: docs/decisions/017.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from swarm.job.spec import LOWERED, JobSpec
from swarm.text import counted


@dataclass(frozen=True, slots=True)
class Choice:
    """A job with less "auto" than before; with `fewest`, each replica has one microbatch in flight for each stage."""

    spec: JobSpec
    fewest: bool = False

    def in_flight(self, stages: int, peers: int) -> JobSpec:
        """The spec with its microbatches in flight, where `peers` peers share the stages."""
        if not self.fewest:
            return self.spec
        return _with(self.spec, "pipeline", max_in_flight=min(4096, stages * max(1, peers // stages)))


def choices(spec: JobSpec, plain: JobSpec) -> Iterator[Choice]:
    """What may be tried in turn, lighter and lighter; `plain` is `spec` with every "auto" resolved.

    The first is what `plain` does.
    """
    size, batch = plain.training.microbatch_sequences, plain.training.global_batch_sequences // plain.island_count
    assert size != "auto", "resolve it first"
    sizes = [size]
    while spec.training.microbatch_sequences == "auto" and sizes[-1] > 1:
        sizes.append(max(one for one in range(1, sizes[-1] // 2 + 1) if batch % one == 0))
    place, recompute, overlap = spec.training.optimizer_on, spec.model.recompute, spec.pipeline.overlap
    for where, again, fewest, late, each in product(
        ("device", "host") if place == "auto" else (place,),
        (False, True) if recompute == "auto" else (recompute,),
        (False, True) if spec.pipeline.max_in_flight == "auto" else (False,),
        ("auto", 0) if overlap == "auto" else (overlap,),
        sizes,
    ):
        less = _with(spec, "training", microbatch_sequences=each, optimizer_on=where)
        less = _with(_with(less, "model", recompute=again), "pipeline", overlap=late)
        yield Choice(less, fewest)


def choice_text(spec: JobSpec, plain: JobSpec) -> str:
    """What `spec` does otherwise than `plain` to save memory, for people; empty if nothing. Both are resolved."""
    said = []
    size = spec.training.microbatch_sequences
    if size != plain.training.microbatch_sequences:
        assert size != "auto", "resolve it first"
        said.append(f"microbatches of {counted(size, 'sequence')}")
    if plain.overlap and not spec.overlap:
        said.append("steps do not overlap")
    flight = spec.pipeline.max_in_flight
    if flight != plain.pipeline.max_in_flight:
        assert flight != "auto", "the plain one was first"
        said.append(f"at most {counted(flight, 'microbatch')} in flight")
    if spec.model.recompute != plain.model.recompute:
        said.append("forward is computed again for backward")
    if spec.training.optimizer_on != plain.training.optimizer_on:
        said.append("the optimizer runs on the hosts")
    return f"to fit the memory on offer: {', '.join(said)}" if said else ""


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
            spec = _with(spec, section, **{key: value})
            yield f"{section}.{key} = {json.dumps(value)}", spec


def _with(spec: JobSpec, section: str, **values: object) -> JobSpec:
    return spec.model_copy(update={section: getattr(spec, section).model_copy(update=values)})
