"""What of an island's weights is significant: it is sent; the rest waits and grows.

Behind every step an island looks at how far each block of the model (a layer, the embedding, the head) has moved since
it was last sent, as a share of its norm. What is above the threshold is sent to all other islands, which add it to
their weights.

    pending = anchor - weights          the anchor has what was sent, by anybody
    send      P = C(pending): the anchor loses P, the weights stay, so what the code loses stays pending (exchange)
    receive   P: anchor and weights lose P (rebase)

Source: Gaia (NSDI 2017). Ours are blocks in the place of single numbers, which `unit = "coordinate"` brings back, and
codes whose loss waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from benchmarks.learning.gaia.band import Band
from swarm.job.outer import MergeRule, OuterUpdate
from swarm.model.codec import CODECS, round_trip
from swarm.model.islands.outer import OuterState, advance, merged

ADD = OuterUpdate(0.0, 0.0, 0.0, 0.0, 1.0, 0.0)  # the anchor loses what was sent
EXCHANGE, REBASE = MergeRule(1.0, 1.0, 1.0), MergeRule(1.0, 1.0, 0.0)
INDEX_BYTES = 4

Update: TypeAlias = Mapping[str, Tensor]  # by parameter, what the anchor loses


@dataclass(frozen=True, slots=True)
class Gaia:
    """When an island sends what, and for what it waits."""

    threshold: float = 0.01
    decay: Literal["sqrt", "rate", "none"] = "sqrt"  # 1 / sqrt(t + 1), as the learning rate, or not at all
    unit: Literal["block", "coordinate"] = "block"
    compression: str = "fp4"
    slack: int = 1  # steps that an island may be ahead of what it has heard of the slowest
    clock: Literal["behind", "alone"] = "behind"  # whether that one is heard behind what it has sent, or at once
    barrier_s: float = math.inf  # what takes longer on a link is announced, and its receiver waits for it
    band: Band | None = None  # sets the threshold by what was sent

    def threshold_at(self, step: int, rate: float) -> float:
        """The threshold behind inner step `step` (from 0), whose learning rate is this share of the highest."""
        match self.decay:
            case "sqrt":
                return self.threshold / math.sqrt(step + 1)
            case "rate":
                return self.threshold * rate
            case "none":
                return self.threshold


class Copy:
    """The weights of one island, and its anchor: what all islands have sent, as far as it has heard of it."""

    def __init__(self, weights: Mapping[str, Tensor], blocks: Sequence[Sequence[str]], gaia: Gaia) -> None:
        self.weights = weights  # changed in place, here and by the optimizer
        self.anchor = {name: one.clone() for name, one in weights.items()}
        self._blocks, self._gaia = blocks, gaia

    def pending(self, name: str) -> Tensor:
        """What of a parameter was not sent yet."""
        return self.anchor[name] - self.weights[name]

    def send(self, threshold: float, room_bytes: float = math.inf) -> tuple[Update, int]:
        """What is significant, as all get it, and the bytes that it takes.

        Of blocks no more than there is room for: the most significant first, the others stay pending.
        """
        whole = self._gaia.unit == "block"
        found = dict(self._blocks_above(threshold, room_bytes) if whole else self._numbers_above(threshold))
        for name, (update, _) in found.items():
            self._merge(name, update, EXCHANGE)
        return {name: update for name, (update, _) in found.items()}, sum(taken for _, taken in found.values())

    def receive(self, update: Update) -> None:
        for name, one in update.items():
            self._merge(name, one, REBASE)

    def _blocks_above(self, threshold: float, room_bytes: float) -> Iterator[tuple[str, tuple[Tensor, int]]]:
        above = []
        for names in self._blocks:
            moved, norm = (
                math.sqrt(math.fsum(float(one.double().square().sum()) for one in tensors))
                for tensors in ([self.pending(name) for name in names], [self.weights[name] for name in names])
            )
            if moved > threshold * norm:
                above.append((moved / norm if norm else math.inf, names))
        for _, names in sorted(above, key=lambda item: -item[0]):
            sizes = [self._payload_bytes(self.weights[name].numel()) for name in names]
            if sum(sizes) > room_bytes:
                continue
            room_bytes -= sum(sizes)
            for name, taken in zip(names, sizes, strict=True):
                yield name, (round_trip(self.pending(name), self._gaia.compression), taken)

    def _numbers_above(self, threshold: float) -> Iterator[tuple[str, tuple[Tensor, int]]]:
        """With their places: an index for each, or a bit for every number of the parameter, whichever is less."""
        for name, one in self.weights.items():
            pending = self.pending(name)
            beside = one.abs()
            beside = torch.where(beside == 0, one.square().mean().sqrt(), beside)  # else each of them is significant
            above = pending.abs() > threshold * beside
            count = int(above.sum())
            if count:
                update = torch.zeros_like(pending)
                update[above] = round_trip(pending[above], self._gaia.compression)
                places = min(INDEX_BYTES * count, math.ceil(one.numel() / 8))
                yield name, (update, self._payload_bytes(count) + places)

    def _payload_bytes(self, count: int) -> int:
        return CODECS[self._gaia.compression].payload_bytes(count)

    @torch.no_grad()
    def _merge(self, name: str, update: Tensor, rule: MergeRule) -> None:
        before = self.anchor[name]
        after = advance(OuterState(before, torch.zeros(())), update, ADD).anchor
        self.weights[name].copy_(merged(self.weights[name], before, after, rule, update))
        self.anchor[name] = after
