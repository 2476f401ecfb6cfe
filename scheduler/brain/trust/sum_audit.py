"""The audit of sums: some sums are computed once more, to prove that they are the sums of their microbatches.

    the step is averaged ──draw a replica──▶ another one computes all of its microbatches again, into a sum of its own
                                        └──▶ a slice of another owner is reduced once more (mean_audit.py): which part
                                             of the replica did that owner and one reader receive?
    its sum is the part, bit for bit ──▶ fine;   else a second one recounts ──▶ the odd one is wrong

A replica is drawn once it has given its sum away. The recounter's inputs and outputs of each microbatch are compared
too, so a recount is a spot check of them all. Decision: docs/decisions/061.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from scheduler.brain.commit.digests import Remedy, outvoted
from scheduler.brain.inputs import Stored
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.step import Phase, StepRun
from scheduler.brain.trust.hop_audit import HopAudit, HopId, Work
from scheduler.brain.trust.inquiry import ANSWER_S_MAX, Inquiry, InquiryState, ReplicaAudit, vote
from scheduler.brain.trust.mean_audit import MeanAudit, Target
from scheduler.brain.trust.strikes import SHOWN, Strikes
from swarm.text import listed
from swarm.types import PeerId
from swarm.wire.messages import Checked, Event, Recount, Recounted

PATIENCE_S = 2 * ANSWER_S_MAX  # it is many computations
GUARD = "recount"


@dataclass(slots=True)
class SumCase:
    """A replica's sum that is recounted."""

    target: Target  # where its part went
    giver: PeerId
    stage: int
    indexes: tuple[int, ...]  # its microbatches
    device: str
    alike: set[int] = field(default_factory=set)  # microbatches for which the recounter's hashes are the giver's

    def __str__(self) -> str:
        owner = self.target.owner
        return f"the sum of {self.giver} over elements {owner.start} to {owner.stop} of {self.target.unit}"


SumInquiry: TypeAlias = Inquiry[SumCase, str]  # hashes of the recounters' sums


class SumAudit(ReplicaAudit):
    """The recounts of one job."""

    def __init__(self, state: BrainState, hops: HopAudit, means: MeanAudit, strikes: Strikes, rng: Random) -> None:
        self._state, self._hops, self._means, self._strikes = state, hops, means, strikes
        self._rate = state.settings.recount
        self._rng = Random(rng.getrandbits(64))
        self._drawn: dict[int, object] = {}  # the rounds of each step for which it was drawn
        self._open: dict[int, SumInquiry] = {}  # by step

    def draw(self, run: StepRun, now_s: float) -> None:
        """Draw a replica once no other check of the step is open."""
        rounds = {unit: averaging.round for unit, averaging in run.rounds.items()}
        if run.phase is not Phase.DECIDED or not rounds or self._drawn.get(run.step) == rounds:
            return
        if not self._others_permit(run.step):
            return
        self._drawn[run.step] = rounds
        if self._rng.random() >= self._rate:
            return
        sets = self._state.ledger.sets(run.step)
        contributors = sorted(peer for peer in sets if sets[peer] and peer in self._state.pool)
        if not contributors:
            return
        giver = self._rng.choice(contributors)
        stage, indexes = self._state.pool.stage_of(giver), tuple(sorted(sets[giver]))
        unit = self._rng.choice(sorted(unit for unit in run.rounds if stage in self._state.settings.units[unit]))
        owners = [owner for owner in run.rounds[unit].members if owner.stop > owner.start and owner.peer != giver]
        is_known = all(self._hops.word(HopId(run.step, stage, index), giver) for index in indexes)
        if not owners or not is_known:
            return  # its part went nowhere, or microbatches are from before a restart of the scheduler
        target = Target(run.step, unit, rounds[unit], self._rng.choice(owners), giver)
        case = SumCase(target, giver, stage, indexes, self._state.pool[giver].replica.device)
        inquiry = SumInquiry(case, patience_s=PATIENCE_S)
        if (others := self._able(inquiry)) and self._means.ask_about(target, now_s):
            self._open[run.step] = inquiry
            self._ask(inquiry, self._rng.choice(others), now_s)

    def hear(self, peer: PeerId, event: Event | Stored, now_s: float) -> bool:
        """Take a recounter's report on a microbatch or the sum, or its failure."""
        if not isinstance(event, Checked | Recounted):
            return False
        inquiry = self._open.get(event.microbatch.step if isinstance(event, Checked) else event.step)
        if inquiry is None or not inquiry.awaits(peer, event.number):
            return False
        case = inquiry.about
        if isinstance(event, Checked):
            self._compare(inquiry, peer, event)
        elif event.fault or case.alike != set(case.indexes):
            inquiry.gave_up()
        else:
            inquiry.answered(peer, event.digest)
        return True

    def _compare(self, inquiry: SumInquiry, peer: PeerId, event: Checked) -> None:
        case, hop = inquiry.about, HopId.of(event)
        mine = self._hops.word(hop, case.giver)
        if event.fault or event.stage != case.stage or mine is None or Work.of(event).inputs != mine.inputs:
            inquiry.gave_up()  # it cannot, or was given other inputs
        elif Work.of(event).results != mine.results:
            self._hops.dispute(hop, case.giver, {case.giver: mine, peer: Work.of(event)}, GUARD)
            inquiry.gave_up()
        else:
            case.alike.add(event.microbatch.index)

    def look(self, now_s: float) -> list[Remedy]:
        """Compare sums and ask further recounters. Returns remedies for replicas that are wrong."""
        for step, inquiry in list(self._open.items()):
            case = inquiry.about
            if not self._means.is_current(case.target):
                del self._open[step]
                continue
            if inquiry.waits(now_s, self._state.pool.may_answer) or not self._others_permit(step):
                continue
            part, others = self._means.part_of(case.target), self._able(inquiry)
            said = dict(inquiry.said) if part is None else {case.giver: part.digest, **inquiry.said}
            state = InquiryState.UNANSWERED if part is None else vote(said, may_ask=bool(others))
            if state is InquiryState.ASKS:
                self._ask(inquiry, self._rng.choice(others), now_s)
                continue
            del self._open[step]
            odd, text = outvoted(said), self._evidence(case, said)
            if state is InquiryState.UNANSWERED:
                self._state.outbox.note("info", f"{case}, step {step}, is not recounted: nobody gave an answer")
            elif state is InquiryState.ALIKE:
                self._strikes.counts[case.giver] += len(case.indexes)
            elif state is InquiryState.ODD and part is not None and (part.is_firm or case.giver not in odd):
                return self._strikes.prove(dict.fromkeys(odd, text), now_s)
            else:
                return self._strikes.undecided(text, said)
        return []

    def waiting_for(self, step: int) -> str:
        if (inquiry := self._open.get(step)) is None:
            return ""
        return f"waits for {inquiry.about}, which {inquiry.asked or 'nobody yet'} computes once more"

    def close(self, step: int) -> None:
        self._drawn.pop(step, None)

    def times_s(self) -> list[float]:
        return [inquiry.due_s for inquiry in self._open.values() if inquiry.asked is not None]

    def _others_permit(self, step: int) -> bool:
        return not (self._hops.waiting_for(step) or self._means.waiting_for(step))

    def _able(self, inquiry: SumInquiry) -> list[PeerId]:
        """Replicas that can recount, on the giver's kind of device."""
        pool, case = self._state.pool, inquiry.about
        return inquiry.next_ones(
            peer
            for peer in sorted(pool.by_stage[case.stage])
            if peer != case.giver
            and pool.may_answer(peer)
            and pool.takes_part(peer, case.target.step)
            and pool[peer].replica.device == case.device
        )

    def _ask(self, inquiry: SumInquiry, recounter: PeerId, now_s: float) -> None:
        case, timeline, number = inquiry.about, self._state.settings.timeline, self._hops.next_number()
        inquiry.ask(recounter, number, now_s)
        case.alike.clear()
        target = case.target
        span = target.owner.start, target.owner.stop
        command = Recount(timeline, target.step, case.stage, number, target.unit, *span, case.indexes)
        self._state.outbox.send(recounter, command)
        for index in case.indexes:
            self._hops.send(HopId(target.step, case.stage, index), recounter, number)

    def _evidence(self, case: SumCase, said: dict[PeerId, str]) -> str:
        got = ", ".join(f"{peer} got {said[peer][:SHOWN]}" for peer in sorted(said) if peer != case.giver)
        what = f"{case}, step {case.target.step}, microbatches {listed(map(str, case.indexes))}"
        return f"{what}, was {said.get(case.giver, '')[:SHOWN]}, {got} ({GUARD})"
