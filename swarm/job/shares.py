"""The share of a step's batch that each of several islands trains, where shares follow speed (`islands.shares`).

    step t of the job   [ island 0          | island 1     | island 2 ]     microbatches t * M ... (t + 1) * M - 1

All islands make the same steps, so steps, exchanges and checkpoints are those of equal shares. A slow island trains
less in each, so that all come to an exchange at about the same time. Shares change behind exchanges only. They begin
equal. Pure values; standard library only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

CHANGES_FROM = 0.05  # the part of an exchange's time that other shares must save, by what was measured


class Shares:
    """Which microbatches the islands train in which inner steps; `microbatches` is the number of all in a step."""

    def __init__(self, islands: int, microbatches: int) -> None:
        self.islands = islands
        self.microbatches = microbatches
        self._from = [0]
        self._of = [(microbatches // islands,) * islands]

    @property
    def equal(self) -> tuple[int, ...]:
        return self._of[0]

    def begin(self, step: int, shares: Sequence[int]) -> None:
        """These are the shares from inner step `step` on, which is none of an earlier one."""
        assert len(shares) == self.islands
        assert step >= self._from[-1], "shares begin in order"
        if step == self._from[-1]:
            self._from.pop()
            self._of.pop()
        if self._of[-1:] != [tuple(shares)]:  # a job may make many exchanges, behind which they stay
            self._from.append(step)
            self._of.append(tuple(shares))

    def at(self, step: int) -> tuple[int, ...]:
        """The shares in an inner step, by island; 0 for those that are away."""
        return self._of[bisect_right(self._from, step) - 1]

    def range_of(self, portion: int) -> range:
        """The microbatches that make up a portion, numbered through the job: that of step t of island i is number
        t * islands + i."""
        step, island = divmod(portion, self.islands)
        shares = self.at(step)
        first = step * self.microbatches + sum(shares[:island])
        return range(first, first + shares[island])

    def trained(self, island: int, steps: int) -> int:
        """The microbatches that make up the first `steps` inner steps of an island."""
        ends = [*self._from[1:], steps]
        spans = zip(self._from, ends, self._of, strict=True)
        return sum(max(0, min(end, steps) - begin) * shares[island] for begin, end, shares in spans)


def next_shares(
    present: Sequence[int], shares: Sequence[int], seconds: Mapping[int, float], microbatches: int
) -> tuple[int, ...]:
    """The shares of the islands that go on, given how long each took for a step with its present one.

    An island without seconds has not been measured: it counts as the others on average. Shares are as the speeds, but
    at least 1. They stay if the same islands go on and others would save less than CHANGES_FROM, or none was measured.
    """
    speeds = {island: shares[island] / seconds[island] for island in present if seconds.get(island) and shares[island]}
    usual = sum(speeds.values()) / len(speeds) if speeds else 1.0
    weights = [speeds.get(island, usual) for island in present]
    made = dict(zip(present, _divided(microbatches, weights), strict=True))
    found = tuple(made.get(island, 0) for island in range(len(shares)))
    if {island for island, share in enumerate(shares) if share} != set(present) or sum(shares) != microbatches:
        return found
    now, then = (
        max(of[island] / weight for island, weight in zip(present, weights, strict=True)) for of in (shares, found)
    )
    return found if speeds and then < (1 - CHANGES_FROM) * now else tuple(shares)


def _divided(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in parts of at least 1, as the weights are: what is left over goes, one by one, to who is done first."""
    more = total - len(weights)
    parts = [max(1, int(more * weight / sum(weights))) for weight in weights]
    for _ in range(total - sum(parts)):
        least = min(range(len(weights)), key=lambda at: ((parts[at] + 1) / weights[at], at))
        parts[least] += 1
    return parts
