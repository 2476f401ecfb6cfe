"""Pairs of peers that cannot reach each other: links to be avoided, and rounds that failed because of them.

A failed delivery accuses a link, never a peer: two peers that cannot reach each other may both be well.

Decisions: docs/decisions/022, 102.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from swarm.types import PeerId

LINK_AVOIDED_S = 10.0  # then it is tried again
LINK_COST_S = 1e6  # more than any route costs: a failing link is used only if there is no other way
LINK_DEAD_S = 4.0  # so long it must fail until work that cannot pass it is given up: senders report every 5 s
ROUND_AGAIN_S = (0.2, 5.0)  # pause before a round that failed twice is repeated, and the longest one
ROUNDS_MAX = 4  # failures of one pair in one step before one of the two leaves the job
ROUNDS_SEEN_MAX = 2  # of a pair of which the scheduler cannot dial one either, before that one leaves


class Links:
    """Pairs of peers between which a delivery failed lately."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[PeerId, PeerId], float] = {}
        self._since_s: dict[tuple[PeerId, PeerId], float] = {}

    def accuse(self, one: PeerId, other: PeerId, now_s: float) -> None:
        """A delivery between the two failed, in either direction."""
        self.any(now_s)
        self._since_s.setdefault(pair_of(one, other), now_s)
        self._until_s[pair_of(one, other)] = now_s + LINK_AVOIDED_S

    def fails(self, one: PeerId, other: PeerId) -> bool:
        """Whether the link must be avoided, as of the last `any`."""
        return pair_of(one, other) in self._until_s

    def any(self, now_s: float) -> bool:
        """Whether any link must be avoided now; old accusations are forgotten."""
        for pair in [pair for pair, until_s in self._until_s.items() if until_s <= now_s]:
            del self._until_s[pair], self._since_s[pair]
        return bool(self._until_s)

    def failed_for_s(self, one: PeerId, other: PeerId, now_s: float) -> float:
        """Seconds since the link was first accused, if it has been ever since; else 0."""
        return now_s - self._since_s.get(pair_of(one, other), now_s)

    def failing(self, now_s: float) -> dict[tuple[PeerId, PeerId], float]:
        """The links that must be avoided now, and until when."""
        return {pair: until_s for pair, until_s in self._until_s.items() if until_s > now_s}

    def touches(self, peer: PeerId) -> bool:
        """Whether any link of the peer must be avoided, as of the last `any`."""
        return any(peer in pair for pair in self._until_s)

    def cost_s(self, one: PeerId, other: PeerId) -> float:
        """The cost that the link adds to a route."""
        return LINK_COST_S if self.fails(one, other) else 0.0

    def forget(self, peer: PeerId) -> None:
        """The peer is gone, and its links with it."""
        for pair in [pair for pair in self._until_s if peer in pair]:
            del self._until_s[pair], self._since_s[pair]


def pair_of(one: PeerId, other: PeerId) -> tuple[PeerId, PeerId]:
    """The two peers in order."""
    return (one, other) if one <= other else (other, one)


@dataclass(slots=True)
class Troubles:
    """The failed rounds of one unit in one step."""

    failures: int = 0
    pairs: Counter[tuple[PeerId, PeerId]] = field(default_factory=Counter)  # a pair of one peer: it accuses nobody
    retry_s: float = 0.0
    told: str = ""  # the newest failure, for a person

    def failed(self, by: PeerId, accused: PeerId | None, now_s: float) -> int:
        """Note a failure; gives how often this pair has failed."""
        first_s, longest_s = ROUND_AGAIN_S
        self.retry_s = now_s + (min(longest_s, first_s * 2**self.failures) if self.failures else 0.0)
        self.failures += 1
        pair = pair_of(by, accused or by)
        self.told = f"{by} could not" if accused is None else f"{pair[0]} and {pair[1]} do not reach each other"
        self.pairs[pair] += 1
        return self.pairs[pair]

    def owners(self, members: Iterable[PeerId]) -> list[float] | None:
        """Shares of a round in which no failing pair exchanges slices; None if there is none, or none is needed.

        A member without a slice sends its parts to the owners and gets the means from them. So two members that cannot
        reach each other may both take part, as long as a third owns everything.
        """
        troubled = {peer for pair in self.pairs for peer in pair}
        shares = [0.0 if peer in troubled else 1.0 for peer in members]
        return shares if troubled and any(shares) else None

    def leaver(self, pair: Collection[PeerId], spare: Collection[PeerId], share: Mapping[PeerId, int]) -> PeerId | None:
        """The one of a pair that leaves, if it can be spared: it failed with more others, or else contributed less."""
        candidates = sorted(set(pair) & set(spare), reverse=True)
        partners = {peer: len({other for both in self.pairs if peer in both for other in both}) for peer in candidates}
        return max(candidates, key=lambda peer: (partners[peer], -share.get(peer, 0)), default=None)
