"""Recounts: some sums are computed once more by another replica, to prove that they are those of their microbatches.

    the step is averaged ──draw a replica──▶ another one computes all of its microbatches again, into a sum of its own
                                        └──▶ a slice of another owner is reduced once more (means.py): which part
                                             of the replica did that owner and one reader receive?
    its sum is the part, bit for bit ──▶ fine;   else a second one recounts ──▶ the odd one is wrong

A replica is drawn once its sum was given away. The recounter's inputs and outputs of each microbatch are compared as
well, so a recount is a spot check of them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from scheduler.brain.commit.digests import Remedy, StartOver, outvoted
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.step import Phase, StepRun
from scheduler.brain.trust.checks import Checks
from scheduler.brain.trust.means import Means, Target
from scheduler.brain.trust.strikes import Strikes
from scheduler.brain.trust.verdicts import SHOWN, Place, Work
from swarm.text import listed
from swarm.types import PeerId
from swarm.wire.messages import Checked, Member, Recount, Recounted

ANSWER_S_MAX = 60.0  # then another replica is asked
TRIES_MAX = 2
GUARD = "recount"


@dataclass(slots=True)
class _RecountInquiry:
    """A replica's sum that is computed once more."""

    target: Target  # where its part went
    stage: int
    indexes: tuple[int, ...]  # its microbatches
    device: str
    said: dict[PeerId, str] = field(default_factory=dict)  # hashes of the recounters' sums
    asked: PeerId | None = None
    number: int = 0
    since_s: float = 0.0
    alike: set[int] = field(default_factory=set)  # microbatches that the asked one took and made as the replica did
    passed: set[PeerId] = field(default_factory=set)

    def __str__(self) -> str:
        target = self.target
        return f"the sum of {target.giver} over elements {target.owner.start} to {target.owner.stop} of {target.unit}"

    def gave_up(self) -> None:
        if self.asked is not None:
            self.passed.add(self.asked)
        self.asked = None


class Recounts:
    """The recounts of one job; nothing happens unless the job file asks for them."""

    def __init__(self, state: BrainState, checks: Checks, means: Means, strikes: Strikes, rng: Random) -> None:
        self._state, self._checks, self._means, self._strikes = state, checks, means, strikes
        self._rate = state.settings.recount
        self.is_on = self._rate > 0.0
        if self.is_on:
            self._rng = Random(rng.getrandbits(64))
        self._drawn: dict[int, object] = {}  # the rounds of each step for which it was drawn
        self._open: dict[int, _RecountInquiry] = {}  # by step

    def draw(self, run: StepRun, now_s: float) -> None:
        """The step is averaged, and nothing else of it is being checked: draw a replica, once for these rounds."""
        rounds = {unit: averaging.round for unit, averaging in run.rounds.items()}
        if not self.is_on or run.phase is not Phase.DECIDED or not rounds or self._drawn.get(run.step) == rounds:
            return
        self._drawn[run.step] = rounds
        if self._rng.random() >= self._rate:
            return
        sets = self._state.ledger.sets(run.step)
        contributors = sorted(peer for peer in sets if sets[peer] and peer in self._state.pool)
        if not contributors:
            return
        replica = self._rng.choice(contributors)
        stage, indexes = self._state.pool.stage_of(replica), tuple(sorted(sets[replica]))
        units = sorted(unit for unit in run.rounds if stage in self._state.settings.units[unit])
        unit = self._rng.choice(units)
        owners = [one for one in run.rounds[unit].members if one.stop > one.start and one.peer != replica]
        is_known = all(self._checks.word(Place(run.step, stage, index), replica) for index in indexes)
        device = self._state.pool[replica].replica.device
        if not owners or not is_known:
            return  # its part went nowhere, or microbatches are from before a restart of the scheduler
        owner: Member = self._rng.choice(owners)
        one = _RecountInquiry(Target(run.step, unit, rounds[unit], owner, replica), stage, indexes, device)
        others = self._able(one)
        if others and self._means.ask_about(one.target, now_s):
            self._open[run.step] = one
            self._ask(one, self._rng.choice(others), now_s)

    def checked(self, peer: PeerId, event: Checked) -> bool:
        """A recounter has computed one of the microbatches; False if the event is none of a recount."""
        one = self._open.get(event.microbatch.step)
        if one is None or (peer, event.number) != (one.asked, one.number):
            return False
        place = Place(event.microbatch.step, one.stage, event.microbatch.index)
        mine = self._checks.word(place, one.target.giver)
        if event.fault or event.stage != one.stage or mine is None or Work.of(event).inputs != mine.inputs:
            one.gave_up()  # it cannot, or was given other inputs
        elif Work.of(event).results != mine.results:
            self._checks.dispute(place, one.target.giver, mine, peer, Work.of(event), GUARD)
            one.gave_up()
        else:
            one.alike.add(event.microbatch.index)
        return True

    def recounted(self, peer: PeerId, event: Recounted) -> None:
        """A recounter has the sum, or cannot."""
        one = self._open.get(event.step)
        if one is None or (peer, event.number) != (one.asked, one.number):
            self._state.ledger.duplicates += 1
        elif event.fault or one.alike != set(one.indexes):
            one.gave_up()
        else:
            one.said[peer], one.asked = event.digest, None

    def look(self, now_s: float) -> list[Remedy]:
        """Compare sums and ask others; gives remedies for replicas that are wrong."""
        for step, one in list(self._open.items()):
            if not self._means.is_current(one.target):
                del self._open[step]
                continue
            if one.asked is not None and (not self._may_work(one.asked) or now_s - one.since_s >= ANSWER_S_MAX):
                one.gave_up()
            if one.asked is not None or not self._means.permits(step) or not self._checks.permits(step):
                continue
            others = self._able(one) if len(one.passed) < TRIES_MAX else []
            part = self._means.part_of(one.target)
            odd = outvoted({one.target.giver: part.digest, **one.said}) if part is not None else ()
            is_split = len(odd) == len(one.said) + 1
            if part is not None and others and (not one.said or is_split):
                self._ask(one, self._rng.choice(others), now_s)
                continue
            del self._open[step]
            if part is None or not one.said:
                self._state.outbox.note("info", f"{one}, step {step}, is not recounted: nobody gave an answer")
            elif odd and not is_split and (part.is_firm or one.target.giver not in odd):
                text = self._evidence(one, part.digest)
                return [remedy for peer in odd for remedy in self._strikes.convict(peer, text, now_s, is_proven=True)]
            elif odd:
                text = self._evidence(one, part.digest)
                unclear = self._strikes.unclear(text, (one.target.giver, *one.said))
                return [unclear or StartOver(f"unclear who is right: {text}")]
            else:
                self._strikes.counts[one.target.giver] += len(one.indexes)
        return []

    def permits(self, step: int) -> bool:
        """Whether no sum of the step is being computed again."""
        return step not in self._open

    def close(self, step: int) -> None:
        """The step's row is durable."""
        self._drawn.pop(step, None)

    def times_s(self) -> list[float]:
        """When an answer is overdue."""
        return [one.since_s + ANSWER_S_MAX for one in self._open.values() if one.asked is not None]

    def waiting_for(self, step: int) -> str:
        asked = self._open[step].asked if step in self._open else None
        return f"waits for {self._open[step]}, which {asked or 'nobody yet'} computes once more"

    def _able(self, one: _RecountInquiry) -> list[PeerId]:
        """Replicas that can recount, with the bits of the same kind of device."""
        pool, giver = self._state.pool, one.target.giver
        return [
            peer
            for peer in sorted(pool.by_stage[one.stage])
            if peer not in (giver, *one.passed, *one.said)
            and self._may_work(peer)
            and pool.takes_part(peer, one.target.step)
            and pool[peer].replica.device == one.device
        ]

    def _may_work(self, peer: PeerId) -> bool:
        return peer in self._state.pool and not self._state.pool[peer].is_suspect

    def _ask(self, one: _RecountInquiry, recounter: PeerId, now_s: float) -> None:
        target, timeline = one.target, self._state.settings.timeline
        one.asked, one.number, one.since_s, one.alike = recounter, self._checks.next_number(), now_s, set()
        span = target.owner.start, target.owner.stop
        command = Recount(timeline, target.step, one.stage, one.number, target.unit, *span, one.indexes)
        self._state.outbox.send(recounter, command)
        for index in one.indexes:
            self._checks.send(Place(target.step, one.stage, index), recounter, one.number)

    def _evidence(self, one: _RecountInquiry, part: str) -> str:
        others = ", ".join(f"{peer} got {one.said[peer][:SHOWN]}" for peer in sorted(one.said))
        what = f"{one}, step {one.target.step}, microbatches {listed(map(str, one.indexes))}"
        return f"{what}, was {part[:SHOWN]}, {others} ({GUARD})"
