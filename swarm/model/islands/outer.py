"""The mathematics between islands: proposals, outer versions, merges. Linear forms, float32 on the CPU.

    proposal       P = C(F(anchor - w))                      C: code and decode, so the proposer knows what others get
                                                             F: with gaia only what is significant, else everything
    compose        D = sum of share_i P_i                    in float64, in order of islands, rounded to float32 once
    advance        m = momentum m + D;  anchor -= (rate momentum) m + rate D        Nesterov's momentum
    merged         w = k w + (1 - k) anchor' + s (anchor' - anchor) + o P

Every product and every sum is rounded once, in the order written. A term whose factor is 0 is left out, so its values
that are not finite have no effect. So every machine gets the same bits of a form, and its numbers alone say which
algorithm it is (`swarm.job.outer`).

With gaia k = s = o = 1, so anchor' - w' = anchor - w - P: what an island has made is what it sent and what it still
holds, to rounding.

Source: DiLoCo (arXiv 2311.08105), algorithm 1; Streaming DiLoCo (arXiv 2501.18512), algorithm 2; Gaia (NSDI 2017),
section 4. Decision: docs/decisions/045.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from swarm.job.outer import MergeRule, OuterUpdate
from swarm.model.codec import round_trip
from swarm.model.digests import digest_of
from swarm.model.exact_sums import squared_norms

TILE = 1 << 20  # elements of which a copy in float64 is made at a time


@dataclass(frozen=True, slots=True)
class OuterState:
    """The outer state of one parameter, the same in all islands: float32 on the CPU, in the parameter's shape."""

    anchor: Tensor  # the outer weights
    momentum: Tensor  # m

    @classmethod
    def of(cls, weights: Tensor) -> OuterState:
        """The state at the start: the weights are the anchor, and there is no momentum."""
        return cls(weights.clone(), torch.zeros_like(weights))


@dataclass(frozen=True, slots=True)
class Merge:
    """An outer step of some parameters at one island: `deltas` has D for each of them.

    Without an update the outer weights stay as they are: the proposals were not finite.
    """

    deltas: Mapping[str, Tensor]
    update: OuterUpdate | None
    rule: MergeRule


class OuterWeights:
    """The outer state of a stage's parameters. All islands hold the same, and so do all replicas of an island."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """At the start of a job, when the outer weights are the weights."""
        self._states = {name: OuterState.of(each.detach().cpu()) for name, each in weights.items()}
        self._digest = ""

    def tensors(self, name: str) -> list[Tensor]:
        """The tensors held for a parameter, not copies; call `changed` after writing into them."""
        state = self._states[name]
        return [state.anchor, state.momentum]

    def changed(self) -> None:
        self._digest = ""

    def restore(self, name: str, momentum: Tensor) -> None:
        """Go on with the momentum of a checkpoint, whose weights are the anchor."""
        self._states[name].momentum.copy_(momentum)
        self.changed()

    def momentum(self, name: str) -> Tensor:
        """The momentum, as `restore` takes it; not a copy."""
        return self._states[name].momentum

    def digest(self) -> str:
        """As `digest_of`; it changes with merges only, so it is kept between them."""
        if not self._digest:
            tensors = ((name, tensor) for name in sorted(self._states) for tensor in self.tensors(name))
            self._digest = digest_of(tensors)
        return self._digest

    def behind(self, name: str, weights: Tensor, share: float) -> Tensor:
        """How far these weights are behind the anchor, as far as it is `significant`: their island's proposal before
        it is coded."""
        anchor = self._states[name].anchor
        return significant(anchor - weights.detach().cpu(), anchor, share)

    def anchor(self, name: str) -> Tensor:
        """The outer weights; not a copy."""
        return self._states[name].anchor

    def merge(self, name: str, weights: Tensor, merge: Merge, own: Tensor | None) -> Tensor:
        """Make the next outer version of a parameter; gives the weights of an island that had `weights`, and proposed
        `own` if the rule asks for that."""
        before = after = self._states[name]
        if merge.update is not None:
            after = self._states[name] = advance(before, merge.deltas[name], merge.update)
            self.changed()
        return merged(weights.detach().cpu(), before.anchor, after.anchor, merge.rule, own)


def significant(behind: Tensor, anchor: Tensor, share: float) -> Tensor:
    """The numbers of `behind` that are more than `share` of their outer weights; 0 elsewhere.

    An outer weight of 0 counts as the root mean square of its tensor. What is not finite stays, so that it is noticed.
    """
    if not share:
        return behind
    size = anchor.abs()
    if not size.all():
        (square,) = squared_norms([anchor])
        size.masked_fill_(size == 0.0, sqrt(square / anchor.numel()))
    return behind.masked_fill(behind.abs() <= size * share, 0.0)


def proposal(anchor: Tensor, weights: Tensor, codec: str) -> Tensor:
    """How far an island's weights are behind the anchor, as the others receive it: P."""
    return round_trip(anchor - weights, codec)


def compose(proposals: Iterable[Tensor], shares: Sequence[float]) -> Tensor:
    """The mean proposal D: both arguments in order of islands, which fixes its bits; one proposal at a time."""
    total: Tensor | None = None
    for share, one in zip(shares, proposals, strict=True):
        if total is None:
            total = torch.zeros(one.shape, dtype=torch.float64)
        flat, sums = one.reshape(-1), total.view(-1)
        for at in range(0, flat.numel(), TILE):
            sums[at : at + TILE] += flat[at : at + TILE].double().mul_(share)
    assert total is not None, "somebody proposes"
    return total.float()


def advance(state: OuterState, delta: Tensor, update: OuterUpdate) -> OuterState:
    """The next outer version, given D."""
    momentum = _sum([(update.momentum, state.momentum), (1.0, delta)], delta)
    ahead = update.learning_rate * update.momentum
    anchor = state.anchor - _sum([(ahead, momentum), (update.learning_rate, delta)], delta)
    return OuterState(anchor, momentum)


def merged(weights: Tensor, before: Tensor, after: Tensor, rule: MergeRule, own: Tensor | None = None) -> Tensor:
    """An island's weights once the anchor went from `before` to `after`; `own` is what it proposed, if `rule.o`."""
    terms = [(rule.k, weights), (1.0 - rule.k, after), (rule.s, after - before)]
    return _sum(terms if own is None else [*terms, (rule.o, own)], weights)


def _sum(terms: Sequence[tuple[float, Tensor]], like: Tensor) -> Tensor:
    """The sum of factor times tensor from left to right; zeros if no factor is left."""
    total: Tensor | None = None
    for factor, tensor in terms:
        if factor != 0.0:
            product = tensor * factor
            total = product if total is None else total + product
    return torch.zeros_like(like) if total is None else total
