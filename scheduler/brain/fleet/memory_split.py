"""Where to cut a model so that the pool's memory holds it, at the least cost of the costliest stage.

    peers, most memory first   | a  b | c  d | e  f |        min_replicas = 2: each stage takes two that are alike
                                slot 0  slot 1  slot 2        a slot holds as much as the smaller of its peers

Every stage gets a slot. The first and the last stage differ from the others (embedding; head), so all pairs of slots
are tried for them; the other stages are alike and take the slots in order. Given the slots, each layer goes to the
stage that would stay cheapest among those with room. This is optimal because layers are equal.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from swarm.errors import OutOfMemory
from swarm.text import counted, size
from swarm.types import Decision

KINDS_MAX = 8  # different slots that are tried for first and last stage
STAGES_TRIED_MAX = 64


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The costs of a model, from which those of the stages of any cut follow."""

    layers: int
    layer_flops: int  # multiply-adds per token, forward
    head_flops: int
    stage_bytes: Callable[[int, int, int, int], int]  # of (layers, stage, stages, replicas); rises with the layers


def needs(model: ModelCosts, split: Sequence[int], peers: int) -> tuple[int, ...]:
    """Bytes that a replica of each stage needs if `peers` peers share the stages evenly."""
    stages = len(split)
    replicas = max(1, peers // stages)
    return tuple(model.stage_bytes(layers, stage, stages, replicas) for stage, layers in enumerate(split))


def fit(
    model: ModelCosts, memories: Sequence[int], stages: Sequence[int], min_replicas: int
) -> Decision[tuple[int, ...]]:
    """The cut for peers with these memories (0 = unknown), into the first number of stages that works.

    If none works there is no plan, but a reason.
    """
    known = [memory or 1 << 62 for memory in memories]
    for count in stages:
        split = _cut(model, count, sorted(known, reverse=True), min_replicas)
        if split is not None:
            return Decision(split, f"cut into {counted(count, 'stage')} for {counted(len(known), 'peer')}")
    if not known:
        return Decision(None, "no idle peers yet")
    return Decision(None, f"no cut fits the idle peers: the largest has {size(max(known))}")


def is_possible(model: ModelCosts, memories: Sequence[int], stages: Sequence[int]) -> bool:
    """Whether the smallest part, one layer with embedding or head, fits the largest peer.

    Without peers, or if one of them does not say how much memory it has, nothing is known to be impossible.
    """
    return not memories or 0 in memories or _least(model, stages) <= max(memories)


def check_possible(
    model: ModelCosts,
    memories: Sequence[int],
    stages: Sequence[int],
    lighter: Iterable[tuple[str, ModelCosts]] = (),
) -> None:
    """Raise OutOfMemory unless the model is_possible.

    `lighter`: settings that make a stage smaller, best first, with the costs after each; the hint names them.
    """
    if not is_possible(model, memories, stages):
        least = _least(model, stages)
        raise OutOfMemory(
            f"one decoder layer with embedding or head needs about {size(least)}, the largest of "
            f"{counted(len(memories), 'stage server')} offers {size(max(memories))}",
            hint=_way_out(least, max(memories), [(setting, _least(costs, stages)) for setting, costs in lighter]),
        )


def _way_out(least: int, largest: int, lighter: Sequence[tuple[str, int]]) -> str:
    """What to do about a model that does not fit: the settings that help, with what is needed after them."""
    needed, useful = least, list[str]()
    for setting, after in lighter:
        if after < needed and needed > largest:
            useful.append(setting)
            needed = after
    settings = " and ".join((", ".join(useful[:-1]), useful[-1])) if useful[1:] else "".join(useful)
    if needed <= largest:
        return f"set {settings}: then it needs {size(needed)}"
    more = f"start a stage server that offers {size(least)} first"
    return (
        f"{more}, or one of {size(needed)} and set {settings}" if useful else f"{more}, or lower data.sequence_length"
    )


def stage_counts(layers: int, default: int, most: int) -> list[int]:
    """The numbers of stages to try, best first: the default, then all above it up to `most`."""
    return list(range(default, min(layers, max(default, most), default + STAGES_TRIED_MAX) + 1))


def _least(model: ModelCosts, stages: Sequence[int]) -> int:
    return min(_smallest(model, count) for count in stages)


def _smallest(model: ModelCosts, stages: int) -> int:
    if stages == 1:
        return model.stage_bytes(model.layers, 0, 1, 1)
    return max(model.stage_bytes(1, stage, stages, 1) for stage in (0, stages - 1))


def _cut(model: ModelCosts, stages: int, memories: Sequence[int], min_replicas: int) -> tuple[int, ...] | None:
    """The best cut into this many stages, None if none fits; `memories` from most to least."""
    if len(memories) < stages * min_replicas or stages > model.layers:
        return None
    slots = [memories[(number + 1) * min_replicas - 1] for number in range(stages)]
    replicas = len(memories) // stages

    @cache
    def room(stage: int, size_bytes: int) -> int:
        """How many layers fit."""
        low, high = 0, model.layers
        while low < high:
            middle = (low + high + 1) // 2
            fits = model.stage_bytes(middle, stage, stages, replicas) <= size_bytes
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
        rooms = [room(0 if n == 0 else stages - 1 if n == stages - 1 else 1, memory) for n, memory in enumerate(sizes)]
        found = _hand_out(model, rooms)
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


def _hand_out(model: ModelCosts, rooms: Sequence[int]) -> tuple[float, tuple[int, ...]] | None:
    """Cost of the costliest stage, and layers per stage, at most `rooms`; None if there is too little room."""
    if min(rooms) < 1 or sum(rooms) < model.layers:
        return None
    layer, head = model.layer_flops, model.head_flops
    split = [1] * len(rooms)
    extra = [head if stage == len(rooms) - 1 else 0 for stage in range(len(rooms))]
    costs = [(2 * layer + extra[stage], stage) for stage in range(len(rooms)) if rooms[stage] > 1]
    heapq.heapify(costs)
    for _ in range(model.layers - len(rooms)):
        _, stage = heapq.heappop(costs)
        split[stage] += 1
        if split[stage] < rooms[stage]:
            heapq.heappush(costs, ((split[stage] + 1) * layer + extra[stage], stage))
    highest = max((layers * layer + extra[stage] for stage, layers in enumerate(split)), default=math.inf)
    return float(highest), tuple(split)
