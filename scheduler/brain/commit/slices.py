"""Who takes part in a round, and which slice of the unit each member sums.

      elements   0 ........ 64 ....... 128 ...... elements
      members    |    a     |     b     |    c     |         in order of peer id, contiguous, nothing left out

A member's slice is the part that it sums for all; equal shares by default, measured bandwidth later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.messages import Member, ParameterNorm
from swarm.types import PeerId

ROUND_AGAIN_S = (0.2, 5.0)  # pause before a round that failed twice is repeated, and the longest one
ROUNDS_MAX = 4  # failures of one pair in one step before one of the two leaves the job
ALIGNMENT = 64  # elements; slices begin at cache lines and vector widths of any dtype


@dataclass(frozen=True, slots=True)
class Participant:
    """A replica that joins a round; `digest` names the set of microbatches that it must hold."""

    peer: PeerId
    incarnation: int
    address: str
    digest: str


def plan_round(
    participants: Sequence[Participant], elements: int, shares: Sequence[float] | None = None
) -> tuple[Member, ...]:
    """The members of a round in order of peer id, with slices that cover [0, elements) exactly once.

    `shares` belong to `participants` in the given order, need not add up to 1, and may be 0 (the member only sends);
    none means equal. Slices begin at multiples of 64 elements, so small units leave some members an empty slice.
    """
    assert participants
    assert elements >= 0
    assert len({one.peer for one in participants}) == len(participants), "a peer is a member once"
    weights = [1.0] * len(participants) if shares is None else list(shares)
    assert len(weights) == len(participants)
    assert min(weights) >= 0
    assert sum(weights) > 0
    ordered = sorted(zip(participants, weights, strict=True), key=lambda pair: pair[0].peer)

    blocks = apportion(-(-elements // ALIGNMENT), [weight for _, weight in ordered])
    members: list[Member] = []
    start = 0
    for (one, _), count in zip(ordered, blocks, strict=True):
        stop = min(elements, start + count * ALIGNMENT)
        members.append(Member(one.peer, one.incarnation, one.address, start, stop, one.digest))
        start = stop
    assert start == elements
    return tuple(members)


@dataclass(slots=True)
class Troubles:
    """The failed rounds of one unit in one step."""

    failures: int = 0
    pairs: Counter[tuple[PeerId, PeerId]] = field(default_factory=Counter)  # a pair of one: it accuses nobody
    retry_s: float = 0.0

    def failed(self, by: PeerId, accused: PeerId | None, now_s: float) -> int:
        """Note a failure; how often this pair has failed."""
        first_s, longest_s = ROUND_AGAIN_S
        self.retry_s = now_s + (min(longest_s, first_s * 2**self.failures) if self.failures else 0.0)
        self.failures += 1
        pair = pair_of(by, accused or by)
        self.pairs[pair] += 1
        return self.pairs[pair]

    def owners(self, members: Iterable[PeerId]) -> list[float] | None:
        """Shares of a round in which no pair that failed exchanges slices; None: no such round, or none is needed.

        A member that owns no slice sends its part to the owners and gets the mean from them: the two of a pair that
        cannot reach each other may both be members, as long as a third owns everything.
        """
        troubled = {peer for pair in self.pairs for peer in pair}
        shares = [0.0 if peer in troubled else 1.0 for peer in members]
        return shares if troubled and any(shares) else None

    def leaver(self, pair: Collection[PeerId], spare: Collection[PeerId], share: Mapping[PeerId, int]) -> PeerId | None:
        """Who of a pair leaves, of those that can be spared: who failed with more others, then who contributed less."""
        candidates = sorted(set(pair) & set(spare), reverse=True)
        partners = {one: len({other for both in self.pairs if one in both for other in both}) for one in candidates}
        return max(candidates, key=lambda one: (partners[one], -share.get(one, 0)), default=None)


def pair_of(one: PeerId, other: PeerId) -> tuple[PeerId, PeerId]:
    """The two in order."""
    return (one, other) if one <= other else (other, one)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole parts of `total` in proportion to `weights`: floors, then one more to the largest weight / (part + 1).

    Source: Hagenbach-Bischoff, as in hivemind's load balancing; ties go to the earlier member.
    """
    whole = sum(weights)
    fractions = [weight / whole for weight in weights]
    parts = [int(total * fraction) for fraction in fractions]
    while sum(parts) > total:  # a product of floats may round up past the whole
        parts[parts.index(max(parts))] -= 1
    for _ in range(total - sum(parts)):
        quotients = [fraction / (part + 1) for fraction, part in zip(fractions, parts, strict=True)]
        parts[quotients.index(max(quotients))] += 1
    return parts


def squared_norms(norms: Iterable[ParameterNorm]) -> list[float]:
    """Squared norms of the whole gradient; a parameter that comes twice (tied) counts once."""
    return list({norm.name: norm.squared_norm for norm in norms}.values())
