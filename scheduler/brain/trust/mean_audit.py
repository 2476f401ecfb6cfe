"""The audit of means: some slices are reduced once more, to prove that owners averaged the parts that they got.

A slice of a complete round is drawn, so no member knows beforehand which one. All members send their parts of it once
more, to one of them, which reduces them and compares. The step waits for that. The owner says which parts it took.

    a reader gets the mean that all hold ──────────────▶ alike
    it does not ──ask another reader──┬─ parts differ ─▶ split: their giver and their taker contradict each other
                                      ├─ readers agree ▶ the owner is wrong
                                      └─ they do not ──▶ the odd one is wrong

Decision: docs/decisions/061.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from scheduler.brain.commit.digests import Remedy, outvoted
from scheduler.brain.inputs import Stored
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.step import Phase, StepRun, UnitAveraging
from scheduler.brain.trust.inquiry import Inquiry, InquiryState, ReplicaAudit
from scheduler.brain.trust.strikes import SHOWN, Strikes
from swarm.text import listed
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Event, Member, Recheck, Rechecked

GUARD = "second owner"


@dataclass(frozen=True, slots=True)
class Target:
    """A slice of a round; with a `giver`, the audit also learns which part this member gave to the owner."""

    step: int
    unit: UnitName
    round: Round
    owner: Member
    giver: PeerId | None = None

    def __str__(self) -> str:
        return f"elements {self.owner.start} to {self.owner.stop} of unit {self.unit}, step {self.step}"


@dataclass(frozen=True, slots=True)
class MeanPart:
    """The hash of a part; `is_firm`: two members other than its giver report it."""

    digest: str
    is_firm: bool


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

    state: InquiryState
    wrong: tuple[PeerId, ...] = ()  # ODD: proven wrong
    pair: tuple[PeerId, ...] = ()  # SPLIT: these two contradict each other


MeanInquiry: TypeAlias = Inquiry[Target, Sums]


class MeanAudit(ReplicaAudit):
    """The slices of one job that are reduced once more."""

    def __init__(self, state: BrainState, strikes: Strikes, rng: Random) -> None:
        self._state, self._strikes = state, strikes
        self._rate = state.settings.second_owner
        self._rng = Random(rng.getrandbits(64))
        self._drawn: dict[int, object] = {}  # the rounds of each step for which it was drawn
        self._open: list[MeanInquiry] = []
        self._parts: dict[Target, MeanPart] = {}  # that the audit of sums asked for
        self._number = 0

    def draw(self, run: StepRun, now_s: float) -> None:
        """Draw a slice of each round, and let a member reduce it again."""
        rounds = {unit: averaging.round for unit, averaging in run.rounds.items()}
        if run.phase is not Phase.DECIDED or self._drawn.get(run.step, {}) == rounds:
            return
        self._drawn[run.step] = rounds
        for unit, averaging in run.rounds.items():
            if self._rng.random() < self._rate:
                owners = [member for member in averaging.members if member.stop > member.start]
                self.ask_about(Target(run.step, unit, averaging.round, self._rng.choice(owners)), now_s)

    def ask_about(self, target: Target, now_s: float) -> bool:
        """Order a slice to be reduced once more; False if no member can do that."""
        inquiry, averaging = MeanInquiry(target), self._round_of(target)
        if averaging is None or not (others := self._others(inquiry, averaging)):
            return False
        self._open.append(inquiry)
        self._ask(inquiry, averaging, others, now_s)
        return True

    def part_of(self, target: Target) -> MeanPart | None:
        """The part that the giver gave; None if it is not known."""
        return self._parts.get(target)

    def is_current(self, target: Target) -> bool:
        """Whether its round still counts and has no row."""
        return self._round_of(target) is not None

    def hear(self, peer: PeerId, event: Event | Stored, now_s: float) -> bool:
        """Take a report of owner or reader, or of a member that cannot send its part again."""
        if not isinstance(event, Rechecked):
            return False
        of = (event.step, event.unit, event.round)
        for inquiry in self._open:
            about, averaging = inquiry.about, self._round_of(inquiry.about)
            if event.number not in inquiry.numbers or of != (about.step, about.unit, about.round) or averaging is None:
                continue
            is_asked, is_owner = inquiry.awaits(peer, event.number), peer == about.owner.peer
            if not (is_asked or is_owner or event.fault):
                continue
            if (is_asked or is_owner) and not event.fault and len(event.took) == len(averaging.members):
                inquiry.answered(peer, Sums.of(event))
            elif is_asked:
                inquiry.gave_up()
            elif event.fault and event.number == inquiry.numbers[-1] and averaging.is_member(peer):
                self._open.remove(inquiry)
                self._leave_unchecked(about, f"{peer} says that {event.fault}")
            return True
        return False

    def look(self, now_s: float) -> list[Remedy]:
        """Ask for reductions and compare them. Returns remedies for replicas that are wrong."""
        for inquiry in list(self._open):
            about, averaging = inquiry.about, self._round_of(inquiry.about)
            if averaging is None:
                self._open.remove(inquiry)  # the round was given up, or the step has its row
                continue
            if inquiry.waits(now_s, self._state.pool.may_answer):
                continue
            others = self._others(inquiry, averaging)
            members = [member.peer for member in averaging.members]
            found = finding(about.owner.peer, members, inquiry.said, may_ask=bool(others))
            if found.state is InquiryState.ASKS:
                self._ask(inquiry, averaging, others, now_s)
                continue
            is_heard = found.state in (InquiryState.ODD, InquiryState.SPLIT) or about.giver is not None
            if is_heard and self._waits_for_owner(inquiry, now_s):
                continue
            if found.state is InquiryState.ALIKE and about.giver is not None:
                found = self._learn(about, about.giver, inquiry.said, members)
            self._open.remove(inquiry)
            if remedies := self._conclude(inquiry, found, now_s):
                self._open.clear()  # all that has no row is computed again
                return remedies
        return []

    def waiting_for(self, step: int) -> str:
        of_step = [inquiry.asked for inquiry in self._open if inquiry.about.step == step]
        if not of_step:
            return ""
        asked = sorted({peer for peer in of_step if peer is not None})
        return f"waits for a slice that is reduced once more by {listed(asked) or 'nobody yet'}"

    def close(self, step: int) -> None:
        self._drawn.pop(step, None)

    def times_s(self) -> list[float]:
        return [inquiry.due_s for inquiry in self._open]

    def _round_of(self, target: Target) -> UnitAveraging | None:
        """The round of a slice, if it still counts and has no row."""
        run = self._state.progress.runs.get(target.step)
        averaging = run.rounds.get(target.unit) if run is not None and run.phase is Phase.DECIDED else None
        return averaging if averaging is not None and averaging.round == target.round else None

    def _others(self, inquiry: MeanInquiry, averaging: UnitAveraging) -> list[PeerId]:
        """The possible readers; the giver only if there is no other, because it proves nothing about its own part."""
        about, may_answer = inquiry.about, self._state.pool.may_answer
        others = [peer for peer in sorted(averaging.peers) if peer != about.owner.peer and may_answer(peer)]
        readers = inquiry.next_ones(others)
        return [peer for peer in readers if peer != about.giver] or readers

    def _ask(self, inquiry: MeanInquiry, averaging: UnitAveraging, others: list[PeerId], now_s: float) -> None:
        self._number += 1
        verifier, about = self._rng.choice(others), inquiry.about
        inquiry.ask(verifier, self._number, now_s)
        timeline = self._state.settings.timeline
        command = Recheck(timeline, about.step, about.unit, about.round, self._number, about.owner.peer, verifier)
        for peer in (verifier, *sorted(averaging.peers - {verifier})):
            self._state.outbox.send(peer, command)

    def _waits_for_owner(self, inquiry: MeanInquiry, now_s: float) -> bool:
        """Whether to wait for the owner's report: a member may have sent it another part than now."""
        owner = inquiry.about.owner.peer
        return owner not in inquiry.said and self._state.pool.may_answer(owner) and now_s < inquiry.due_s

    def _learn(
        self, about: Target, giver: PeerId, said: Mapping[PeerId, Sums], members: list[PeerId]
    ) -> ReductionFinding:
        """Note the giver's part. If two members got different parts, giver and owner contradict each other."""
        at = members.index(giver)
        took = {peer: word.took[at] for peer, word in said.items() if peer != giver}
        if len(set(took.values())) > 1:
            return ReductionFinding(InquiryState.SPLIT, pair=(giver, about.owner.peer))
        self._parts = {target: part for target, part in self._parts.items() if target.step >= about.step - 2}
        if took:
            self._parts[about] = MeanPart(next(iter(took.values())), len(took) > 1)
        return ReductionFinding(InquiryState.ALIKE)

    def _conclude(self, inquiry: MeanInquiry, found: ReductionFinding, now_s: float) -> list[Remedy]:
        about, said = inquiry.about, inquiry.said
        match found.state:
            case InquiryState.ODD:
                return self._strikes.prove({peer: _evidence(inquiry, peer) for peer in found.wrong}, now_s)
            case InquiryState.SPLIT:
                giver, taker = found.pair
                got = (
                    f"{peer} got {said[peer].computed[:SHOWN]} of {said[peer].held[:SHOWN]}" for peer in sorted(said)
                )
                told = f"{giver} and {taker} contradict each other about {about}: {', '.join(got)}"
                return self._strikes.contradict(giver, taker, told, GUARD, now_s)
            case InquiryState.UNANSWERED:
                self._leave_unchecked(about, "nobody else could reduce them")
        return []

    def _leave_unchecked(self, about: Target, why: str) -> None:
        self._state.outbox.note("info", f"{about}, owned by {about.owner.peer}, are not compared: {why}")


def finding(
    owner: PeerId, members: Sequence[PeerId], said: Mapping[PeerId, Sums], *, may_ask: bool
) -> ReductionFinding:
    """The verdict on the owner's slice; `may_ask`: another reader could be asked."""
    readers = [peer for peer in said if peer != owner]
    if not readers:
        return ReductionFinding(InquiryState.ASKS if may_ask else InquiryState.UNANSWERED)
    if all(said[peer].is_right for peer in readers):
        return ReductionFinding(InquiryState.ALIKE)
    if len(readers) == 1 and may_ask:
        return ReductionFinding(InquiryState.ASKS)
    for at, giver in enumerate(members):
        took = {peer: word.took[at] for peer, word in said.items()}
        if odd := outvoted(took):
            taker = next(peer for peer in (*odd, *said) if peer != giver)
            return ReductionFinding(InquiryState.SPLIT, pair=(giver, taker))
    odd = outvoted({peer: (word.computed, word.held) for peer, word in said.items()})
    if len(odd) == len(said) or len(readers) == 1:
        return ReductionFinding(InquiryState.SPLIT, pair=(readers[0], readers[1] if len(readers) > 1 else owner))
    is_right = all(said[peer].is_right for peer in said if peer not in odd)
    return ReductionFinding(InquiryState.ODD, wrong=odd if is_right else tuple(sorted({*odd, owner})))


def _evidence(inquiry: MeanInquiry, peer: PeerId) -> str:
    """The owner's mean against the readers'; or a reader's report against the others'."""
    about, said = inquiry.about, inquiry.said
    readers = [reader for reader in sorted(said) if reader not in (peer, about.owner.peer)]
    word, mine = said[readers[0]], said.get(peer)
    if peer == about.owner.peer or mine is None:
        return f"mean of {about} was {word.held[:SHOWN]}, {listed(readers)} got {word.computed[:SHOWN]} ({GUARD})"
    was = f"{mine.computed[:SHOWN]} of {mine.held[:SHOWN]}"
    return f"mean of {about} was {was}, others got {word.computed[:SHOWN]} of {word.held[:SHOWN]} ({GUARD})"
