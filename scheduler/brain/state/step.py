"""The life of one optimizer step, and what may overlap.

      FEEDING ──full──▶ AVERAGING ──averaged──▶ DECIDED ──written──▶ WRITING ──durable──▶ COMMITTING ──agreed──▶ DONE
         │  ▲               │                     │  ▲
         │  └───reopened────┴─────────────────────┘  │   from DECIDED: no replica of a stage holds the average any more
         └──────────────── not finite ───────────────┘   skip: no rounds, no change

Up to DECIDED everything can be done again; the durable row makes the step a fact. Steps overlap only at their ends: a
microbatch is fed once the commit that made its weights was sent (which: `version_of` in swarm/job/schedule.py), and the
row of step t is written once that of step t - 1 is durable and the replicas agree on the commit of step t - 2.

Decision: docs/decisions/032.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.brain.outputs import CommitRow
from scheduler.brain.state.links import Troubles
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Averaged, Committed, Member


class Phase(StrEnum):
    """Where a step stands."""

    FEEDING = "feeding"
    AVERAGING = "averaging"
    DECIDED = "decided"
    WRITING = "writing"
    COMMITTING = "committing"
    DONE = "done"


class StepEvent(StrEnum):
    """The events that move a step on."""

    FULL = "full"
    NOT_FINITE = "not finite"
    REOPENED = "reopened"
    AVERAGED = "averaged"
    WRITTEN = "row handed to the store"
    DURABLE = "row durable"
    AGREED = "all replicas agree"


TRANSITIONS: dict[tuple[Phase, StepEvent], Phase] = {
    (Phase.FEEDING, StepEvent.FULL): Phase.AVERAGING,
    (Phase.FEEDING, StepEvent.NOT_FINITE): Phase.DECIDED,
    (Phase.AVERAGING, StepEvent.REOPENED): Phase.FEEDING,
    (Phase.AVERAGING, StepEvent.AVERAGED): Phase.DECIDED,
    (Phase.DECIDED, StepEvent.REOPENED): Phase.FEEDING,
    (Phase.DECIDED, StepEvent.WRITTEN): Phase.WRITING,
    (Phase.WRITING, StepEvent.DURABLE): Phase.COMMITTING,
    (Phase.COMMITTING, StepEvent.AGREED): Phase.DONE,
}


@dataclass(slots=True)
class UnitAveraging:
    """The present round of one unit."""

    round: Round
    members: tuple[Member, ...]
    reports: dict[PeerId, Averaged] = field(default_factory=dict)
    lost: set[PeerId] = field(default_factory=set)  # members that left the job since, though they may be back
    peers: frozenset[PeerId] = field(init=False)  # of the members

    def __post_init__(self) -> None:
        self.peers = frozenset(member.peer for member in self.members)

    @property
    def is_complete(self) -> bool:
        """All members hold the averaged gradient."""
        return len(self.reports) == len(self.members)

    @property
    def is_by_site(self) -> bool:
        """Members of a site add up their parts before these leave it."""
        return any(member.group for member in self.members)

    def is_member(self, peer: PeerId) -> bool:
        return peer in self.peers

    def is_held_by(self, peer: PeerId) -> bool:
        """Whether the peer took part and still has the result."""
        return self.is_member(peer) and peer not in self.lost

    def missing(self) -> list[PeerId]:
        return [member.peer for member in self.members if member.peer not in self.reports]


@dataclass(slots=True)
class Ahead:
    """Rounds that were announced to members before the step was full."""

    rounds: dict[UnitName, UnitAveraging]
    sets: dict[PeerId, frozenset[int]]  # of microbatches, which each member will hold
    surprises: int  # of the ledger, then


@dataclass(slots=True)
class StepRun:
    """One step between its first microbatch and the agreement on its commit."""

    step: int
    phase: Phase = Phase.FEEDING
    skip: bool = False
    rounds: dict[UnitName, UnitAveraging] = field(default_factory=dict)
    troubles: dict[UnitName, Troubles] = field(default_factory=dict)  # failed rounds, since the set last changed
    sets: dict[PeerId, frozenset[int]] = field(default_factory=dict)  # of microbatches, which the rounds average
    ahead: Ahead | None = None  # only while the step is fed
    was_ahead: bool = False  # rounds were planned ahead, once and for all
    row: CommitRow | None = None  # once decided
    commits: dict[PeerId, Committed] = field(default_factory=dict)
    disputes: Counter[UnitName] = field(default_factory=Counter)  # rounds whose members differed
    owes: PeerId | None = None  # a replica that had not reported the commit when that was last looked for
    history: list[str] = field(default_factory=list)
    overflows: dict[int, str] = field(default_factory=dict)  # stages whose output the wire could not carry, and which

    def turn(self, turn: StepEvent, cause: str = "") -> None:
        """Move on; an illegal turn is a programming error and changes nothing."""
        after = TRANSITIONS.get((self.phase, turn))
        assert after is not None, f"step {self.step} is {self.phase}: it cannot turn on '{turn}'"
        self.phase = after
        self.history.append(f"{turn}: {after}" + (f" ({cause})" if cause else ""))
        if turn is StepEvent.REOPENED:
            self.skip = False
            self.rounds.clear()
            self.troubles.clear()
        if turn is StepEvent.NOT_FINITE:
            self.skip = True

    @property
    def told(self) -> list[UnitAveraging]:
        """The rounds that members know of."""
        return [*self.rounds.values(), *(self.ahead.rounds.values() if self.ahead else ())]

    @property
    def is_averaged(self) -> bool:
        """Every unit's round is complete."""
        return self.phase is Phase.AVERAGING and all(averaging.is_complete for averaging in self.rounds.values())

    @property
    def can_be_redone(self) -> bool:
        """Whether contributions may still become void: the step is neither averaged nor skipped yet."""
        return self.phase in (Phase.FEEDING, Phase.AVERAGING)


def may_write(step: int, *, commits_sent: int, agreed: int) -> bool:
    """Whether the step's row may be written: rows come in order, one at a time.

    `agreed` counts the steps on whose commit all replicas agree. Only the newest commit may lack agreement, so a
    divergence is never two commits old when it shows.
    """
    return step == commits_sent and step - 2 < agreed
