"""Excuses for a failed round that cannot be checked, and how often a member may give them.

    no relay answers ──┬── others say so too ──▶ excused: relays are to blame, and no member leaves
                       └── it alone says so ──▶ excused ALONE_MAX times in WINDOW_S, then it leaves
    its set is not the ledger's ──────────────▶ done again SETS_MAX times in WINDOW_S, then it leaves

Rounds that fail again and again begin at most five seconds after each other: alone, a member delays a step by about
forty seconds. A restart of a relay takes less. No other member leaves for a false excuse. The delay has no bound here
if two members agree, if the one has a stage to itself and so cannot leave, or if the scheduler sees no relay and one of
the pair has no address (rounds.py): then the job waits, until limits.no_progress_s. Decision: docs/decisions/102.
"""

from __future__ import annotations

from scheduler.brain.state.links import ROUNDS_MAX
from swarm.types import PeerId

ALONE_MAX = 12
SETS_MAX = ROUNDS_MAX
WINDOW_S = 600.0
TOGETHER_S = 60.0  # two that blame relays within so long agree


class Excuses:
    """The excuses that the members of one job gave for failed rounds."""

    def __init__(self) -> None:
        self._blamed_s: dict[PeerId, float] = {}  # when each blamed relays, the last time
        self._alone: dict[PeerId, list[float]] = {}
        self._sets: dict[PeerId, list[float]] = {}

    def blames_relays(self, peer: PeerId, now_s: float) -> None:
        """The member says that no relay answers, also of a round that was given up already."""
        self._blamed_s[peer] = now_s

    def excuses(self, peer: PeerId, now_s: float) -> bool:
        """Whether relays are to blame that a round has failed, as the member says."""
        others = [at_s for other, at_s in self._blamed_s.items() if other != peer]
        return any(now_s - at_s < TOGETHER_S for at_s in others) or _again(self._alone, peer, now_s) <= ALONE_MAX

    def other_set(self, peer: PeerId, now_s: float) -> bool:
        """The member holds another set than the ledger; whether it may go on."""
        return _again(self._sets, peer, now_s) <= SETS_MAX


def _again(book: dict[PeerId, list[float]], peer: PeerId, now_s: float) -> int:
    """Note it once more; how often it was within the window."""
    book[peer] = [at_s for at_s in book.get(peer, []) if now_s - at_s < WINDOW_S]
    book[peer].append(now_s)
    return len(book[peer])
