"""How a job is cut that leaves it open: by the bound, for all peers placed as the scheduler places them.

    1, 2, 3 ... stages ──the rules of resolve.py cut──▶ the rule of placement.py places ──▶ bound ──▶ the least step
    the same with smaller microbatches, with forward computed again: more peers may hold a stage

In plays, cuts differ less than in the bound where links limit. So a stage for two peers stays the rule unless another
number is WORTH it, and so do the microbatches of resolve.py unless others are LIGHTER. Not chosen: the search and the
plays of `swarm plan`, because they take seconds, and a submit waits for this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scheduler.planning.bound import CutBound
from scheduler.planning.pool import PeerPool
from scheduler.planning.search import STAGES_TRIED_MAX, TIE, lighter_ways, placed_as_it_starts
from swarm.errors import SwarmError
from swarm.job.resolve import Basis, Chooser, choice_text, choose, chooser
from swarm.job.spec import JobSpec
from swarm.limits import HOPS_MAX

WORTH = 1.6  # times the speed of the rule's number, by the bound
LIGHTER = 1.2  # times the speed of the best number with the microbatches of resolve.py


def cut_of(spec: JobSpec, pool: PeerPool, basis: Basis) -> tuple[JobSpec, str]:
    """The job resolved with the cut whose step is shortest, of equal ones with the fewest stages, and for people what
    memory and links changed of it.

    The rules of resolve.py stay if the job leaves no cut open, or has islands, or their cut is good enough, or none
    fits. OutOfMemory, InvalidConfig.
    """
    if spec.has_outer_steps or not spec.pipeline.stages == spec.pipeline.split == "auto":
        return choose(spec, basis)
    most = min(spec.stages_max, len(pool.peers) // spec.limits.min_replicas, STAGES_TRIED_MAX)
    chosen, choosers = chooser(spec, basis), dict[object, Chooser]()
    plain = {stages: _resolved(spec, chosen, pool, stages) for stages in range(1, most + 1)}
    least_s = min((of.step_s for of in plain.values()), default=math.inf)
    best = _resolved(spec, chosen, pool, basis.stages)
    if least_s * WORTH < best.step_s:
        best = next(of for of in plain.values() if of.step_s <= least_s * (1.0 + TIE))
    most_s, size = best.step_s / LIGHTER, best.spec.training.microbatch_sequences
    for stages, of in plain.items():
        for way in lighter_ways(spec, of.spec) if of.step_s < math.inf else ():
            if spec.training.reproducible and way.training.microbatch_sequences != size:
                continue  # other bits
            key = way.training.microbatch_sequences, way.model.recompute
            chosen = choosers[key] = choosers.get(key) or chooser(way, basis)
            lighter = _resolved(way, chosen, pool, stages, most_s)
            if lighter.step_s < most_s * (1.0 - TIE):
                why = choice_text(lighter.spec, of.spec, "for a shorter step")
                best, most_s = replace(lighter, said=f"; {why}{lighter.said}" if why else lighter.said), lighter.step_s
    return (best.spec, best.said) if best.step_s < math.inf else choose(spec, basis)


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A job that is cut, what changed of it, and the bound of its step, infinite if it cannot be."""

    spec: JobSpec
    said: str
    step_s: float


def _resolved(spec: JobSpec, chosen: Chooser, pool: PeerPool, stages: int, most_s: float = math.inf) -> _Resolved:
    """The job with so many stages, or as many as the rule and memory make it if that is 0; not placed if no placement
    is below `most_s`."""
    try:
        resolved, said = chosen(stages)
    except SwarmError:
        return _Resolved(spec, "", math.inf)
    return _Resolved(resolved, said, _step_s(resolved, pool, stages, most_s))


def _step_s(resolved: JobSpec, pool: PeerPool, asked: int, most_s: float) -> float:
    stages = len(resolved.split)
    if asked not in (0, stages) or resolved.training.microbatches * stages > HOPS_MAX:
        return math.inf  # memory holds no cut into so few, or a step has too many hops
    facts = CutBound(pool, resolved)
    if facts.least_step_s() >= most_s:
        return math.inf
    placed = placed_as_it_starts(pool, facts)
    return math.inf if placed is None else facts.of(placed).step_s
