"""Which replicas take part in a round, and which slice of the unit each member sums.

      elements   0 ........ 64 ....... 128 ...... elements
      members    |    a     |     b     |    c     |         in order of peer id, contiguous, nothing left out

A member's slice is the part that it sums for all; equal shares by default, measured bandwidth later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.messages import Member, ParameterNorm
from swarm.types import PeerId

ALIGNMENT = 64  # elements; slices begin at cache lines and vector widths of any dtype


@dataclass(frozen=True, slots=True)
class Participant:
    """A replica that takes part in a round; `digest` names the set of microbatches that it must hold."""

    peer: PeerId
    incarnation: int
    address: str
    digest: str


def plan_round(
    participants: Sequence[Participant], elements: int, shares: Sequence[float] | None = None
) -> tuple[Member, ...]:
    """The members of a round in order of peer id, with slices that cover [0, elements) exactly once.

    `shares` follow the order of `participants`. They need not add up to 1, and may be 0 (the member only sends); None
    means equal shares. Slices begin at multiples of 64 elements, so in small units some members have an empty slice.
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


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Integer parts of `total` in proportion to `weights`: floors, then one more to the largest weight / (part + 1).

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
