"""The audit of hops: reports on computations are compared, and some hops are computed again.

    Accumulated with hashes ──▶ claims ──a microbatch is complete──┬─ each hop must have taken what its neighbour made
                                   │                               └─ some hops are drawn and computed again elsewhere
                                   └─ a hop that was done twice must have the same results

A hop is drawn after all of its route have reported, so no replica knows beforehand which hops will be checked. A step
is not committed while a check of it is open. A verdict makes everything without a row void, at every stage, because
tensors from a liar are wrong elsewhere too. Committed steps stay.

Where two replicas differ and no third can decide, both are asked once more: the one that contradicts itself is wrong.
If two neighbours report one tensor differently, computing shows nothing, since either may lie. The step is computed
again and the pair is avoided. A replica that two others contradict in this way is wrong.

Decision: docs/decisions/060.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import product
from operator import eq
from random import Random
from typing import TypeAlias

from scheduler.brain.commit.digests import Remedy, StartOver, outvoted
from scheduler.brain.inputs import Stored
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.trust.inquiry import TRIES_MAX, Inquiry, InquiryState, ReplicaAudit, vote
from scheduler.brain.trust.strikes import SHOWN, Strikes
from swarm.text import counted, listed
from swarm.types import Hop, Microbatch, PeerId
from swarm.wire.messages import Accumulated, Check, Checked, Event

SILENT_MAX, SILENT_S = 3, 600.0  # overdue answers of a checker beside the same neighbours, until it rests for so long
SPOT_CHECK, REPEATED, NEIGHBOURS = "spot check", "done again by another replica", "its neighbours"

Beside: TypeAlias = tuple[PeerId | None, ...]  # the replicas from which a checker gets its inputs


@dataclass(frozen=True, slots=True)
class HopId:
    """A hop: microbatch `index` of a step at a stage."""

    step: int
    stage: int
    index: int

    def __str__(self) -> str:
        return f"step {self.step}, microbatch {self.index}, stage {self.stage}"

    @classmethod
    def of(cls, event: Accumulated | Checked) -> HopId:
        return cls(event.microbatch.step, event.stage, event.microbatch.index)


@dataclass(frozen=True, slots=True)
class Work:
    """Hashes of a replica's inputs (x, g) and results (y, dx, the loss) at one hop; "" where there is nothing.

    From the same inputs all replicas compute the same results, bit for bit.
    """

    x: str
    y: str
    g: str
    dx: str
    finite: bool
    loss: str  # as text: NaN is like NaN

    @classmethod
    def of(cls, event: Accumulated | Checked) -> Work:
        x, y, g, dx = event.digests
        return cls(x, y, g, dx, event.finite, repr(event.loss))

    @property
    def inputs(self) -> tuple[str, str]:
        return self.x, self.g

    @property
    def results(self) -> tuple[str, str, bool, str]:
        return self.y, self.dx, self.finite, self.loss

    def result_unlike(self, other: Work) -> tuple[str, str]:
        """The first result in which they differ, and this one's value there."""
        if self.y != other.y:
            return "output y", self.y[:SHOWN]
        if self.dx != other.dx:
            return "gradient dx", self.dx[:SHOWN]
        return ("loss", self.loss) if self.loss != other.loss else ("finiteness", str(self.finite).lower())


@dataclass(slots=True)
class HopCase:
    """A hop that is checked."""

    hop: HopId
    holder: PeerId  # whose gradient counts
    device: str  # of the holder: others may round differently
    guard: str
    again: dict[PeerId, Work] = field(default_factory=dict)  # second words, where no other replica can decide
    near: tuple[Hop | None, ...] = ()  # hops beside this one as they were when it was asked about


HopInquiry: TypeAlias = Inquiry[HopCase, Work]  # the words are about the same inputs


class HopAudit(ReplicaAudit):
    """The audit of the hops of one job."""

    def __init__(self, state: BrainState, strikes: Strikes, rng: Random) -> None:
        self._state, self._strikes = state, strikes
        self._rate = state.settings.spot_check
        self._rng = Random(rng.getrandbits(64))
        self._claims: dict[int, dict[HopId, dict[PeerId, Work]]] = {}  # by step, also those that became void
        self._touched: set[tuple[int, int]] = set()  # microbatches about which something was said
        self._silent: dict[tuple[PeerId, int], list[tuple[float, Beside]]] = {}  # overdue answers, by checker and stage
        self._unchecked: set[tuple[PeerId, str]] = set()  # replicas that were said to go unchecked, and why
        self._drawn: set[tuple[HopId, PeerId]] = set()
        self._open: dict[HopId, HopInquiry] = {}
        self._number = 0

    # What replicas say -------------------------------------------------------------------------------------------

    def hear(self, peer: PeerId, event: Event | Stored, now_s: float) -> bool:
        match event:
            case Accumulated():
                self._accumulated(peer, event)
                return True
            case Checked():
                return self._checked(peer, event)
        return False

    def _accumulated(self, peer: PeerId, event: Accumulated) -> None:
        """Note a replica's report on a hop whose gradient it has added."""
        hop, run = HopId.of(event), self._state.progress.runs.get(event.microbatch.step)
        if run is not None and run.can_be_redone:
            self._claims.setdefault(hop.step, {}).setdefault(hop, {})[peer] = Work.of(event)
            self._drawn.discard((hop, peer))
            self._touched.add((hop.step, hop.index))

    def _checked(self, peer: PeerId, event: Checked) -> bool:
        """A replica has computed a hop again, or cannot. Ignores answers to older requests."""
        inquiry = self._open.get(HopId.of(event))
        if inquiry is None or not inquiry.awaits(peer, event.number):
            return False
        case = inquiry.about
        if event.fault:
            inquiry.gave_up()
        elif Work.of(event).inputs != next(iter(inquiry.said.values())).inputs:
            inquiry.gave_up()
            told = f"{peer} was given other inputs than {case.holder} to check {case.hop} with"
            self._state.outbox.note("warning", told)
        elif peer in inquiry.said:
            case.again[peer], inquiry.asked = Work.of(event), None
        else:
            inquiry.answered(peer, Work.of(event))
        return True

    def word(self, hop: HopId, peer: PeerId) -> Work | None:
        """The report of a replica on a hop."""
        return self._claims.get(hop.step, {}).get(hop, {}).get(peer)

    def dispute(self, hop: HopId, holder: PeerId, said: dict[PeerId, Work], guard: str) -> None:
        """Open an inquiry into a hop with these reports."""
        if hop not in self._open:
            pool = self._state.pool
            device = pool[holder].replica.device if holder in pool else ""
            self._open[hop] = Inquiry(HopCase(hop, holder, device, guard), said)

    # What follows ------------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> list[Remedy]:
        """Compare reports, draw checks and ask for them. Returns remedies for replicas that are wrong."""
        found: list[Remedy] = []
        for step, index in sorted(self._touched):
            found = found or self._look_at(step, index, now_s)
        self._touched.clear()
        for hop in list(self._open):
            found = found or self._go_on(self._open[hop], now_s)
        if found:
            self._forget_undecided()
        return found

    def waiting_for(self, step: int) -> str:
        open_ = [inquiry for hop, inquiry in self._open.items() if hop.step == step]
        if not open_:
            return ""
        asked = sorted({inquiry.asked for inquiry in open_ if inquiry.asked is not None})
        return f"waits for {counted(len(open_), 'spot check')} by {listed(asked) or 'nobody yet'}"

    def close(self, step: int) -> None:
        self._claims.pop(step, None)
        self._drawn = {drawn for drawn in self._drawn if drawn[0].step > step}

    def times_s(self) -> list[float]:
        return [inquiry.due_s for inquiry in self._open.values() if inquiry.asked is not None]

    # Comparing ---------------------------------------------------------------------------------------------------

    def _look_at(self, step: int, index: int, now_s: float) -> list[Remedy]:
        """Compare new reports on a microbatch: first on one hop, then between neighbours; then draw checks."""
        claims, ledger = self._claims.get(step, {}), self._state.ledger
        if step not in ledger.open_steps():
            return []
        hops = [HopId(step, stage, index) for stage in range(ledger.stages)]
        for hop in hops:
            self._compare_repeated(hop, claims.get(hop, {}))
        words: list[tuple[PeerId, Work]] = []
        for hop in hops:
            holder = ledger.holder(step, hop.stage, index)
            if holder is None or holder not in claims.get(hop, {}):
                return []  # not complete, or from before a restart of the scheduler
            words.append((holder, claims[hop][holder]))
        for hop, (one, made), (other, took) in zip(hops, words, words[1:], strict=False):
            for what, left, right in (("y", made.y, took.x), ("dx", made.g, took.dx)):
                if left != right:
                    maker = hop if what == "y" else HopId(step, hop.stage + 1, index)
                    return self._contradict(maker, what, one, other, (left, right), now_s)
        for hop, (holder, work) in zip(hops, words, strict=True):
            if (hop, holder) not in self._drawn:
                self._drawn.add((hop, holder))
                if self._rng.random() < self._rate:
                    self.dispute(hop, holder, {holder: work}, SPOT_CHECK)
        return []

    def _compare_repeated(self, hop: HopId, said: dict[PeerId, Work]) -> None:
        """Open an inquiry if replicas that did one hop from the same inputs report different results."""
        holder = self._state.ledger.holder(hop.step, hop.stage, hop.index)
        if holder not in said or len(said) < 2:
            return
        alike = {peer: work for peer, work in said.items() if work.inputs == said[holder].inputs}
        if len({work.results for work in alike.values()}) > 1:
            self.dispute(hop, holder, {holder: said[holder], **alike}, REPEATED)

    def _contradict(
        self, maker: HopId, what: str, one: PeerId, other: PeerId, hashes: tuple[str, str], now_s: float
    ) -> list[Remedy]:
        """Two neighbours report one tensor differently: either may lie, or another replica had the hop before."""
        left, right = (text[:SHOWN] or "nothing" for text in hashes)
        told = f"{what} of {maker} is {left} as {one} says, and {right} as {other} says"
        ledger = self._state.ledger
        self._state.links.accuse(one, other, now_s)
        stages = range(max(0, maker.stage - 1), min(maker.stage + 2, ledger.stages))
        if any(len(ledger.asked(maker.step, stage, maker.index)) > 1 for stage in stages):
            return [StartOver(told)]
        return self._strikes.contradict(one, other, told, NEIGHBOURS, now_s)

    # Asking ------------------------------------------------------------------------------------------------------

    def _go_on(self, inquiry: HopInquiry, now_s: float) -> list[Remedy]:
        """Advance an inquiry: close it, decide it, or ask another replica."""
        case, ledger = inquiry.about, self._state.ledger
        hop = case.hop
        if hop.step not in ledger.open_steps() or ledger.holder(hop.step, hop.stage, hop.index) != case.holder:
            del self._open[hop]  # the work that it was about is void
            return []
        if inquiry.asked is not None and case.near != self._near(hop):
            inquiry.asked = None  # the inputs are elsewhere now
        if inquiry.asked is not None and now_s >= inquiry.due_s:
            self._silent.setdefault((inquiry.asked, hop.stage), []).append((now_s, _beside(case.near)))
        if inquiry.waits(now_s, self._state.pool.may_answer):
            return []
        candidates = _candidates(inquiry, self._able(case, now_s))
        match vote(_results(inquiry.said), may_ask=bool(candidates)):
            case InquiryState.ASKS:
                if None not in ledger.hops(hop.step, hop.index):
                    self._ask(inquiry, self._rng.choice(candidates), now_s)
                    return []
                if self._state.progress.runs[hop.step].can_be_redone:
                    return []  # the neighbours are not known yet
                self._leave_unchecked(inquiry)  # a decided step is not routed again
            case InquiryState.ALIKE:
                self._strikes.counts[case.holder] += 1
            case InquiryState.ODD:
                self._strikes.counts[case.holder] += 1
                odd = outvoted(_results(inquiry.said))
                return self._strikes.prove({peer: _evidence(case, peer, inquiry.said) for peer in odd}, now_s)
            case InquiryState.SPLIT:
                return self._split(inquiry, now_s)
            case InquiryState.UNANSWERED:
                self._leave_unchecked(inquiry)
        del self._open[hop]
        return []

    def _split(self, inquiry: HopInquiry, now_s: float) -> list[Remedy]:
        """Without a majority, a replica that contradicts itself is wrong."""
        case, said = inquiry.about, inquiry.said
        if (peer := inconstant(said, case.again)) is not None:
            what, first = said[peer].result_unlike(case.again[peer])
            _, then = case.again[peer].result_unlike(said[peer])
            text = f"{what} of {case.hop} was {first}, and {then} when it computed it again"
            return self._strikes.convict(peer, text, now_s, is_proven=False)
        return self._strikes.undecided(_evidence(case, case.holder, said), said)

    def _leave_unchecked(self, inquiry: HopInquiry) -> None:
        """Log that no replica has computed the hop again, once for each holder and cause."""
        holder = inquiry.about.holder
        why = "who was asked gave no answer" if inquiry.tries else "no other replica of the stage could"
        if (holder, why) not in self._unchecked:
            self._unchecked.add((holder, why))
            more = "(others of its hops may follow, without a word here)"
            self._state.outbox.note("info", f"{inquiry.about.hop} of {holder} is not checked: {why} {more}")

    def _able(self, case: HopCase, now_s: float) -> list[PeerId]:
        """Replicas that can compute the hop on the holder's kind of device, and were not silent too often."""
        pool, hop, near = self._state.pool, case.hop, _beside(self._near(case.hop))
        return [
            peer
            for peer in sorted(pool.by_stage[hop.stage])
            if pool.may_work(peer)
            and pool.takes_part(peer, hop.step)
            and (not case.device or pool[peer].replica.device == case.device)
            and not self._rests(peer, hop.stage, near, now_s)
        ]

    def _rests(self, checker: PeerId, stage: int, near: Beside, now_s: float) -> bool:
        """Whether a checker was silent too often to be asked now: beside these neighbours, or at all.

        If a neighbour keeps its tensor back, an honest checker is silent. So silence counts per pair of neighbours. It
        is the checker's own fault if one neighbour on each side does not explain all of it.
        """
        late = [late for late in self._silent.pop((checker, stage), ()) if now_s - late[0] < SILENT_S]
        if late:
            self._silent[checker, stage] = late
        times = Counter(beside for _, beside in late)
        return times[near] >= SILENT_MAX or (times.total() >= SILENT_MAX and not _explained(set(times)))

    def _near(self, hop: HopId) -> tuple[Hop | None, ...]:
        hops = self._state.ledger.hops(hop.step, hop.index)
        return tuple(hops[at] for at in (hop.stage - 1, hop.stage + 1) if 0 <= at < len(hops))

    def _ask(self, inquiry: HopInquiry, checker: PeerId, now_s: float) -> None:
        case = inquiry.about
        case.near = self._near(case.hop)
        inquiry.ask(checker, self.next_number(), now_s)
        self.send(case.hop, checker, self._number)

    def next_number(self) -> int:
        """The number of a new request."""
        self._number += 1
        return self._number

    def send(self, hop: HopId, checker: PeerId, number: int) -> None:
        """Order a replica to compute a hop again, and its neighbours to send what they hold."""
        state = self._state
        hops, replica = state.ledger.hops(hop.step, hop.index), state.pool[checker].replica
        hops[hop.stage] = Hop(checker, replica.incarnation, state.ledger.attempt(hop.step), replica.address)
        route = tuple(hop for hop in hops if hop is not None)
        microbatch = Microbatch(state.settings.timeline, hop.step, hop.index)
        command = Check(microbatch, state.version_of(hop.step, hop.index), hop.stage, number, route)
        for peer in (checker, *(hop.peer for hop in self._near(hop) if hop is not None)):
            state.outbox.send(peer, command)

    def _forget_undecided(self) -> None:
        """Forget reports and inquiries of steps without a row, which are computed again."""
        for run in self._state.progress.undecided():
            self._claims.pop(run.step, None)
            self._drawn = {drawn for drawn in self._drawn if drawn[0].step != run.step}
            self._open = {hop: inquiry for hop, inquiry in self._open.items() if hop.step != run.step}


def _candidates(inquiry: HopInquiry, others: list[PeerId]) -> list[PeerId]:
    """The replicas that may be asked: fresh ones; if two differ and there is no third, both once more."""
    fresh = inquiry.next_ones(others)
    if fresh or len(inquiry.said) != 2 or inquiry.tries >= TRIES_MAX:
        return fresh
    return [peer for peer in inquiry.said if peer not in inquiry.about.again and peer in others]


def inconstant(said: Mapping[PeerId, Work], again: Mapping[PeerId, Work]) -> PeerId | None:
    """The replica, of two, that computes different results from the same inputs; None if there is not exactly one."""
    if said.keys() != again.keys() or any(again[peer].inputs != work.inputs for peer, work in said.items()):
        return None
    found = [peer for peer, work in said.items() if again[peer].results != work.results]
    return found[0] if len(found) == 1 else None


def _results(said: Mapping[PeerId, Work]) -> dict[PeerId, tuple[str, str, bool, str]]:
    return {peer: work.results for peer, work in said.items()}


def _evidence(case: HopCase, peer: PeerId, said: Mapping[PeerId, Work]) -> str:
    """A replica's result against the others'."""
    others = [other for other in sorted(said) if said[other].results != said[peer].results]
    what, mine = said[peer].result_unlike(said[others[0]])
    _, theirs = said[others[0]].result_unlike(said[peer])
    alike = [other for other in others if said[other].results == said[others[0]].results]
    got = " and ".join(alike) if len(alike) < 3 else listed(alike)
    return f"{what} of {case.hop} was {mine}, {got} got {theirs} ({case.guard})"


def _beside(near: tuple[Hop | None, ...]) -> Beside:
    return tuple(None if hop is None else hop.peer for hop in near)


def _explained(besides: Set[Beside]) -> bool:
    """Whether one neighbour on either side is part of every pair."""
    suspects = product(*map(set, zip(*besides, strict=True)))
    return any(all(any(map(eq, pair, beside)) for beside in besides) for pair in suspects)
