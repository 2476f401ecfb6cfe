"""How many stages a job gets that leaves it open: by the bound, for all peers placed as the scheduler places them.

    1, 2, 3 ... stages ──the rules of resolve.py cut──▶ the rule of placement.py places ──▶ bound ──▶ the least step

In plays, numbers of stages differ less than in the bound where links limit. So a stage for two peers stays the rule
unless another number is WORTH it. Not chosen: the search and the plays of `swarm plan`, because they take seconds,
and a submit waits for this.
"""

from __future__ import annotations

import math
from dataclasses import replace

from scheduler.planning.bound import CutBound
from scheduler.planning.pool import PeerPool, candidates
from scheduler.planning.search import STAGES_TRIED_MAX, TIE
from swarm.errors import SwarmError
from swarm.job.placement import place
from swarm.job.resolve import Basis, choose
from swarm.job.spec import JobSpec
from swarm.types import PeerId

WORTH = 1.6  # times the speed of the rule's number, by the bound


def with_stages(spec: JobSpec, pool: PeerPool, basis: Basis) -> Basis:
    """The basis with the number of stages whose step is shortest, of equal ones the least; as it is if the job does not
    leave it open, has islands, or the rule's number is good enough, or no number fits."""
    if spec.has_outer_steps or not spec.pipeline.stages == spec.pipeline.split == "auto":
        return basis
    most = min(spec.stages_max, len(pool.peers) // spec.limits.min_replicas, STAGES_TRIED_MAX)
    steps_s = {stages: _step_s(spec, pool, replace(basis, stages=stages)) for stages in range(1, most + 1)}
    least_s = min(steps_s.values(), default=math.inf)
    if not least_s * WORTH < _step_s(spec, pool, basis):
        return basis
    return replace(basis, stages=next(stages for stages in steps_s if steps_s[stages] <= least_s * (1.0 + TIE)))


def _step_s(spec: JobSpec, pool: PeerPool, basis: Basis) -> float:
    """The bound of a step with `basis.stages` stages, or as many as the rule and memory make it if that is 0; infinite
    if these cannot be."""
    try:
        resolved, _ = choose(spec, basis)
    except SwarmError:
        return math.inf
    stages = len(resolved.split)
    if basis.stages not in (0, stages):  # memory holds no cut into so few
        return math.inf
    facts = CutBound(pool, resolved)
    placed = place(candidates(pool.peers), stages, spec.limits.min_replicas, facts.needs).plan
    if placed is None:
        return math.inf
    members = [[at for at, peer in enumerate(pool.peers) if placed.get(PeerId(peer.name)) == stage]
               for stage in range(stages)]  # fmt: skip
    return facts.of(members).step_s
