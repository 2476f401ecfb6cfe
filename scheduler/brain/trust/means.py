"""Checks of means: some slices are reduced once more, to prove that their owners averaged the parts they were sent.

A slice of a complete round is drawn, so no member knows beforehand which one. All members send their parts of it once
more, to one of them, which reduces them and compares. The step waits for that. `reductions.py` gives the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from scheduler.brain.commit.digests import Remedy
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.step import Phase, StepRun, UnitAveraging
from scheduler.brain.trust.reductions import ReductionFinding, Stand, Sums, finding
from scheduler.brain.trust.strikes import Strikes
from scheduler.brain.trust.verdicts import SHOWN
from swarm.text import listed
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Member, Recheck, Rechecked

ANSWER_S_MAX = 30.0  # then another member is asked
TRIES_MAX = 3
GUARD = "second owner"


@dataclass(frozen=True, slots=True)
class Target:
    """The part that one member gave to the owner of a slice."""

    step: int
    unit: UnitName
    round: Round
    owner: Member
    giver: PeerId


@dataclass(frozen=True, slots=True)
class MeanPart:
    """The hash of a part; `is_firm`: two others than its giver say so."""

    digest: str
    is_firm: bool


@dataclass(slots=True)
class _MeanInquiry:
    """A slice that is reduced once more."""

    step: int
    unit: UnitName
    round: Round
    owner: Member
    about: Target | None = None  # whose part somebody wants to know
    said: dict[PeerId, Sums] = field(default_factory=dict)
    asked: PeerId | None = None
    first: int = 0  # number of the first request
    number: int = 0  # of the newest request
    since_s: float = 0.0
    passed: set[PeerId] = field(default_factory=set)  # members that were of no use

    def __str__(self) -> str:
        return f"elements {self.owner.start} to {self.owner.stop} of unit {self.unit}, step {self.step}"


class Means:
    """The slices of one job that are reduced once more; nothing happens unless the job file asks for it."""

    def __init__(self, state: BrainState, strikes: Strikes, rng: Random) -> None:
        self._state, self._strikes = state, strikes
        self._rate = state.settings.second_owner
        self.is_on = self._rate > 0.0 or state.settings.recount > 0.0
        if self.is_on:
            self._rng = Random(rng.getrandbits(64))
        self._open: list[_MeanInquiry] = []
        self._parts: dict[Target, MeanPart] = {}  # those that somebody wanted to know
        self._number = 0

    def draw(self, run: StepRun, now_s: float) -> None:
        """The step was just averaged: draw a slice of each of its rounds, and let a member reduce it again."""
        for unit, averaging in run.rounds.items() if self.is_on else ():
            if self._rng.random() >= self._rate:
                continue
            owners = [member for member in averaging.members if member.stop > member.start]
            one = _MeanInquiry(run.step, unit, averaging.round, self._rng.choice(owners))
            others = [peer for peer in sorted(averaging.peers) if self._may_read(peer, one)]
            if others:
                self._open.append(one)
                self._ask(one, averaging, self._rng.choice(others), now_s)

    def ask_about(self, target: Target, now_s: float) -> bool:
        """Let a slice be reduced once more to learn a member's part of it; False if no peer can do that."""
        one = _MeanInquiry(target.step, target.unit, target.round, target.owner, target)
        averaging = self._round_of(one)
        others = [peer for peer in sorted(averaging.peers) if self._may_read(peer, one)] if averaging else []
        if averaging is None or not others:
            return False
        self._open.append(one)
        self._ask(one, averaging, self._rng.choice(self._readers(one, others)), now_s)
        return True

    def part_of(self, target: Target) -> MeanPart | None:
        """The part that was given; None if it is not known."""
        return self._parts.get(target)

    def is_current(self, target: Target) -> bool:
        """Whether its round still counts and has no row."""
        return self._round_of(_MeanInquiry(target.step, target.unit, target.round, target.owner)) is not None

    def rechecked(self, peer: PeerId, event: Rechecked) -> None:
        """The owner or a verifier reports; a report that is not awaited changes nothing."""
        for one in self._open:
            is_it = (one.step, one.unit, one.round) == (event.step, event.unit, event.round)
            averaging = self._round_of(one)
            if is_it and averaging is not None and event.fault and (event.number, peer) != (one.number, one.asked):
                self._refused(one, averaging, peer, event)
                return
            is_owner = peer == one.owner.peer and one.first <= event.number <= one.number
            is_asked = is_owner or (peer, event.number) == (one.asked, one.number)
            if not is_it or not is_asked or averaging is None:
                continue
            is_whole = not event.fault and len(event.took) == len(averaging.members)
            if is_whole:
                one.said[peer] = Sums.of(event)
            if peer == one.asked:
                one.asked = None
                one.passed.update(() if is_whole else (peer,))
            return
        self._state.ledger.duplicates += 1

    def look(self, now_s: float) -> list[Remedy]:
        """Ask for reductions and compare them; gives remedies for replicas that are wrong."""
        for one in list(self._open):
            averaging = self._round_of(one)
            if averaging is None:
                self._open.remove(one)  # the round was given up, or the step has its row
                continue
            if one.asked is not None and (not self._may_work(one.asked) or now_s - one.since_s >= ANSWER_S_MAX):
                one.passed.add(one.asked)
                one.asked = None
            if one.asked is not None:
                continue
            others = [peer for peer in sorted(averaging.peers) if self._may_read(peer, one)]
            members = [member.peer for member in averaging.members]
            found = finding(one.owner.peer, members, one.said, may_ask=bool(others) and len(one.passed) < TRIES_MAX)
            if found.stand is Stand.ASKS:
                self._ask(one, averaging, self._rng.choice(self._readers(one, others)), now_s)
                continue
            is_heard = found.stand in (Stand.WRONG, Stand.CONTRADICTED) or one.about is not None
            if is_heard and self._waits_for_owner(one, now_s):
                continue
            if found.stand is Stand.ALIKE and one.about is not None:
                found = self._learn(one, one.about, members)
            self._open.remove(one)
            if remedies := self._conclude(one, found, now_s):
                self._open.clear()  # all that has no row is computed again
                return remedies
        return []

    def permits(self, step: int) -> bool:
        """Whether no slice of the step is being reduced again."""
        return not any(one.step == step for one in self._open)

    def times_s(self) -> list[float]:
        """When an answer is overdue."""
        return [one.since_s + ANSWER_S_MAX for one in self._open]

    def waiting_for(self, step: int) -> str:
        asked = sorted({one.asked for one in self._open if one.step == step and one.asked is not None})
        return f"waits for a slice that is reduced once more by {listed(asked) or 'nobody yet'}"

    def _round_of(self, one: _MeanInquiry) -> UnitAveraging | None:
        """The round that the inquiry is about, if it still counts and has no row."""
        run = self._state.progress.runs.get(one.step)
        averaging = run.rounds.get(one.unit) if run is not None and run.phase is Phase.DECIDED else None
        return averaging if averaging is not None and averaging.round == one.round else None

    def _may_work(self, peer: PeerId) -> bool:
        pool = self._state.pool
        return peer in pool and not pool[peer].is_suspect

    def _refused(self, one: _MeanInquiry, averaging: UnitAveraging, peer: PeerId, event: Rechecked) -> None:
        """A member cannot send its part again, as its session has broken since: the slice cannot be reduced."""
        if event.number == one.number and averaging.is_member(peer):
            self._open.remove(one)
            told = f"{one}, owned by {one.owner.peer}, are not compared: {peer} says that {event.fault}"
            self._state.outbox.note("info", told)

    def _learn(self, one: _MeanInquiry, about: Target, members: list[PeerId]) -> ReductionFinding:
        """Note the part given. If two readers got different ones, giver and owner contradict each other."""
        at = members.index(about.giver)
        took = {peer: word.took[at] for peer, word in one.said.items() if peer != about.giver}
        if len(set(took.values())) > 1:
            return ReductionFinding(Stand.CONTRADICTED, pair=(about.giver, about.owner.peer))
        self._parts = {target: part for target, part in self._parts.items() if target.step >= about.step - 2}
        if took:
            self._parts[about] = MeanPart(next(iter(took.values())), len(took) > 1)
        return ReductionFinding(Stand.ALIKE)

    def _readers(self, one: _MeanInquiry, others: list[PeerId]) -> list[PeerId]:
        """The possible readers, without the giver if there are others, as a giver reports nothing of its own part."""
        giver = one.about.giver if one.about is not None else None
        return [peer for peer in others if peer != giver] or others

    def _waits_for_owner(self, one: _MeanInquiry, now_s: float) -> bool:
        """Whether to wait for the owner's report: a member may have sent it another part than it sends now."""
        owner = one.owner.peer
        return owner not in one.said and self._may_work(owner) and now_s - one.since_s < ANSWER_S_MAX

    def _may_read(self, peer: PeerId, one: _MeanInquiry) -> bool:
        return peer != one.owner.peer and peer not in one.passed and peer not in one.said and self._may_work(peer)

    def _ask(self, one: _MeanInquiry, averaging: UnitAveraging, verifier: PeerId, now_s: float) -> None:
        self._number += 1
        one.asked, one.number, one.since_s = verifier, self._number, now_s
        one.first = one.first or one.number
        timeline = self._state.settings.timeline
        command = Recheck(timeline, one.step, one.unit, one.round, one.number, one.owner.peer, verifier)
        for peer in (verifier, *sorted(averaging.peers - {verifier})):
            self._state.outbox.send(peer, command)

    def _conclude(self, one: _MeanInquiry, found: ReductionFinding, now_s: float) -> list[Remedy]:
        match found.stand:
            case Stand.WRONG:
                texts = {peer: self._evidence(one, peer) for peer in found.wrong}
                return [
                    remedy
                    for peer in found.wrong
                    for remedy in self._strikes.convict(peer, texts[peer], now_s, is_proven=True)
                ]
            case Stand.CONTRADICTED:
                giver, taker = found.pair
                told = f"{giver} and {taker} contradict each other about {one}: {_listed(one.said)}"
                return self._strikes.contradict(giver, taker, told, GUARD, now_s)
            case Stand.UNANSWERED:
                told = f"{one}, owned by {one.owner.peer}, are not compared: nobody else could reduce them"
                self._state.outbox.note("info", told)
        return []

    def _evidence(self, one: _MeanInquiry, peer: PeerId) -> str:
        """The owner's mean against that of the readers; or a reader's report against the others'."""
        readers = [reader for reader in sorted(one.said) if reader not in (peer, one.owner.peer)]
        word = one.said[readers[0]]
        if peer == one.owner.peer:
            return f"mean of {one} was {word.held[:SHOWN]}, {listed(readers)} got {word.computed[:SHOWN]} ({GUARD})"
        mine = one.said[peer]
        was = f"{mine.computed[:SHOWN]} of {mine.held[:SHOWN]}"
        return f"mean of {one} was {was}, others got {word.computed[:SHOWN]} of {word.held[:SHOWN]} ({GUARD})"


def _listed(said: Mapping[PeerId, Sums]) -> str:
    return ", ".join(f"{peer} got {said[peer].computed[:SHOWN]} of {said[peer].held[:SHOWN]}" for peer in sorted(said))
