"""The share of a step's batch that each of several islands trains, where shares follow speed (`islands.shares`).

    step t of the job   [ island 0          | island 1     | island 2 ]     microbatches t * M ... (t + 1) * M - 1

All islands make the same steps, so steps, exchanges and checkpoints are as with equal shares. A slow island trains less
in each, so that all come to an exchange at about the same time. Shares change behind exchanges only. They begin equal.

Islands wait for each other at exchanges only, so their shares need not be whole microbatches of one step. They are of
a cycle of n steps, where n * M is their sum. In step j of a cycle (from 0) island i ends at (c + j) // n, with c the
shares up to its own. So in each step it trains an nth of its share, rounded down or up, and in a cycle all of it, as
the sum of (c + j) // n over j < n is c. Shares whose sum is M are the same in each step.

    shares 21, 11; M = 16, n = 2    step 0  [ 10 | 6 ]    step 1  [ 11 | 5 ]

Pure values; standard library only. Decision: docs/decisions/126.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import gcd

CHANGES_FROM = 0.05  # the part of an exchange's time that other shares must save, by what was measured


class Shares:
    """Which microbatches the islands train in which inner steps; `microbatches` is the number of all in a step."""

    def __init__(self, islands: int, microbatches: int) -> None:
        self.islands = islands
        self.microbatches = microbatches
        self._from = [0]
        self._of = [(microbatches // islands,) * islands]
        self._before = [(0,) * islands]  # what each island trained until then

    @property
    def equal(self) -> tuple[int, ...]:
        return self._of[0]

    def begin(self, step: int, shares: Sequence[int]) -> None:
        """Set the shares from inner step `step` on, which is later than all before."""
        assert len(shares) == self.islands
        assert divides(shares, self.microbatches)
        assert step >= self._from[-1], "shares begin in order"
        before = tuple(self.trained(island, step) for island in range(self.islands))
        if step == self._from[-1]:
            for history in (self._from, self._of, self._before):
                history.pop()
        is_same = self._of[-1:] == [tuple(shares)] and (step - self._from[-1]) % self._cycle(shares) == 0
        if not is_same:  # a job may make many exchanges, behind which they stay
            self._from.append(step)
            self._of.append(tuple(shares))
            self._before.append(before)

    def of_cycle(self, step: int) -> tuple[int, ...]:
        """Microbatches per island in the cycle of this inner step; 0 for a lost island."""
        return self._of[bisect_right(self._from, step) - 1]

    def at(self, step: int) -> tuple[int, ...]:
        """Microbatches of an inner step per island; 0 for a lost island."""
        return tuple(end - first for first, end in pairwise(self._cuts(step)))

    def range_of(self, portion: int) -> range:
        """The microbatches of a portion, numbered through the job: the portion of step t and island i has the number
        t * islands + i."""
        step, island = divmod(portion, self.islands)
        cuts = self._cuts(step)
        return range(step * self.microbatches + cuts[island], step * self.microbatches + cuts[island + 1])

    def trained(self, island: int, steps: int) -> int:
        """The microbatches that make up the first `steps` inner steps of an island."""
        at = bisect_right(self._from, steps) - 1
        return self._before[at][island] + _trained(self._of[at], self.microbatches, island, steps - self._from[at])

    def _cuts(self, step: int) -> list[int]:
        """Where an inner step is cut: island i trains the microbatches from cut i to cut i + 1."""
        at = bisect_right(self._from, step) - 1
        cycle = self._cycle(self._of[at])
        place = (step - self._from[at]) % cycle
        return [(before + place) // cycle for before in accumulate(self._of[at], initial=0)]

    def _cycle(self, shares: Sequence[int]) -> int:
        return sum(shares) // self.microbatches


def divides(shares: Sequence[int], microbatches: int) -> bool:
    """Whether these are shares of steps with this many microbatches; each island has at least one, or none at all."""
    cycle, rest = divmod(sum(shares), microbatches)
    return rest == 0 and cycle > 0 and all(share == 0 or share >= cycle for share in shares)


def next_shares(
    present: Sequence[int], shares: Sequence[int], seconds: Mapping[int, float], microbatches: int, steps: int
) -> tuple[int, ...]:
    """The shares in the next `steps` inner steps, up to an exchange, of the islands that go on, given how long each
    took with its present one.

    An island without seconds has not been measured: it counts as the others on average. Shares are as the speeds, but
    at least one microbatch of each step. They stay if the same islands go on and others would save less than
    CHANGES_FROM, or none was measured.
    """
    speeds = {island: shares[island] / seconds[island] for island in present if seconds.get(island) and shares[island]}
    usual = sum(speeds.values()) / len(speeds) if speeds else 1.0
    weights = [speeds.get(island, usual) for island in present]
    parts = _divided(microbatches * steps, weights, steps)
    made = {island: part // gcd(steps, *parts) for island, part in zip(present, parts, strict=True)}
    found = tuple(made.get(island, 0) for island in range(len(shares)))
    if {island for island, share in enumerate(shares) if share} != set(present):
        return found
    now, then = (
        max(_trained(of, microbatches, at, steps) / weight for at, weight in zip(present, weights, strict=True))
        for of in (shares, found)
    )
    return found if speeds and then < (1 - CHANGES_FROM) * now else tuple(shares)


def _trained(shares: Sequence[int], microbatches: int, island: int, steps: int) -> int:
    """What an island trains in the first `steps` steps with these shares."""
    cycle = sum(shares) // microbatches
    cycles, places = divmod(steps, cycle)
    first, end = (_sum_of_cuts(sum(shares[:count]), cycle, places) for count in (island, island + 1))
    return cycles * shares[island] + end - first


def _sum_of_cuts(before: int, cycle: int, places: int) -> int:
    """The sum of (before + place) // cycle over the first places of a cycle."""
    whole, rest = divmod(before, cycle)
    return whole * places + max(0, rest + places - cycle)


def _divided(total: int, weights: Sequence[float], least: int) -> list[int]:
    """`total` in parts of at least `least`, as the weights are: what is left over goes, one by one, to who is done
    first."""
    parts, rest, weight = [least] * len(weights), total, sum(weights)
    for at in sorted(range(len(weights)), key=weights.__getitem__):
        if rest * weights[at] < least * weight:
            rest, weight = rest - least, weight - weights[at]
        else:
            parts[at] = int(rest * weights[at] / weight)
    for _ in range(total - sum(parts)):
        first = min(range(len(weights)), key=lambda at: ((parts[at] + 1) / weights[at], at))
        parts[first] += 1
    return parts
