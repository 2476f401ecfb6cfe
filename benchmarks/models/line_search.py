"""DT-FM: what an assignment of peers to stages costs by the model of the paper, and its search for a cheap one.

    group   the peers of a stage; all groups are of one size. A member averages with each other member, which takes
            2 (delay + gradient / (members * rate)) each. The slowest member of all groups counts.
    hop     from group to group, whose members are matched one to one so that the slowest pair is as fast as can be:
            delay + activations / rate of that pair
    line    the groups in the order of stages, by the shortest way through all of them; each hop counts forth and back

The delay and the rate of a pair are the means of both directions. A hop carries the activations of the whole batch, as
if no microbatch overlapped another, so the cost of a line is an upper bound. The model has equal devices, and no
replica that sends to any other, as ours do. A seed gives the same line everywhere.

Source: Decentralized Training of Foundation Models in Heterogeneous Environments, arXiv 2206.01288, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from math import fsum
from random import Random

import numpy as np
from numpy.typing import NDArray

from swarm.errors import InvalidConfig

Group = tuple[int, ...]  # peers, in ascending order
Table = Sequence[Sequence[float]]  # peers x peers

GROUPS_MAX = 16  # the shortest way takes time and memory that grow as 2^groups
POPULATION, TRIALS, CROSSED = 100, 4900, 5


@dataclass(frozen=True, slots=True)
class PeerPairs:
    """Seconds between each two peers: to average as members of one group, and for a hop as members of two."""

    averaging_s: Table
    hop_s: Table
    known: dict[tuple[Group, Group], float] = field(default_factory=dict)  # hops that were worked out

    def hop(self, one: Group, other: Group) -> float:
        """Seconds from group to group, by the best matching."""
        both = (one, other) if one < other else (other, one)
        if both not in self.known:
            self.known[both] = slowest_matched([[self.hop_s[a][b] for b in other] for a in one])
        return self.known[both]


@dataclass(frozen=True, slots=True)
class PeerLine:
    """Groups in the order of stages, and what they cost; `cost_s` is in whole nanoseconds, so that equals are equal."""

    groups: tuple[Group, ...]
    averaging_s: float
    hops_s: float

    @property
    def cost_s(self) -> float:
        return round(self.averaging_s + self.hops_s, 9)


def peer_pairs(delay_s: Table, bits_per_s: Table, members: int, gradient_bytes: float, hop_bytes: float) -> PeerPairs:
    """The seconds of all pairs, in groups of `members`; tables need not be symmetric, and diagonals do not count."""
    averaging_s, hop_s = ([[0.0] * len(delay_s) for _ in delay_s] for _ in range(2))
    for one, other in combinations(range(len(delay_s)), 2):
        delay = (delay_s[one][other] + delay_s[other][one]) / 2.0
        rate = (bits_per_s[one][other] + bits_per_s[other][one]) / 2.0
        averaging_s[one][other] = averaging_s[other][one] = 2.0 * (delay + 8.0 * gradient_bytes / (members * rate))
        hop_s[one][other] = hop_s[other][one] = delay + 8.0 * hop_bytes / rate
    return PeerPairs(averaging_s, hop_s)


def in_order(peers: Sequence[int], groups: int) -> list[Group]:
    """The peers cut into groups as they come; InvalidConfig if that leaves a rest, or for more than GROUPS_MAX."""
    if not 0 < groups <= min(len(peers), GROUPS_MAX) or len(peers) % groups:
        raise InvalidConfig(
            f"DT-FM has no cost for {len(peers)} peers in {groups} groups: it wants at most {GROUPS_MAX} of equal size",
            hint="choose another number of stages, or leave some of the peers out",
        )
    members = len(peers) // groups
    return [tuple(sorted(peers[first : first + members])) for first in range(0, len(peers), members)]


def lined_up(pairs: PeerPairs, groups: Sequence[Group]) -> PeerLine:
    """The groups by the shortest way through all of them."""
    way, hops_s = shortest_way(
        [[pairs.hop(group, other) if group != other else 0.0 for other in groups] for group in groups]
    )
    averaging_s = max(fsum(pairs.averaging_s[peer][other] for other in group) for group in groups for peer in group)
    return PeerLine(tuple(groups[group] for group in way), averaging_s, 2.0 * hops_s)


def search(pairs: PeerPairs, groups: int, seed: int, trials: int = TRIALS) -> PeerLine:
    """The cheapest line that the genetic search finds, never a dearer one than the peers in order; InvalidConfig.

    A child takes the place of the worse of its parents unless it is worse than both.
    """
    peers, rng = range(len(pairs.hop_s)), Random(seed)
    given = lined_up(pairs, in_order(peers, groups))
    living = [lined_up(pairs, in_order(rng.sample(peers, len(peers)), groups)) for _ in range(POPULATION)]
    for _ in range(trials if groups > 1 else 0):
        one, other = rng.sample(range(POPULATION), 2)
        line = lined_up(pairs, _circled(pairs.hop_s, _crossed(living[one].groups, living[other].groups, rng)))
        worse = max(one, other, key=lambda parent: living[parent].cost_s)
        if line.cost_s <= living[worse].cost_s:
            living[worse] = line
    return min(given, *living, key=lambda line: (line.cost_s, line.groups))


def _crossed(groups: Sequence[Group], others: Sequence[Group], rng: Random) -> list[Group]:
    """The first parent's groups, but CROSSED peers stand where they do in the second; sizes are mended."""
    place = {peer: number for number, group in enumerate(groups) for peer in group}
    there = {peer: number for number, group in enumerate(others) for peer in group}
    for peer in rng.sample(range(len(place)), min(CROSSED, len(place))):
        place[peer] = there[peer]
    child = [[peer for peer in range(len(place)) if place[peer] == number] for number in range(len(groups))]
    for short in child:
        while len(short) < len(groups[0]):
            short.append(max(child, key=len).pop(0))
    return [tuple(sorted(group)) for group in child]


def _circled(hop_s: Table, groups: Sequence[Group]) -> list[Group]:
    """The groups after peers moved in a circle, from whichever group and as far as that gains most.

    An end of its fastest link leaves each group, for the group to which its links are slowest: averaging sends less
    than hops do, so the fast links are for hops. No group comes twice, and the last peer closes the circle.
    """
    ends = [
        min(((hop_s[one][other], one) for one, other in combinations(group, 2)), default=(0.0, group[0]))
        for group in groups
    ]
    gains = [[fsum(hop_s[peer][other] for other in to) / len(to) - least_s for to in groups] for least_s, peer in ends]
    best, circle = 0.0, [0]
    for first in range(len(groups)):
        path, gained = [first], 0.0
        while len(path) < len(groups):
            left = [group for group in range(len(groups)) if group not in path]
            after = max(left, key=gains[path[-1]].__getitem__)
            gained += gains[path[-1]][after]
            path.append(after)
            if round(gained + gains[after][first] - best, 9) > 0.0:
                best, circle = gained + gains[after][first], list(path)
    moved = [set(group) for group in groups]
    for here, after in zip(circle, circle[1:] + circle[:1], strict=True):
        moved[here].remove(ends[here][1])
        moved[after].add(ends[here][1])
    return [tuple(sorted(group)) for group in moved]


def slowest_matched(seconds: Table) -> float:
    """The slowest pair of the perfect matching of rows to columns whose slowest pair is the fastest."""
    least = max(max(map(min, seconds)), max(map(min, zip(*seconds, strict=True))))
    levels = sorted({cell for row in seconds for cell in row if cell >= least})  # the first is mostly enough
    return next(level for level in levels if _is_matched([[cell <= level for cell in row] for row in seconds]))


def _is_matched(may: Sequence[Sequence[bool]]) -> bool:
    """Whether each row can have one of the columns that it may have for itself."""
    owner: dict[int, int] = {}

    def takes(row: int, seen: set[int]) -> bool:
        for column in (column for column, it_may in enumerate(may[row]) if it_may and column not in seen):
            seen.add(column)
            if column not in owner or takes(owner[column], seen):
                owner[column] = row
                return True
        return False

    return all(takes(row, set()) for row in range(len(may)))


def shortest_way(seconds: Table) -> tuple[list[int], float]:
    """The order of the shortest way through all, and its length (Held and Karp); the table is symmetric."""
    step, count = np.array(seconds), len(seconds)
    ways = np.full((1 << count, count), np.inf)  # by the set of those passed, and by the last of them
    ways[1 << np.arange(count), np.arange(count)] = 0.0
    for sets, members in _sets(count):
        ways[sets[:, None], members] = (ways[sets[:, None] ^ (1 << members)] + step[members]).min(axis=2)
    passed, way = (1 << count) - 1, [int(ways[-1].argmin())]
    while passed := passed ^ (1 << way[-1]):
        way.append(int((ways[passed] + step[way[-1]]).argmin()))
    return (way if way[0] <= way[-1] else way[::-1]), float(ways[-1].min())


@cache
def _sets(count: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """All sets of two, of three, and so on, as bits, and the members of each."""
    chosen = (np.array(list(combinations(range(count), size))) for size in range(2, count + 1))
    return [((1 << members).sum(axis=1), members) for members in chosen]
