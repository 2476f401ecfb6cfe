"""The members of a round, and the slice of the unit that each of them sums.

      elements   0 ........ 64 ....... 128 ...... elements
      members    |    a     |     b     |    c     |         in order of peer id, contiguous, nothing left out

A member's slice is the part that it sums for all. Shares are equal, but members that cannot reach each other own none.

Decision: docs/decisions/022.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heapreplace

from scheduler.brain.inputs import ReplicaRecord
from swarm.types import PeerId, set_digest
from swarm.wire.messages import Member, ParameterNorm

ALIGNMENT = 64  # elements; slices begin at cache lines and vector widths of any dtype


EMPTY_SET = set_digest(())


def plan_round(
    replicas: Sequence[ReplicaRecord],
    sets: Mapping[PeerId, frozenset[int]],
    elements: int,
    shares: Sequence[float] | None,
) -> tuple[Member, ...]:
    """The members of a round in order of peer id, with slices that cover [0, elements) exactly once.

    `sets` are the microbatches that each must hold; a replica without one holds none. `shares` follow the order of
    `replicas`; they need not add up to 1 and may be 0 (the member only sends), and None means equal shares. Slices
    begin at multiples of 64 elements, so in small units some members have an empty slice.
    """
    assert replicas
    assert elements >= 0
    assert len({one.peer for one in replicas}) == len(replicas), "a peer is a member once"
    weights = [1.0] * len(replicas) if shares is None else list(shares)
    assert len(weights) == len(replicas)
    assert min(weights) >= 0
    assert sum(weights) > 0
    ordered = sorted(zip(replicas, weights, strict=True), key=lambda pair: pair[0].peer)

    blocks = apportion(-(-elements // ALIGNMENT), [weight for _, weight in ordered])
    members: list[Member] = []
    start = 0
    for (one, _), count in zip(ordered, blocks, strict=True):
        stop = min(elements, start + count * ALIGNMENT)
        held = sets.get(one.peer, frozenset())
        facts = (one.peer, one.incarnation, one.address, start, stop)
        members.append(Member(*facts, set_digest(held), one.stage, len(held)))
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
    quotients = [(-fraction / (part + 1), at) for at, (fraction, part) in enumerate(zip(fractions, parts, strict=True))]
    heapify(quotients)  # the largest first, then the earlier member
    for _ in range(total - sum(parts)):
        _, at = quotients[0]
        parts[at] += 1
        heapreplace(quotients, (-fractions[at] / (parts[at] + 1), at))
    return parts


def squared_norms(norms: Iterable[ParameterNorm]) -> list[float]:
    """Squared norms of the whole gradient; a parameter that comes twice (tied) counts once."""
    return list({norm.name: norm.squared_norm for norm in norms}.values())
