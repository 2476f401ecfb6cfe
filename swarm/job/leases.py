"""The leases of islands: which microbatches each trains in which inner step, where leases follow speed.

    a period: as many inner steps as lie between two captures, of M microbatches each, of all islands together

    [ lease of island 0    | lease of island 1    ]      equal at first
    [ trained | tail       | trained | tail       ]  cut anew: the tails, laid end to end, in parts of other sizes
    [ trained | lease of 0      | .. | lease of 1 ]

All islands make the same inner steps, so steps, exchanges and checkpoints do not depend on leases. A slow island
trains less in each step. In step j of its n an island trains the numbers from j * p // n up to (j + 1) * p // n of its
p, so in each step an nth of them, rounded down or up. n <= p <= n * M, as no step is without microbatches, or has more
than the memory of a stage server was estimated for; an island that is lost may have none.

Equal leases have the numbers of islands with equal shares of each step (swarm/job/course.py).

Not chosen: equal leases in short periods, as gaia has, because the shorter a period is, the more often all islands wait
for the slowest. That a period waits until its cut is durable is the price.

Pure values; standard library only. Decision: docs/decisions/126.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise


@dataclass(frozen=True, slots=True)
class Cut:
    """From which inner step on, up to the end of their period, islands have which leases: [first, end) of numbers.

    Without leases: those that they would have anyway.
    """

    from_step: Mapping[int, int]
    leases: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @property
    def first_step(self) -> int:
        """The first inner step that it changes."""
        return min(self.from_step.values())


@dataclass(frozen=True, slots=True)
class _Lease:
    first: int  # inner step
    steps: int
    ranges: tuple[range, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.ranges))

    def until(self, step: int) -> int:
        """How many microbatches it has before an inner step."""
        return (step - self.first) * self.size // self.steps


class Leases:
    """The leases of a job, which begin equal; `microbatches` is the number of all in an inner step of the job."""

    def __init__(self, islands: int, microbatches: int, steps: int, every_steps: int) -> None:
        self.islands, self.microbatches = islands, microbatches
        self._steps, self._every = steps, every_steps
        self._cut: dict[int, list[list[_Lease]]] = {}  # by first step of a period: of each island, in order
        self._starts: list[int] = []  # its keys, sorted: a job may have 100,000
        self._more: list[list[int]] = []  # before each: how many microbatches more than with equal leases, by island
        self.decided = 0  # the periods before this inner step were cut, or left as they are
        self.closed: dict[int, int] = {}  # by island: the first inner step that it may not begin yet

    def period(self, step: int) -> range:
        """The inner steps of the period of an inner step."""
        first = step - step % self._every
        return range(first, min(first + self._every, self._steps))

    def count(self, island: int, step: int) -> int:
        """How many microbatches an island trains in an inner step; behind the last one lie closing merges only."""
        step = min(step, self._steps - 1)
        lease = self._lease(island, step)
        return lease.until(step + 1) - lease.until(step)

    def trained(self, island: int, steps: int) -> int:
        """How many microbatches the first inner steps of an island have."""
        more = self._more_until(bisect_left(self._starts, steps), island, steps)
        return steps * (self.microbatches // self.islands) + more

    def numbers(self, portion: int) -> Sequence[int]:
        """The microbatches of a portion, numbered through the job."""
        first = portion // (self._every * self.islands) * self._every
        island, offset = divmod(portion - first * self.islands, len(self.period(first)))
        lease = self._lease(island, step := first + offset)
        parts = _part(lease.ranges, lease.until(step), lease.until(step + 1))
        return parts[0] if len(parts) == 1 else tuple(chain.from_iterable(parts))

    def may_begin(self, island: int, step: int) -> bool:
        """Whether it is known for good what an island trains in an inner step, and it is something."""
        return step < self.closed.get(island, step + 1) and self.count(island, step) > 0

    # Cutting anew ------------------------------------------------------------------------------------------------

    def since(self, island: int, period: range) -> int:
        """From which inner step on an island has its newest lease of a period."""
        return self._of(period)[island][-1].first

    def tail(self, island: int, step: int) -> int:
        """How many microbatches an island has left from an inner step on, up to the end of the period."""
        return sum(map(len, self._tail(island, step)))

    def anew(self, from_step: Mapping[int, int], parts: Mapping[int, int]) -> Cut:
        """The tails of these islands, laid end to end, in parts of these sizes."""
        tails = tuple(chain.from_iterable(self._tail(island, step) for island, step in sorted(from_step.items())))
        leases, done = dict[int, tuple[tuple[int, int], ...]](), 0
        for island in sorted(from_step):
            ranges = _joined(_part(tails, done, done + parts[island]))
            leases[island], done = tuple((part.start, part.stop) for part in ranges), done + parts[island]
        return Cut(dict(from_step), leases)

    def fits(self, cut: Cut) -> bool:
        """Whether it gives the tails of its islands to the same islands, each no more than its steps can have."""
        if not cut.from_step or cut.first_step < 0 or (cut.leases and cut.leases.keys() != cut.from_step.keys()):
            return False
        period = self.period(cut.first_step)
        for island, step in cut.from_step.items():
            if not 0 <= island < self.islands or step not in period or step < self.since(island, period):
                return False
            sizes = [end - first for first, end in cut.leases.get(island, ())]
            if min(sizes, default=1) < 1 or sum(sizes) > (period.stop - step) * self.microbatches:
                return False
        tails = chain.from_iterable(self._tail(island, step) for island, step in cut.from_step.items())
        given = chain.from_iterable(_ranges(of) for of in cut.leases.values())
        return not cut.leases or _joined(sorted(tails, key=_first)) == _joined(sorted(given, key=_first))

    def cut(self, cut: Cut) -> None:
        """Enter new leases, which are later than all before."""
        assert self.fits(cut), f"{cut} does not fit"
        period = self.period(cut.first_step)
        self.decided = max(self.decided, period.stop)
        of = self._of(period)
        for island, ranges in cut.leases.items():
            step = cut.from_step[island]
            if of[island][-1].first == step:
                of[island].pop()
            of[island].append(_Lease(step, period.stop - step, _ranges(ranges)))
        if cut.leases:
            self._cut[period.start] = of
            self._total(period.start)

    def _total(self, start: int) -> None:
        """Count anew from a period on. A later one has seldom been cut before."""
        at = bisect_left(self._starts, start)
        if start not in self._starts[at : at + 1]:
            self._starts.insert(at, start)
        del self._more[at:]
        for place in range(at, len(self._starts)):
            self._more.append([self._more_until(place, island, self._steps) for island in range(self.islands)])

    def _more_until(self, place: int, island: int, steps: int) -> int:
        """How many microbatches more than with equal leases an island has in the first so many periods that were cut.

        Of the last one the first `steps` inner steps of the job count.
        """
        if place == 0:
            return 0
        period = self.period(self._starts[place - 1])
        stop = min(steps, period.stop)
        usual = (stop - period.start) * (self.microbatches // self.islands)
        return self._more[place - 1][island] + sum(_in_turn(self._cut[period.start][island], stop)) - usual

    def _of(self, period: range) -> list[list[_Lease]]:
        """The leases of each island in a period."""
        if (cut := self._cut.get(period.start)) is not None:
            return cut
        share = len(period) * self.microbatches // self.islands
        begin = period.start * self.microbatches
        firsts = range(begin, begin + share * self.islands, share)
        return [[_Lease(period.start, len(period), (range(first, first + share),))] for first in firsts]

    def _lease(self, island: int, step: int) -> _Lease:
        return next(lease for lease in reversed(self._of(self.period(step))[island]) if lease.first <= step)

    def _tail(self, island: int, step: int) -> tuple[range, ...]:
        lease = self._lease(island, step)
        return _part(lease.ranges, lease.until(step), lease.size)


def fill(total: int, islands: Mapping[int, tuple[float, float, int, int]], most: int) -> dict[int, int]:
    """`total` microbatches in parts, so that islands end as early as can be.

    Of each island: when it is free in seconds, how many it trains a second, its steps, and how many each of these has
    at least; it has `most` at most.
    """

    def until(end_s: float) -> dict[int, int]:
        return {
            island: int(min(max(steps * least, (end_s - free_s) * rate), steps * most))
            for island, (free_s, rate, steps, least) in islands.items()
        }

    early_s = min(free_s for free_s, *_ in islands.values())
    late_s = max(free_s for free_s, *_ in islands.values()) + total / min(rate for _, rate, *_ in islands.values())
    for _ in range(60):
        middle_s = (early_s + late_s) / 2
        early_s, late_s = (middle_s, late_s) if sum(until(middle_s).values()) <= total else (early_s, middle_s)
    parts = until(early_s)
    for _ in range(total - sum(parts.values())):
        ends_s = {
            island: free_s + (parts[island] + 1) / rate
            for island, (free_s, rate, steps, _) in islands.items()
            if parts[island] < steps * most
        }
        parts[min(ends_s, key=lambda island: (ends_s[island], island))] += 1
    return parts


def _in_turn(leases: Sequence[_Lease], stop: int) -> Iterator[int]:
    """What an island trains of each of its leases, before an inner step."""
    ends = [*(later.first for _, later in pairwise(leases)), stop]
    for lease, end in zip(leases, ends, strict=True):
        if lease.first < stop:
            yield lease.until(min(end, stop))


def _part(ranges: Iterable[range], first: int, end: int) -> tuple[range, ...]:
    """The numbers from `first` up to `end` of those in the ranges."""
    found = []
    for numbers in ranges:
        if first < len(numbers) and end > max(first, 0):
            found.append(numbers[max(first, 0) : end])
        first, end = first - len(numbers), end - len(numbers)
    return tuple(found)


def _joined(ranges: Iterable[range]) -> tuple[range, ...]:
    """The same ranges, and one in the place of two where the second begins at the end of the first."""
    found: list[range] = []
    for numbers in ranges:
        if found and found[-1].stop == numbers.start:
            found[-1] = range(found[-1].start, numbers.stop)
        else:
            found.append(numbers)
    return tuple(found)


def _ranges(lease: Iterable[tuple[int, int]]) -> tuple[range, ...]:
    return tuple(range(first, end) for first, end in lease)


def _first(numbers: range) -> int:
    return numbers.start
