"""The members of a round, and the slice of the unit that each of them sums.

      elements   0 ........ 64 ....... 128 ...... elements
      members    |    a     |     b     |    c     |         in order of peer id, contiguous, nothing left out

A member's slice is the part that it sums for all. Shares are equal, but members that cannot reach each other own none.

Decisions: docs/decisions/022, 043.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from statistics import median
from typing import Final

from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.state.brain_state import BrainState
from swarm.types import PeerId, Round, UnitName, set_digest
from swarm.wire.messages import Member, ParameterNorm

ALIGNMENT = 64  # elements; slices begin at cache lines and vector widths of any dtype


EMPTY_SET = set_digest(())


def plan_round(
    replicas: Sequence[ReplicaRecord],
    sets: Mapping[PeerId, frozenset[int]],
    elements: int,
    shares: Sequence[float] | None,
    *,
    by_site: bool = False,
) -> tuple[Member, ...]:
    """The members of a round in order of peer id, with slices that cover [0, elements) exactly once.

    `sets` are the microbatches that each must hold; a replica without one holds none. `shares` follow the order of
    `replicas`; they need not add up to 1 and may be 0 (the member only sends), and None means equal shares. Slices
    begin at multiples of 64 elements, so in small units some members have an empty slice.
    """
    assert replicas
    assert elements >= 0
    assert len({replica.peer for replica in replicas}) == len(replicas), "a peer is a member once"
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
        members.append(Member(*facts, set_digest(held), one.stage, len(held), one.site if by_site else ""))
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


REMEMBERED: Final = 16  # rounds of a peer: its rate is the best of them
ROUNDS_MIN: Final = 4  # of each kind, before they are judged
GAIN_MIN: Final = 1.15  # expected of other shares than the present ones
SHORTER_MIN: Final = 0.95  # of the time of rounds with equal slices, at most, or slices are equal again
AGAIN_ROUNDS: Final = (64, 1024)  # with equal slices, after slices by bandwidth were of no use: first, longest
HALVINGS: Final = 60


def shares_of(rates: Sequence[float]) -> list[float]:
    """The shares with which a round ends first if nothing ever waits; they add up to 1."""
    count = len(rates)
    if count <= 2:
        return [1.0 / count] * count

    def bounds(seconds: float) -> list[float]:
        return [min(1.0, max(0.0, (rate * seconds - 1.0) / (count - 2))) for rate in rates]

    low, high = 1.0 / min(rates), 2.0 / min(rates)  # with 2 / min there is room for more than all
    if sum(bounds(low)) >= 1.0:
        high = low
    else:
        for _ in range(HALVINGS):
            middle = (low + high) / 2.0
            low, high = (low, middle) if sum(bounds(middle)) >= 1.0 else (middle, high)
    return _evenly(bounds(high))


def seconds_of(shares: Sequence[float], rates: Sequence[float]) -> float:
    """Seconds of a round in which nothing waits, for one unit of bytes."""
    others = len(shares) - 2
    return max((1.0 + others * share) / rate for share, rate in zip(shares, rates, strict=True))


def _evenly(bounds: Sequence[float]) -> list[float]:
    """Shares that add up to 1, none above its bound, the largest as small as can be."""
    left, level = 1.0, 1.0
    for done, bound in enumerate(sorted(bounds)):
        level = left / (len(bounds) - done)
        if bound >= level:
            break
        left -= bound
    shares = [min(bound, level) for bound in bounds]
    whole = sum(shares)
    return [share / whole for share in shares]


@dataclass(slots=True)
class _Unit:
    """How the slices of a unit are shared among these members."""

    members: frozenset[str]
    shares: dict[str, float] | None = None  # None: equal
    equal_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    shared_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    equal_rounds: int = 0  # that are left until other shares may be tried
    pause_rounds: int = AGAIN_ROUNDS[0]  # after they were of no use

    def pause(self) -> None:
        """Other shares were of no use."""
        self.equal_rounds = self.pause_rounds
        self.pause_rounds = min(2 * self.pause_rounds, AGAIN_ROUNDS[1])

    def followed_by(self, members: Sequence[str]) -> _Unit:
        """The record for a new member set. Shares that were not judged before the change count as useless; otherwise a
        member with slow links would try again with each change."""
        if self.shares is not None and len(self.shared_s) < ROUNDS_MIN:
            self.pause()
        return _Unit(frozenset(members), equal_rounds=self.equal_rounds, pause_rounds=self.pause_rounds)


class SliceShares:
    """How much of a unit each party to a round owns: more where links are faster, if that has made rounds shorter.

            ┌──── members change, a round failed ────┐
            ▼                                        │
        equal ──all rates known, a gain is expected──▶ by bandwidth ──rounds are not shorter──▶ equal, for a while
                                                        └──rates say that other shares are better──▶ by bandwidth, anew

    A member that owns the share f of a unit moves 1 + (n - 2) f units in each direction in a round of n members: its
    parts of what others own, and the mean of its own to all. So with b the slower direction of its links, a round ends
    no sooner than max (1 + (n - 2) f) / b. The least such time gives an upper bound for each f, and the shares are as
    even as those bounds allow. Two members move the same whatever they own, so they own the same.

    Rates are what members say of themselves, and rounds whose slices are shared badly are slow, but right. So what
    counts is the time: the median of what the members of a round say that it took. Where slices by bandwidth do not
    shorten it, slices are equal again, for longer each time, also with other members. A job that checks replicas, or
    cuts false parts, keeps equal slices: a member must not enlarge the slice that it reduces, because no other member
    receives its part of that.

    A party is a member, or all members at a site (by_site.py).

    Source: DeDLOC (arXiv 2106.10207), reduced to rounds in which every member has a part.
    """

    def __init__(self, state: BrainState) -> None:
        self._state = state
        settings = state.settings
        self._is_on = not (settings.recount or settings.second_owner or settings.clips)
        self._units: dict[UnitName, _Unit] = {}
        self._planned: dict[UnitName, Round] = {}  # the newest round of each unit that has these shares
        self._rates: dict[str, deque[float]] = {}

    def plan(self, unit: UnitName, round_: Round, members: Sequence[str]) -> list[float] | None:
        """The shares of a new round, in the order of its members; None: equal ones."""
        if not self._is_on or len(members) <= 2:
            return None
        known = self._units.get(unit)
        if known is None or known.members != frozenset(members):
            known = self._units[unit] = _Unit(frozenset(members)) if known is None else known.followed_by(members)
        self._planned[unit] = round_
        return None if known.shares is None else [known.shares[peer] for peer in members]

    def averaged(self, unit: UnitName, round_: Round, rates: Mapping[str, float], round_s: float) -> None:
        """All members of a round hold the mean: how fast their links are (0: too little to tell), how long it took."""
        known = self._units.get(unit)
        if known is None or self._planned.get(unit) != round_ or known.members != rates.keys():
            return
        for party, rate in rates.items():
            if rate > 0.0:
                self._rates.setdefault(party, deque(maxlen=REMEMBERED)).append(rate)
        here = frozenset().union(*(other.members for other in self._units.values()))
        self._rates = {party: learnt for party, learnt in self._rates.items() if party in here}
        if known.shares is None:
            known.equal_s.append(round_s)
            known.equal_rounds = max(0, known.equal_rounds - 1)
        else:
            known.shared_s.append(round_s)
        self._judge(unit, known)

    def _judge(self, unit: UnitName, known: _Unit) -> None:
        """Take other shares, or equal ones again."""
        if known.shares is not None:
            if len(known.shared_s) < ROUNDS_MIN:
                return
            if median(known.shared_s) > SHORTER_MIN * median(known.equal_s):
                known.pause()
                self._turn(unit, known, None, "slices by bandwidth took no less time")
                return
        elif len(known.equal_s) < ROUNDS_MIN or known.equal_rounds:
            return
        peers = sorted(known.members)
        if any(len(self._rates.get(peer, ())) < ROUNDS_MIN for peer in peers):
            return
        rates = [max(self._rates[peer]) for peer in peers]
        present = [1.0 / len(peers)] * len(peers) if known.shares is None else [known.shares[peer] for peer in peers]
        chosen = shares_of(rates)
        gain = seconds_of(present, rates) / seconds_of(chosen, rates)
        if gain >= GAIN_MIN:
            self._turn(
                unit, known, dict(zip(peers, chosen, strict=True)), f"rounds should take 1/{gain:.2f} of the time"
            )

    def _turn(self, unit: UnitName, known: _Unit, shares: Mapping[str, float] | None, reason: str) -> None:
        known.shares = None if shares is None else dict(shares)
        (known.equal_s if shares is None else known.shared_s).clear()
        listed = "" if shares is None else ": " + ", ".join(f"{peer} {share:.0%}" for peer, share in shares.items())
        what = "equal" if shares is None else "by bandwidth"
        self._state.outbox.note("info", f"slices of unit {unit} are {what} from now on, as {reason}{listed}")
