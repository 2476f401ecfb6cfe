"""Which peer serves which stage when a job starts.

Every idle peer is used. A pin is obeyed; the others go, fastest first, to the stage that has the fewest replicas so far
(then the least speed, then the lowest number), so the stages differ by at most one replica wherever pins allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.types import Decision, PeerId

ANY_STAGE = -1


@dataclass(frozen=True, slots=True)
class Candidate:
    """An idle peer; `pinned_stage` -1 = any; `speed` is relative to the other candidates, any unit."""

    peer: PeerId
    pinned_stage: int = ANY_STAGE
    speed: float = 1.0


def stages_for(peers: int) -> int:
    """How many stages a job that leaves it open gets: two replicas each, at least one stage."""
    return max(1, peers // 2)


def place(candidates: Sequence[Candidate], stages: int, min_replicas: int) -> Decision[dict[PeerId, int]]:
    """Spread the peers evenly over the stages; the plan gives each placed peer its stage.

    A peer pinned to a stage that the job does not have stays idle. No plan if some stage would have fewer than
    `min_replicas`; the reason then names the stages and how many replicas each still needs.
    """
    assert min(stages, min_replicas) >= 1
    members: list[list[Candidate]] = [[] for _ in range(stages)]
    useless = [one for one in candidates if one.pinned_stage >= stages]
    for one in candidates:
        if 0 <= one.pinned_stage < stages:
            members[one.pinned_stage].append(one)
    for one in sorted(candidates, key=lambda candidate: (-candidate.speed, candidate.peer)):
        if one.pinned_stage == ANY_STAGE:
            members[_neediest(members)].append(one)

    aside = "".join(f"; {one.peer} is pinned to stage {one.pinned_stage}, which this job lacks" for one in useless)
    lacking = [(stage, min_replicas - len(pool)) for stage, pool in enumerate(members) if len(pool) < min_replicas]
    if lacking:
        needs = ", ".join(f"stage {stage} needs {_replicas(count)} more" for stage, count in lacking)
        idle = f"{len(candidates)} idle, {stages * min_replicas} needed"
        return Decision(None, f"{needs} ({idle}){aside}")
    plan = {one.peer: stage for stage, pool in enumerate(members) for one in pool}
    sizes = ", ".join(f"stage {stage}: {len(pool)}" for stage, pool in enumerate(members))
    return Decision(dict(sorted(plan.items())), f"{_replicas(len(plan))} over {stages} stages ({sizes}){aside}")


def _neediest(members: list[list[Candidate]]) -> int:
    return min(range(len(members)), key=lambda stage: (len(members[stage]), sum(one.speed for one in members[stage])))


def _replicas(count: int) -> str:
    return f"{count} replica" + ("" if count == 1 else "s")
