"""Islands without which the others go on, once nothing has moved for `limits.no_progress_s`. Pure.

the others wait at the outer step, or have trained all ──▶ those that have not come so far
an envoy says nothing, though its round must be over by now ──▶ its island
envoys do not reach each other ──▶ all but the largest group in which none failed to reach another
the last checkpoint lacks parts, a second time ──▶ those that did not hand them over

island 0 ── island 1
     ╲         ╱
      island 2         no link of 2 works: 0 and 1 go on
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations

from scheduler.brain.islands.outer_steps import OuterSteps
from scheduler.brain.islands.roster import Roster
from swarm.text import listed

HINT = "look at the link between them, or raise averaging.timeout_s if it is only slow"


def given_up(roster: Roster, outer: OuterSteps, for_s: float, now_s: float) -> dict[int, str]:
    """Who is given up, and why; empty if too few would be left, or nobody is known to be at fault."""
    found = _at_fault(roster, outer, for_s, now_s)
    return found if len(roster.present) - len(found) >= max(1, roster.least) else {}


def _at_fault(roster: Roster, outer: OuterSteps, for_s: float, now_s: float) -> dict[int, str]:
    islands = roster.at_work()
    if all(one.saves_only for one in islands.values()):
        owing = {n: listed(peers) for n, one in islands.items() if (peers := one.owing(again=True))}
        told = f"handed over no part of the checkpoint for {for_s:g} s, a second time"
        return {n: f"{peers} {told}" for n, peers in owing.items()}
    behind = [n for n, one in islands.items() if one.outer_step is None and not one.saves_only]
    if behind:
        return dict.fromkeys(behind, f"no step was committed for {for_s:g} s, and the other islands wait")
    if silent := outer.silent(now_s):
        return dict.fromkeys(silent, f"its stage servers said nothing of the exchange for {for_s:g} s")
    apart = outer.apart()
    stay = largest_group({n: sum(map(len, one.peers)) for n, one in islands.items()}, apart)
    return {n: _told(n, apart, for_s) for n in islands if n not in stay}


def largest_group(sizes: Mapping[int, int], apart: Collection[frozenset[int]]) -> tuple[int, ...]:
    """The largest group of islands of which no two are `apart`.

    Of several the one with the most stage servers, by `sizes`; then the one with the lowest numbers.
    """
    groups = [group for many in range(len(sizes) + 1) for group in combinations(sorted(sizes), many)]
    able = [group for group in groups if not any(pair.issubset(group) for pair in apart)]
    return max(able, key=lambda group: (len(group), sum(sizes[one] for one in group), [-one for one in group]))


def _told(island: int, apart: Mapping[frozenset[int], str], for_s: float) -> str:
    said = {other: told for pair, told in apart.items() if island in pair for other in pair - {island}}
    others = listed(f"island {other}" for other in said)
    return f"it could not exchange with {others} for {for_s:g} s: {said[min(said)]}; {HINT}"
