"""Audits and their inquiries: one question to one replica after another, until a verdict is possible.

one has spoken ──ask another──▶ alike: fine
                                unlike ──ask a third──▶ a majority: the odd one is wrong
                                           └─ no other──▶ split
nobody answers ─────────────────────────────────────────▶ unanswered
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from scheduler.brain.commit.digests import Remedy, outvoted
from scheduler.brain.inputs import Stored
from scheduler.brain.state.step import StepRun
from swarm.types import PeerId
from swarm.wire.messages import Event

ANSWER_S_MAX = 30.0  # then another replica is asked
TRIES_MAX = 3  # replicas that do not answer, or whose answer cannot be compared


class ReplicaAudit:
    """A way to find replicas that give wrong numbers; each method defaults to doing nothing.

    The job's brain passes events to it, asks it in each step, and carries out its remedies. A step gets no row while
    an audit forbids it.
    """

    def hear(self, peer: PeerId, event: Event | Stored, now_s: float) -> bool:
        """Take an event in; False if this audit does not await it."""
        return False

    def draw(self, run: StepRun, now_s: float) -> None:
        """Choose what to check in an averaged step, once for the same rounds."""
        return

    def look(self, now_s: float) -> list[Remedy]:
        """Compare reports on open steps, and ask for more. Returns remedies for replicas that are wrong."""
        return []

    def look_at_checkpoint(self, now_s: float) -> list[Remedy]:
        """The same for the checkpoint that is under way."""
        return []

    def waiting_for(self, step: int) -> str:
        """What the step waits for; empty if no check of it is open."""
        return ""

    def close(self, step: int) -> None:
        """The step's row is durable: forget the reports on it."""
        return

    def times_s(self) -> list[float]:
        """When answers are overdue."""
        return []


class InquiryState(Enum):
    """The state of an inquiry, given the replicas that could still be asked."""

    ASKS = auto()  # another replica is to be asked
    ALIKE = auto()
    ODD = auto()  # a majority contradicts some
    SPLIT = auto()  # no majority
    UNANSWERED = auto()


About = TypeVar("About")
Answer = TypeVar("Answer")


@dataclass(slots=True)
class Inquiry(Generic[About, Answer]):
    """An inquiry and the answers that can be compared."""

    about: About
    said: dict[PeerId, Answer] = field(default_factory=dict)
    patience_s: float = ANSWER_S_MAX
    asked: PeerId | None = None
    since_s: float = 0.0
    numbers: list[int] = field(default_factory=list)  # of the requests
    passed: set[PeerId] = field(default_factory=set)  # replicas that were of no use
    tries: int = 0

    @property
    def due_s(self) -> float:
        """When the answer is overdue."""
        return self.since_s + self.patience_s

    def ask(self, peer: PeerId, number: int, now_s: float) -> None:
        self.asked, self.since_s = peer, now_s
        self.numbers.append(number)

    def awaits(self, peer: PeerId, number: int) -> bool:
        """Whether the newest request went to this replica under this number."""
        return self.asked == peer and self.numbers[-1] == number

    def answered(self, peer: PeerId, answer: Answer) -> None:
        """Note an answer; others than the asked replica may answer too."""
        self.said[peer] = answer
        if peer == self.asked:
            self.asked = None

    def gave_up(self) -> None:
        """Note that the asked replica is of no use."""
        if self.asked is not None:
            self.passed.add(self.asked)
            self.tries += 1
        self.asked = None

    def waits(self, now_s: float, may_answer: Callable[[PeerId], bool]) -> bool:
        """Whether an answer may still come. Gives up a replica that is late, or may not answer any more."""
        if self.asked is not None and (now_s >= self.due_s or not may_answer(self.asked)):
            self.gave_up()
        return self.asked is not None

    def next_ones(self, others: Iterable[PeerId]) -> list[PeerId]:
        """The replicas, among others, that may be asked; none after too many tries."""
        fresh = [other for other in others if other not in self.said and other not in self.passed]
        return fresh if self.tries < TRIES_MAX else []


def vote(said: Mapping[PeerId, Hashable], *, may_ask: bool) -> InquiryState:
    """The state that follows from the answers; `may_ask`: another replica could be asked."""
    odd = outvoted(said)
    if len(said) > 1 and not odd:
        return InquiryState.ALIKE
    if odd and len(odd) < len(said):
        return InquiryState.ODD
    if may_ask:
        return InquiryState.ASKS
    return InquiryState.SPLIT if len(said) > 1 else InquiryState.UNANSWERED
