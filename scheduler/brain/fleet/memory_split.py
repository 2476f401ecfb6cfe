"""Where to cut a model so that the pool's memory holds it, at the least cost of the costliest stage.

    peers, most memory first   | a  b | c  d | e  f |        min_replicas = 2: each stage takes two that are alike
                                slot 0  slot 1  slot 2        a slot holds as much as the smaller of its peers

Every stage gets a slot. First and last stage differ from the others (embedding; head), so all pairs of slots are tried
for them; the other stages are alike and take the slots as they come. Given the slots, layers are handed out one by one
to the stage that would stay cheapest among those that have room, which is optimal as layers are equal.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import cache

from swarm.errors import OutOfMemory
from swarm.job.footprint import stage_footprint
from swarm.job.partition import flops_per_token
from swarm.job.spec import JobSpec
from swarm.types import Decision

KINDS_MAX = 8  # different slots that are tried for first and last stage
STAGES_TRIED_MAX = 64


def needs(spec: JobSpec, split: Sequence[int], peers: int) -> tuple[int, ...]:
    """Bytes that a replica of each stage needs where so many peers share the stages evenly."""
    stages = len(split)
    replicas = max(1, peers // stages)
    return tuple(
        stage_footprint(spec, layers, stage, stages, replicas=replicas).total_bytes
        for stage, layers in enumerate(split)
    )


def fit(spec: JobSpec, memories: Sequence[int], stages: Sequence[int]) -> Decision[tuple[int, ...]]:
    """The cut for peers with so much memory each (0 = not known); the first of the numbers of stages that works.

    `spec` is resolved; its split is not looked at. No plan if none works, with what is lacking as reason.
    """
    known = [size or 1 << 62 for size in memories]
    for count in stages:
        split = _cut(spec, count, sorted(known, reverse=True))
        if split is not None:
            return Decision(split, f"{count} stages fit {len(known)} peers")
    if not known:
        return Decision(None, "no idle peers yet")
    return Decision(None, f"no cut fits the idle peers: the largest has {gibibytes(max(known))}")


def check_possible(spec: JobSpec, memories: Sequence[int], stages: Sequence[int]) -> None:
    """OutOfMemory if not even the smallest piece, one layer with embedding or head, fits the largest of these peers.

    Without peers, or if one does not say what it has, nothing is known to be impossible.
    """
    if not memories or 0 in memories:
        return
    least = min(_smallest(spec, count) for count in stages)
    if least > max(memories):
        raise OutOfMemory(
            f"one decoder layer with embedding or head needs about {gibibytes(least)}, the largest of "
            f"{len(memories)} stage servers offers {gibibytes(max(memories))}",
            hint="lower training.microbatch_sequences or data.sequence_length, set model.recompute = true, or start "
            "stage servers with more memory first",
        )


def stage_counts(spec: JobSpec, default: int, peers: int, *, fixed: bool) -> list[int]:
    """Numbers of stages to try, best first: the one that is asked for, else the default and all above it."""
    if fixed:
        return [default]
    most = min(spec.layers, max(default, peers // spec.limits.min_replicas), default + STAGES_TRIED_MAX)
    return list(range(default, most + 1))


def gibibytes(size_bytes: int) -> str:
    """Bytes for a person."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"


def _smallest(spec: JobSpec, stages: int) -> int:
    if stages == 1:
        return stage_footprint(spec, spec.layers, 0, 1).total_bytes
    return max(stage_footprint(spec, 1, stage, stages).total_bytes for stage in (0, stages - 1))


def _cut(spec: JobSpec, stages: int, memories: Sequence[int]) -> tuple[int, ...] | None:
    """The best cut into so many stages, None if none fits; `memories` from most to least."""
    per_stage = spec.limits.min_replicas
    if len(memories) < stages * per_stage or stages > spec.layers:
        return None
    slots = [memories[(number + 1) * per_stage - 1] for number in range(stages)]
    replicas = len(memories) // stages

    @cache
    def room(stage: int, size_bytes: int) -> int:
        """Layers that fit: the estimate rises with their number."""
        low, high = 0, spec.layers
        while low < high:
            middle = (low + high + 1) // 2
            fits = stage_footprint(spec, middle, stage, stages, replicas=replicas).total_bytes <= size_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    best: tuple[float, tuple[int, ...]] | None = None
    for first, last in _ends(slots):
        sizes = [first]
        if stages > 1:
            rest = list(slots)
            rest.remove(first)
            rest.remove(last)
            sizes = [first, *rest, last]
        rooms = [room(0 if n == 0 else stages - 1 if n == stages - 1 else 1, size) for n, size in enumerate(sizes)]
        found = _hand_out(spec, rooms)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else best[1]


def _ends(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of slots for first and last stage."""
    if len(slots) == 1:
        return [(slots[0], slots[0])]
    kinds = sorted(set(slots), reverse=True)
    if len(kinds) > KINDS_MAX:
        kinds = [kinds[round(number * (len(kinds) - 1) / (KINDS_MAX - 1))] for number in range(KINDS_MAX)]
    return [(a, b) for a in kinds for b in kinds if a != b or slots.count(a) > 1]


def _hand_out(spec: JobSpec, rooms: Sequence[int]) -> tuple[float, tuple[int, ...]] | None:
    """Cost of the costliest stage, and layers per stage, at most `rooms`; None if there is too little room."""
    if min(rooms) < 1 or sum(rooms) < spec.layers:
        return None
    layer, head = flops_per_token(spec)
    split = [1] * len(rooms)
    extra = [head if stage == len(rooms) - 1 else 0 for stage in range(len(rooms))]
    costs = [(2 * layer + extra[stage], stage) for stage in range(len(rooms)) if rooms[stage] > 1]
    heapq.heapify(costs)
    for _ in range(spec.layers - len(rooms)):
        _, stage = heapq.heappop(costs)
        split[stage] += 1
        if split[stage] < rooms[stage]:
            heapq.heappush(costs, ((split[stage] + 1) * layer + extra[stage], stage))
    highest = max((layers * layer + extra[stage] for stage, layers in enumerate(split)), default=math.inf)
    return float(highest), tuple(split)
