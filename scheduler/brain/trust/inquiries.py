"""Inquiries: one hop computed again for comparison, with the answers, the next replica to ask, and the end.

holder's word ──ask another──▶ alike: fine
                               unlike ──ask a third──▶ a majority: the odd one is wrong
                                          └─ no other ─────ask both again──▶ the one that contradicts itself is wrong
                                                                             else unclear
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from scheduler.brain.trust.verdicts import Place, Work, odd_ones
from swarm.types import Hop, PeerId

TRIES_MAX = 3  # checkers that do not answer, or were given other inputs


class Stand(Enum):
    """Where an inquiry stands."""

    ASKS = auto()  # somebody has to compute it
    ALIKE = auto()
    ODD = auto()  # a majority says otherwise than some
    SPLIT = auto()  # nobody can decide
    UNANSWERED = auto()  # it cannot be computed again


@dataclass(slots=True)
class Inquiry:
    """The inquiry into one hop. `said` has the words that can be compared, as they are about the same inputs."""

    place: Place
    holder: PeerId  # whose gradient counts
    device: str  # of the holder: others may round differently
    guard: str
    said: dict[PeerId, Work]
    again: dict[PeerId, Work] = field(default_factory=dict)  # second words, where nobody else can decide
    asked: PeerId | None = None
    number: int = 0  # of the request
    since_s: float = 0.0
    near: tuple[Hop | None, ...] = ()  # hops beside ours as they were when it was asked
    passed: set[PeerId] = field(default_factory=set)  # checkers that were of no use
    tries: int = 0

    @property
    def is_dispute(self) -> bool:
        """Whether different things were said."""
        return len({work.results for work in self.said.values()}) > 1

    def stand(self, others: Iterable[PeerId]) -> Stand:
        """Where it stands, if `others` could be asked beside those that have spoken."""
        odd = odd_ones(self.said)
        if len(self.said) > 1 and not odd:
            return Stand.ALIKE
        if odd and len(odd) < len(self.said):
            return Stand.ODD
        may_ask = self.tries < TRIES_MAX
        if may_ask and any(other not in self.said and other not in self.passed for other in others):
            return Stand.ASKS
        if not self.is_dispute:
            return Stand.UNANSWERED
        needs_second = len(self.said) == 2 and len(self.again) < 2
        return Stand.ASKS if may_ask and needs_second else Stand.SPLIT

    def candidates(self, others: Iterable[PeerId]) -> list[PeerId]:
        """The replicas to ask: those that have not answered; if there are none, those that have, a second time."""
        fresh = [other for other in others if other not in self.said and other not in self.passed]
        if fresh or not self.is_dispute:
            return fresh
        return [peer for peer in self.said if peer not in self.again and peer in others]

    def answered(self, peer: PeerId, work: Work) -> bool:
        """Note the answer; False if it is about other inputs, so that nothing can be compared."""
        self.asked = None
        if work.inputs != next(iter(self.said.values())).inputs:
            self.gave_up(peer)
            return False
        if peer in self.said:
            self.again[peer] = work
        else:
            self.said[peer] = work
        return True

    def gave_up(self, peer: PeerId) -> None:
        """The asked one is of no use."""
        self.asked = None
        self.passed.add(peer)
        self.tries += 1
