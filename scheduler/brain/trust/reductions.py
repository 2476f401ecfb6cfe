"""Verdicts on members of a round that report a slice differently, as pure functions of their reports.

A reader took all parts of the slice once more and reduced them; the owner reports the parts that it took in the round.

    a reader gets the mean that all hold ──────────────▶ alike
    it does not ──ask another reader──┬─ parts differ ─▶ their giver and their taker contradict each other
                                      ├─ readers agree ▶ the owner is wrong
                                      └─ they do not ──▶ the odd one is wrong
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from scheduler.brain.commit.digests import outvoted
from swarm.types import PeerId
from swarm.wire.messages import Rechecked


class Stand(Enum):
    """Where the matter stands."""

    ASKS = auto()
    ALIKE = auto()
    WRONG = auto()  # `wrong` are proven wrong
    CONTRADICTED = auto()  # the two in `pair` contradict each other
    UNANSWERED = auto()


@dataclass(frozen=True, slots=True)
class Sums:
    """Hashes of a member's report: the parts it took, the mean it computed, and the mean it was given."""

    took: tuple[str, ...]
    computed: str
    held: str

    @classmethod
    def of(cls, event: Rechecked) -> Sums:
        return cls(event.took, event.computed, event.held)

    @property
    def is_right(self) -> bool:
        return self.computed == self.held


@dataclass(frozen=True, slots=True)
class ReductionFinding:
    """The verdict that follows from the reports."""

    stand: Stand
    wrong: tuple[PeerId, ...] = ()
    pair: tuple[PeerId, ...] = ()


def finding(
    owner: PeerId, members: Sequence[PeerId], said: Mapping[PeerId, Sums], *, may_ask: bool
) -> ReductionFinding:
    """The verdict on the owner's slice; `may_ask`: another reader could be asked."""
    readers = [peer for peer in said if peer != owner]
    if not readers:
        return ReductionFinding(Stand.ASKS if may_ask else Stand.UNANSWERED)
    if all(said[peer].is_right for peer in readers):
        return ReductionFinding(Stand.ALIKE)
    if len(readers) == 1 and may_ask:
        return ReductionFinding(Stand.ASKS)
    for at, giver in enumerate(members):
        took = {peer: word.took[at] for peer, word in said.items()}
        if odd := outvoted(took):
            taker = next(peer for peer in (*odd, *said) if peer != giver)
            return ReductionFinding(Stand.CONTRADICTED, pair=(giver, taker))
    results = {peer: (word.computed, word.held) for peer, word in said.items()}
    odd = outvoted(results)
    if len(odd) == len(said) or len(readers) == 1:
        return ReductionFinding(Stand.CONTRADICTED, pair=(readers[0], readers[1] if len(readers) > 1 else owner))
    is_right = all(said[peer].is_right for peer in said if peer not in odd)
    return ReductionFinding(Stand.WRONG, wrong=odd if is_right else tuple(sorted({*odd, owner})))
