"""Where to cut a model so that the pool's memory holds it, at the least cost of the costliest stage.

    peers, most memory first   | a  b | c  d | e  f |        min_replicas = 2: each stage takes two that are alike
                                slot 0  slot 1  slot 2        a slot holds as much as the smaller of its peers

Every stage gets a slot. The first and the last stage differ from the others (embedding; head), so all pairs of slots
are tried for them; the other stages are alike and take the slots in order. Given the slots, each layer goes to the
stage that would stay cheapest among those with room. This is optimal because layers are equal. With bare ends the
embedding, or the head, may be a stage without layers: it idles for most of a step, so that is for what fits no other
way. A model with narrow places is cut at these only: the layers between two of them count as one.

Decision: docs/decisions/017.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

from swarm.errors import OutOfMemory
from swarm.text import counted
from swarm.types import Memory

KINDS_MAX = 8  # different slots that are tried for first and last stage
STAGES_TRIED_MAX = 64

_Slot: TypeAlias = tuple[Memory, ...]  # each of them must hold the stage


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The costs of a model, from which the costs of the stages of any cut follow."""

    layers: int
    layer_flops: int  # multiply-adds per token, forward
    head_flops: int
    stage_memory: Callable[[int, int, int, int], Memory]  # of (layers, stage, stages, replicas); rises with the layers
    bare_embedding: bool = True  # whether the embedding may be a stage alone; a tied one may not
    bare_head: bool = True
    group: Callable[[int], int] = lambda stages: 1  # layers that a cut into this many stages leaves together

    def in_groups(self, stages: int) -> ModelCosts:
        """The costs with these groups of layers in the place of layers."""
        group = self.group(stages)

        def memory(groups: int, stage: int, stages: int, replicas: int) -> Memory:
            return self.stage_memory(group * groups, stage, stages, replicas)

        return replace(self, layers=self.layers // group, layer_flops=self.layer_flops * group, stage_memory=memory)


def needs(model: ModelCosts, split: Sequence[int], peers: int) -> tuple[Memory, ...]:
    """The memory that a replica of each stage needs if `peers` peers share the stages evenly."""
    stages = len(split)
    replicas = max(1, peers // stages)
    return tuple(model.stage_memory(layers, stage, stages, replicas) for stage, layers in enumerate(split))


def fit(
    model: ModelCosts, offers: Sequence[Memory], stages: int, min_replicas: int, *, bare_ends: bool = False
) -> tuple[int, ...] | None:
    """The best cut into this many stages for peers with these memories, None if none fits.

    With `bare_ends` the first and the last stage may have no layers.
    """
    offers = sorted((offer if offer.device_bytes else Memory(1 << 62) for offer in offers), reverse=True)
    group = model.group(stages)
    model = model.in_groups(stages)
    least = [1] * stages
    if bare_ends and stages > 1:
        least[0], least[-1] = int(not model.bare_embedding), int(not model.bare_head)
    if len(offers) < stages * min_replicas or sum(least) > model.layers:
        return None
    slots = [_slot(offers[number * min_replicas : (number + 1) * min_replicas]) for number in range(stages)]
    replicas = len(offers) // stages

    @cache
    def takes(stage: int, layers: int) -> Memory:
        return model.stage_memory(layers, stage, stages, replicas)

    def layers(stage: int, holds: Callable[[Memory], bool]) -> int:
        """How many fit; -1 if not even a stage without layers does."""
        low, high = -1, model.layers
        while low < high:
            middle = (low + high + 1) // 2
            fits = holds(takes(stage, middle))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    kinds = [0] if stages == 1 else [0, *[1] * (stages - 2), stages - 1]
    # If each slot were the largest: what fails even so needs no search, and most of what is tried fails so.
    largest = _largest(offers)
    most = {kind: layers(kind, lambda need: any(offer.holds(need) for offer in largest)) for kind in set(kinds)}
    if _hand_out(model, [most[kind] for kind in kinds], least) is None:
        return None

    @cache
    def room(stage: int, slot: _Slot) -> int:
        return layers(stage, lambda need: all(offer.holds(need) for offer in slot))

    best: tuple[float, tuple[int, ...]] | None = None
    for first, last in _ends(slots):
        sizes = [first]
        if stages > 1:
            rest = list(slots)
            rest.remove(first)
            rest.remove(last)
            sizes = [first, *rest, last]
        rooms = [room(kind, slot) for kind, slot in zip(kinds, sizes, strict=True)]
        found = _hand_out(model, rooms, least)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else tuple(group * groups for groups in best[1])


def is_possible(model: ModelCosts, offers: Sequence[Memory], stages: Sequence[int]) -> bool:
    """Whether for each of the smallest parts there is a peer that holds it.

    Without peers, or if one of them does not say how much memory it has, nothing is known to be impossible.
    """
    known = offers and all(offer.device_bytes for offer in offers)
    return not known or not _worst(model, offers, stages).lack_bytes


def check_possible(
    model: ModelCosts,
    offers: Sequence[Memory],
    stages: Sequence[int],
    lighter: Iterable[tuple[str, ModelCosts, Sequence[int]]] = (),
) -> None:
    """Raise OutOfMemory unless the model is_possible.

    `lighter`: settings that make a stage smaller, best first, with costs and numbers of stages after each; the hint
    names them.
    """
    if not is_possible(model, offers, stages):
        worst = _worst(model, offers, stages)
        short = worst.offer.short_text(worst.need)
        raise OutOfMemory(
            f"{worst.part} needs about {worst.need}, the largest of {counted(len(offers), 'stage server')} offers "
            f"{worst.offer}: {short} too little",
            hint=_way_out(worst, [(setting, _worst(costs, offers, counts)) for setting, costs, counts in lighter]),
        )


def _way_out(worst: _Worst, lighter: Sequence[tuple[str, _Worst]]) -> str:
    """What to do about a model that does not fit: the settings that help, with what is needed after them."""
    left, useful = worst, list[str]()
    for setting, after in lighter:
        if after.lack_bytes < left.lack_bytes:
            useful.append(setting)
            left = after
    settings = " and ".join((", ".join(useful[:-1]), useful[-1])) if useful[1:] else "".join(useful)
    if not left.lack_bytes:
        return f"set {settings}: then it needs {left.need}"
    more = f"start a stage server that offers {worst.need} first"
    return f"{more}, or one of {left.need} and set {settings}" if useful else f"{more}, or lower data.sequence_length"


def stage_counts(layers: int, default: int, most: int) -> list[int]:
    """The numbers of stages to try, best first: the default, then all above it up to `most`."""
    return list(range(default, min(layers, max(default, most), default + STAGES_TRIED_MAX) + 1))


@dataclass(frozen=True, order=True, slots=True)
class _Worst:
    """The part of a model that finds least room, and the peer with most of it."""

    lack_bytes: int
    need: Memory
    offer: Memory
    part: str


def _worst(model: ModelCosts, offers: Sequence[Memory], stages: Sequence[int]) -> _Worst:
    """Which of the smallest parts finds least room, for the number of stages where that is most."""

    def best(part: str, need: Memory) -> _Worst:
        return min(_Worst(offer.lacking(need).total_bytes, need.beside(offer), offer, part) for offer in kinds)

    kinds = _largest(offers)
    return min(max(best(part, need) for part, need in _smallest(model, count)) for count in stages)


def _smallest(model: ModelCosts, stages: int) -> Iterator[tuple[str, Memory]]:
    """The smallest parts of a cut into `stages` stages, and what each needs."""
    layer = f"{number} decoder layers" if (number := model.group(stages)) > 1 else "one decoder layer"
    model = model.in_groups(stages)
    if stages == 1:
        yield "the whole model in one stage", model.stage_memory(model.layers, 0, 1, 1)
        return
    if model.bare_embedding:
        yield "the embedding alone", model.stage_memory(0, 0, stages, 1)
    else:
        yield f"{layer} with the {'tied ' if model.bare_head else ''}embedding", model.stage_memory(1, 0, stages, 1)
    of = "the head alone" if model.bare_head else f"{layer} with the head"
    yield of, model.stage_memory(int(not model.bare_head), stages - 1, stages, 1)
    if stages > 2:
        yield layer, model.stage_memory(1, 1, stages, 1)
    else:
        ends = (model.stage_memory(1, stage, stages, 1) for stage in (0, 1))
        yield f"{layer} with embedding or head", min(ends, key=lambda need: need.total_bytes)


def _largest(offers: Iterable[Memory]) -> list[Memory]:
    """Those of which one holds whatever any of the offers holds."""
    kept: list[Memory] = []
    for offer in sorted(offers, reverse=True):
        if not offer.host_bytes and any(not other.host_bytes for other in kept):
            continue
        if offer.host_bytes and any(other.host_bytes >= offer.host_bytes for other in kept):
            continue
        kept.append(offer)
    return kept


def _slot(offers: Sequence[Memory]) -> _Slot:
    """The smallest of these machines of one memory, and of those with two the smaller of each."""
    ones = [offer for offer in offers if not offer.host_bytes]
    twos = [offer for offer in offers if offer.host_bytes]
    smallest = Memory(
        min((two.device_bytes for two in twos), default=0), min((two.host_bytes for two in twos), default=0)
    )
    return (*([min(ones)] if ones else ()), *([smallest] if twos else ()))


def _ends(slots: Sequence[_Slot]) -> list[tuple[_Slot, _Slot]]:
    """Pairs of slots for first and last stage."""
    if len(slots) == 1:
        return [(slots[0], slots[0])]
    kinds = sorted(set(slots), reverse=True)
    if len(kinds) > KINDS_MAX:
        kinds = [kinds[round(number * (len(kinds) - 1) / (KINDS_MAX - 1))] for number in range(KINDS_MAX)]
    return [(a, b) for a in kinds for b in kinds if a != b or slots.count(a) > 1]


def _hand_out(model: ModelCosts, rooms: Sequence[int], least: Sequence[int]) -> tuple[float, tuple[int, ...]] | None:
    """Cost of the costliest stage, and layers per stage, from `least` to `rooms`; None if there is too little room."""
    if any(room < layers for room, layers in zip(rooms, least, strict=True)) or sum(rooms) < model.layers:
        return None
    layer, head = model.layer_flops, model.head_flops
    split = list(least)
    extra = [head if stage == len(rooms) - 1 else 0 for stage in range(len(rooms))]
    costs = [
        ((split[stage] + 1) * layer + extra[stage], stage) for stage, room in enumerate(rooms) if room > split[stage]
    ]
    heapq.heapify(costs)
    for _ in range(model.layers - sum(least)):
        _, stage = heapq.heappop(costs)
        split[stage] += 1
        if split[stage] < rooms[stage]:
            heapq.heappush(costs, ((split[stage] + 1) * layer + extra[stage], stage))
    highest = max((layers * layer + extra[stage] for stage, layers in enumerate(split)), default=math.inf)
    return float(highest), tuple(split)
