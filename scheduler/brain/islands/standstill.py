"""The islands to evict once nothing has moved for `limits.no_progress_s`. Pure.

the others wait at the outer step, or have trained all ──▶ the islands that have not come so far
envoys say nothing in round after round ──▶ their island
envoys do not reach each other ──▶ all but the largest group in which no island failed to reach another
the last checkpoint lacks parts, a second time ──▶ the islands that did not hand them over

island 0 ── island 1
     ╲         ╱
      island 2         no link of 2 works: 0 and 1 go on

Decision: docs/decisions/193.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations

from scheduler.brain.islands.exchange import Rift
from scheduler.brain.islands.outer_steps import OuterSteps
from scheduler.brain.islands.roster import Roster
from swarm.text import listed

HINT = "raise averaging.timeout_s and limits.no_progress_s if they are only slow"


def given_up(roster: Roster, outer: OuterSteps, for_s: float, now_s: float) -> dict[int, str]:
    """The islands to evict, each with the reason. Empty if too few would remain or the fault is unknown."""
    found = _at_fault(roster, outer, for_s, now_s)
    if len(roster.present) - len(found) < max(1, roster.least):
        return {}
    outer.parted |= {pair for pair in outer.rifts(now_s) if len(pair & found.keys()) == 1}
    return found


def _at_fault(roster: Roster, outer: OuterSteps, for_s: float, now_s: float) -> dict[int, str]:
    islands = roster.at_work()
    if all(one.saves_only for one in islands.values()):
        owing = {n: listed(peers) for n, one in islands.items() if (peers := one.owing(again=True))}
        told = f"handed over no part of the checkpoint for {for_s:g} s, a second time"
        return {n: f"{peers} {told}" for n, peers in owing.items()}
    behind = [n for n, one in islands.items() if one.outer_step is None and not one.saves_only]
    if behind:
        return dict.fromkeys(behind, f"no step was committed for {for_s:g} s, and the other islands wait")
    rifts = outer.rifts(now_s)
    sizes = {n: sum(map(len, one.peers)) for n, one in islands.items()}
    stay = largest_group(sizes, rifts, doubts(rifts.keys() | outer.parted), Counter(one.by for one in rifts.values()))
    return {n: _told(n, rifts, for_s) for n in islands if n not in stay}


def largest_group(
    sizes: Mapping[int, int], apart: Collection[frozenset[int]], *doubts: Mapping[int | None, int]
) -> tuple[int, ...]:
    """The largest group of islands in which no island, and no pair, is in `apart`.

    Among equals, the group whose islands have the fewest `doubts`, one kind after the other; then the most stage
    servers (`sizes`); then the lowest numbers.
    """
    groups = [group for many in range(len(sizes) + 1) for group in combinations(sorted(sizes), many)]
    able = [group for group in groups if not any(one.issubset(group) for one in apart)]

    def worth(group: tuple[int, ...]) -> tuple[object, ...]:
        doubted = [-sum(of.get(one, 0) for one in group) for of in doubts]
        return len(group), doubted, sum(sizes[one] for one in group), [-one for one in group]

    return max(able, key=worth)


def doubts(apart: Iterable[frozenset[int]]) -> Counter[int | None]:
    """With how many islands each could not exchange, now or when one of the pair was evicted."""
    return Counter(island for pair in apart if len(pair) > 1 for island in pair)


def _told(island: int, rifts: Mapping[frozenset[int], Rift], for_s: float) -> str:
    if alone := rifts.get(frozenset((island,))):
        return f"its stage servers took part in no exchange for {for_s:g} s: {alone.said} (look at their logs; {HINT})"
    said = {other: rift.said for pair, rift in rifts.items() if island in pair for other in pair - {island}}
    others = f"island{'s' * (len(said) > 1)} {listed(map(str, said))}"
    why = f"{said[min(said)]} (look at the links between them; {HINT})"
    return f"it could not exchange with {others} for {for_s:g} s: {why}"
